"""Tasks committed with the rows of an SQL database, and published afterwards, once each.

Model. A row of the table is a signature in JSON with an id. It is

* *waiting*: written in the application's own SQL transaction, so it is there if and only if the rest is;
* *claimed*: its moment ``due`` lies ahead for a lease, while a relay publishes it;
* *gone*: deleted once the broker has it;
* *poison*: its publishing failed :data:`MOST_ATTEMPTS` times by its own fault; ``due`` is null, ``error`` says why.

A relay killed after it claimed: the row is due again after the lease. Killed after it published and before it deleted:
it is published again, and the store drops it, because a message's dedup id is the row's id and its number there.
So several relays may run at once. A broker that does not answer counts against no row.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import closing
from typing import Any

from celery import Celery
from celery.canvas import Signature
from kombu.exceptions import OperationalError
from kombu.utils.json import dumps

from celery_fdb.publishing import everywhere
from kombu_fdb.clock import SystemClock, random_id

__all__ = ["LEASE_S", "MOST_ATTEMPTS", "Outbox"]

logger = logging.getLogger(__name__)

LEASE_S = 30.0
MOST_ATTEMPTS = 5
#: How long a row's messages are remembered by the store, in seconds.
DEDUP_WINDOW_S = 7 * 86_400.0
#: Portable: SQLite, PostgreSQL, MySQL.
DDL = """
CREATE TABLE celery_outbox (
    id VARCHAR(32) PRIMARY KEY,
    signature TEXT NOT NULL,
    due DOUBLE PRECISION,
    attempts INTEGER NOT NULL DEFAULT 0,
    error TEXT
)
"""


class Outbox:
    """``connect`` opens a DB-API connection of the relay's own; ``mark`` is its placeholder, ``?`` or ``%s``."""

    def __init__(self, app: Celery, connect: Callable[[], Any], mark: str = "?") -> None:
        self.app = app
        self._connect = connect
        self._mark = mark
        self._clock = SystemClock()

    def add(self, cursor: Any, signature: Signature) -> Any:
        """Write the task into the transaction of ``cursor``; its result. Raises ``TypeError`` for what is no JSON.

        A ``countdown`` counts from when it is published.
        """
        signature = signature.clone()
        result = signature.freeze()
        row = (random_id().hex(), dumps(signature), self._now())
        self._run(cursor, "INSERT INTO celery_outbox (id, signature, due) VALUES (?, ?, ?)", *row)
        return result

    def relay(self, limit: int = 100) -> int:
        """Publish up to ``limit`` rows that are due. Returns how many. Raises ``OperationalError`` of kombu's."""
        with closing(self._connect()) as connection:
            rows = self._claim(connection, limit)
            return sum(self._publish(connection, *row) for row in rows)

    def _claim(self, connection: Any, limit: int) -> list[tuple[str, str]]:
        cursor, now = connection.cursor(), self._now()
        query = f"SELECT id, signature, due FROM celery_outbox WHERE due <= ? ORDER BY due LIMIT {int(limit)}"  # noqa: S608
        self._run(cursor, query, now)
        claimed = []
        for row_id, text, due in cursor.fetchall():
            self._run(cursor, "UPDATE celery_outbox SET due = ? WHERE id = ? AND due = ?", now + LEASE_S, row_id, due)
            if cursor.rowcount:
                claimed.append((row_id, text))
        connection.commit()
        return claimed

    def _publish(self, connection: Any, row_id: str, text: str) -> bool:
        cursor = connection.cursor()
        try:
            self._send(row_id, Signature.from_dict(json.loads(text), app=self.app))
        except OperationalError:
            raise
        except Exception as error:  # whatever is wrong with this row, the others go on
            logger.exception("outbox row %s can't be published", row_id)
            change = (
                "UPDATE celery_outbox SET attempts = attempts + 1, error = ?, "
                "due = CASE WHEN attempts + 1 >= ? THEN NULL ELSE due END WHERE id = ?"
            )
            self._run(cursor, change, repr(error), MOST_ATTEMPTS, row_id)
            connection.commit()
            return False
        self._run(cursor, "DELETE FROM celery_outbox WHERE id = ?", row_id)
        connection.commit()
        return True

    def _send(self, row_id: str, signature: Signature) -> None:
        with self.app.producer_pool.acquire(block=True) as producer:
            once = _Once(producer, row_id)
            with everywhere(self.app, once):
                signature.apply_async(producer=once)

    def _run(self, cursor: Any, statement: str, *values: Any) -> None:
        cursor.execute(statement.replace("?", self._mark), values)

    def _now(self) -> float:
        return self._clock.wall_ms() / 1000


class _Once:
    """A producer whose messages have the row's dedup ids."""

    def __init__(self, producer: Any, row_id: str) -> None:
        self._producer = producer
        self._row_id = row_id
        self._published = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, headers: dict[str, Any] | None = None, **options: Any) -> Any:
        self._published += 1
        ids = {"dedup_id": f"outbox:{self._row_id}:{self._published}", "dedup_window": DEDUP_WINDOW_S}
        return self._producer.publish(body, headers={**ids, **(headers or {})}, **options)
