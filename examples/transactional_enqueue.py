"""An order and its task, committed together or not at all.

Needs FoundationDB: python examples/transactional_enqueue.py [CLUSTER_FILE]
"""

from __future__ import annotations

import sys

import fdb
from celery import Celery

from celery_fdb import enqueue, install
from kombu_fdb import Broker

fdb.api_version(730)
CLUSTER_FILE = sys.argv[1] if len(sys.argv) > 1 else None
OPTIONS = {"namespace": "transactional-enqueue", "cluster_file": CLUSTER_FILE}
app = install(Celery("shop", broker="fdb://"))
app.conf.broker_transport_options = OPTIONS
db = fdb.open(CLUSTER_FILE)
orders = fdb.Subspace(("shop", "orders"))


@app.task
def confirm(number: int) -> None:
    """Sends the confirmation."""


@fdb.transactional
def place(tr: fdb.Transaction, number: int, *, paid: bool) -> None:
    tr[orders[number]] = b"placed"
    enqueue(tr, confirm, (number,), dedup_id=f"order-{number}")
    if not paid:
        raise ValueError("not paid")


del db[orders.range()]
with Broker.open("fdb://", **OPTIONS) as broker:
    broker.queue("celery").purge()
    place(db, 1, paid=True)
    try:
        place(db, 2, paid=False)
    except ValueError as error:
        print(f"order 2: {error}")
    rows = sum(1 for _ in db[orders.range()])
    print(f"{rows} order and {broker.queue('celery').count()} task are stored")
