"""The shop's Celery application: orders, photos, reports; and a payment service that can be out of order.

Each task notes in a journal that it ran, so that the tour can tell afterwards that none was lost.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from celery import Celery, chain, group

import celery_fdb

HOME = Path(os.environ["TOUR_HOME"])
JOURNAL = HOME / "journal"
#: While it exists, nobody can pay.
OUT_OF_ORDER = HOME / "payments-are-down"

CUSTOMERS = ("globex", "hooli", "initech", "umbrella", "wonka")

app = Celery("shop", broker=os.environ["TOUR_BROKER"], backend=os.environ["TOUR_BROKER"])
celery_fdb.install(app, history=True)
app.conf.task_default_queue = "shop"
app.conf.task_acks_late = True  # what a killed worker had begun runs again
app.conf.worker_prefetch_multiplier = 2
app.conf.broker_transport_options = {"session_ttl": 4}  # a dead worker's messages are back after that; by default 30 s
app.conf.beat_schedule = {"nightly report": {"task": "shop.report", "schedule": 86_400.0}}


class PaymentServiceDown(Exception):
    """It does not answer."""


def note(what: str, sent_s: float) -> None:
    """One line, appended at once: whoever is killed leaves a whole line or none."""
    line = f"{what}\t{time.time() - sent_s:.3f}\n".encode()
    journal = os.open(JOURNAL, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(journal, line)
    finally:
        os.close(journal)


@app.task(
    name="shop.pay",
    fair_key="customer",
    autoretry_for=(PaymentServiceDown,),
    max_retries=2,
    backoff="1/2s",
    dead_letter=True,
)
def pay(customer: str, order: int, sent_s: float) -> int:
    if OUT_OF_ORDER.exists():
        raise PaymentServiceDown("the payment service does not answer")
    note(f"pay {order}", sent_s)
    return order


@app.task(name="shop.pack", fair_key="customer")
def pack(order: int, customer: str, sent_s: float) -> int:
    note(f"pack {order}", sent_s)
    return order


@app.task(name="shop.mail", fair_key="customer")
def mail(order: int, customer: str, sent_s: float) -> None:
    note(f"mail {order}", sent_s)


@app.task(name="shop.resize", fair_key="customer")
def resize(customer: str, photo: int, sent_s: float) -> None:
    """Of a photo; two hundredths of a second."""
    time.sleep(0.02)
    note(f"resize {photo}", sent_s)


@app.task(name="shop.stocktaking")
def stocktaking(shelf: int, sent_s: float) -> None:
    """Takes long, so a worker can be killed in the middle of it."""
    note(f"begin {shelf}", sent_s)
    time.sleep(2)
    note(f"stocktaking {shelf}", sent_s)


@app.task(name="shop.report")
def report() -> None:
    """Each night."""


def order(number: int) -> tuple[str, list[str]]:
    """Somebody buys something: it is paid, and then packed while a mail is sent.

    Returns the id of the payment, and what the journal will say of the order.
    """
    customer, now_s = CUSTOMERS[number % len(CUSTOMERS)], time.time()
    after = group(pack.s(customer, now_s), mail.s(customer, now_s))
    rest = chain(pay.s(customer, number, now_s), after).delay()
    return rest.parent.id, [f"{task} {number}" for task in ("pay", "pack", "mail")]
