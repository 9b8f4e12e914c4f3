"""The shop's Celery application: orders, photos, a stocktaking, and a payment service that can be out of order.

Each task notes in a journal that it ran, so that the tour can tell afterwards that none was lost.
"""

from __future__ import annotations

import math
import os
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from celery import Celery, chain, chord, group

import celery_fdb

HOME = Path(os.environ["TOUR_HOME"])
JOURNAL = HOME / "journal"
#: While it exists, all payments fail.
OUT_OF_ORDER = HOME / "payments-are-down"
#: This file exists once the process of a stocktaking was killed.
KILLED = HOME / "killed"

CUSTOMERS = ("globex", "hooli", "initech", "umbrella", "wonka")
#: Seconds from an order to its survey.
SURVEY_S = 3

app = Celery("shop", broker=os.environ["TOUR_BROKER"], backend=os.environ["TOUR_BROKER"])
celery_fdb.install(app, history=True)
app.conf.task_default_queue = "shop"
app.conf.task_acks_late = True  # what a killed worker had begun runs again,
app.conf.task_reject_on_worker_lost = True  # and so does what one of its processes had begun
app.conf.worker_prefetch_multiplier = 2
app.conf.broker_transport_options = {"session_ttl": 4}  # a dead worker's messages are back after that; by default 30 s
app.conf.beat_schedule = {"nightly report": {"task": "shop.report", "schedule": 86_400.0}}


class PaymentServiceDown(Exception):
    """The payment service does not answer."""


def note(what: str, since_s: float) -> None:
    """Append one line at once: a process that is killed leaves a whole line or none."""
    line = f"{what}\t{time.time() - since_s:.6f}\t{os.getpgrp()}\n".encode()
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
        note(f"try {order}", sent_s)
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


@app.task(name="shop.survey", fair_key="customer")
def survey(customer: str, order: int, due_s: float) -> None:
    """Note how long after its ETA it runs."""
    note(f"survey {order}", due_s)


@app.task(name="shop.resize", fair_key="customer")
def resize(customer: str, photo: int, sent_s: float) -> None:
    """Resize a photo, which takes two hundredths of a second."""
    time.sleep(0.02)
    note(f"resize {photo}", sent_s)


@app.task(name="shop.stocktaking")
def stocktaking(shelf: int, sent_s: float) -> int:
    """Take long, so that a worker can be killed meanwhile. On the first shelf, the task's process is killed."""
    note(f"begin {shelf}", sent_s)
    if shelf == 0 and not KILLED.exists():
        KILLED.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2)
    note(f"stocktaking {shelf}", sent_s)
    return articles(shelf)


@app.task(name="shop.inventory")
def inventory(counted: list[int], sent_s: float) -> int:
    note("inventory 0", sent_s)
    return sum(counted)


@app.task(name="shop.report")
def report() -> None:
    """The report of each night."""


def articles(shelf: int) -> int:
    return 100 + shelf


def order(number: int) -> tuple[str, list[str]]:
    """A customer buys something: it is paid, and then packed while a mail is sent; a survey follows later.

    Returns the id of the payment, and what the journal will say of the order.
    """
    customer, now_s = CUSTOMERS[number % len(CUSTOMERS)], time.time()
    after = group(pack.s(customer, now_s), mail.s(customer, now_s))
    rest = chain(pay.s(customer, number, now_s), after).delay()
    due_s = math.ceil(now_s + SURVEY_S)
    survey.apply_async((customer, number, due_s), eta=datetime.fromtimestamp(due_s, UTC))
    return rest.parent.id, [f"{task} {number}" for task in ("pay", "pack", "mail", "survey")]


def upload(customer: str, photos: int) -> list[str]:
    """Send all at once, so that none is done while others are sent. Returns the journal's lines of them."""
    now_s = time.time()
    celery_fdb.publish_many(resize.s(customer, photo, now_s) for photo in range(photos))
    return [f"resize {photo}" for photo in range(photos)]


def count_shelves(shelves: int) -> tuple[Any, list[str]]:
    """Publish a chord. Returns its result, and the journal's lines of it."""
    now_s = time.time()
    header = [stocktaking.s(shelf, now_s).set(priority=9) for shelf in range(shelves)]
    result = chord(header)(inventory.s(now_s).set(priority=9))
    return result, [*(f"stocktaking {shelf}" for shelf in range(shelves)), "inventory 0"]
