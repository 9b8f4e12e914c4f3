"""kill -9 and SIGSTOP of the outbox's relays: each committed order's task runs, and runs once."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from celery_fdb.contrib.outbox import DDL, INDEX_DDL

from .ledger import Verdict
from .stage import PATIENCE_S, Stage, staged
from .strikes import freeze, freeze_until_fenced, kill, rounds_of, strike

#: Orders of one shop process.
ORDERS = 100


def run(rounds: int, seed: int, store: str = "sqlite") -> Verdict:
    with staged("relays", seed, store=store) as stage:
        with closing(sqlite3.connect(stage.env["STORM_SHOP"])) as database:
            for statement in (DDL, INDEX_DDL):
                database.execute(statement)
            database.commit()
        stage.elsewhere = lambda: in_the_outbox(stage)
        stage.worker()
        for how in rounds_of(stage.rng, [kill, freeze, freeze_until_fenced], rounds):
            fill(stage)
            strike(stage, "relay", "ended", how)
        fill(stage)
        return stage.finish()


def in_the_outbox(stage: Stage) -> list[str]:
    with closing(sqlite3.connect(stage.env["STORM_SHOP"], timeout=PATIENCE_S)) as database:
        return [task_id for (task_id,) in database.execute("SELECT id FROM celery_outbox")]


def fill(stage: Stage) -> None:
    """An order to come, and three relays."""
    if not stage.alive("publisher"):
        stage.start("publisher", "-m", "tests.storms.shop", str(ORDERS))
    for _ in range(3 - len(stage.alive("relay"))):
        stage.relay()
