"""The table of an outbox, in SQL that SQLite, PostgreSQL and MySQL understand.

A row is *waiting* if its ``due_ms`` (milliseconds since 1970) is past, *claimed* if a relay has put it ahead by a
lease, *poison* if it is null. What a relay does to a row it claimed, except deleting it, counts only while ``due_ms``
is still what it wrote: later, the row is somebody else's.

Where the database has ``FOR UPDATE SKIP LOCKED``, relays that claim at the same moment take different rows without
waiting for each other; elsewhere the conditional update lets one of them have a row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any, NamedTuple

from kombu_fdb.errors import OptionError

__all__ = ["DDL", "INDEX_DDL", "TABLE", "Row", "Rows", "has_skip_locked", "in_transaction", "insert", "mark_of"]

TABLE = "celery_outbox"
#: MySQL: ``LONGTEXT`` for signatures of more than 65,535 bytes.
DDL = """
CREATE TABLE celery_outbox (
    id VARCHAR(32) PRIMARY KEY,
    signature TEXT NOT NULL,
    created_ms BIGINT NOT NULL,
    due_ms BIGINT,
    attempts INTEGER NOT NULL,
    error TEXT
)
"""
#: For the day when a million rows wait for a broker that is down.
INDEX_DDL = "CREATE INDEX celery_outbox_due ON celery_outbox (due_ms)"

_MARKS = {"qmark": "?", "format": "%s", "pyformat": "%s"}


class Row(NamedTuple):
    """One that was claimed: ``due_ms`` is what it was before, ``lease_ms`` what it is now."""

    id: str
    signature: str
    attempts: int
    due_ms: int
    lease_ms: int


class Rows:
    """``transaction`` gives a cursor in a transaction, which it commits; ``mark`` is the driver's placeholder."""

    def __init__(
        self, transaction: Callable[[], AbstractContextManager[Any]], mark: str, *, skip_locked: bool = False
    ) -> None:
        self._transaction = transaction
        self._mark = mark
        self._skip_locked = skip_locked

    def claim(self, limit: int, now_ms: int, lease_ms: int, ids: Sequence[str] = ()) -> list[Row]:
        """Those that have been due for longest, or of ``ids``. Each is the caller's until ``now_ms + lease_ms``."""
        query = "SELECT id, signature, attempts, due_ms FROM celery_outbox WHERE due_ms <= ?"
        if ids:
            query += f" AND id IN ({', '.join('?' * len(ids))})"
        query += " ORDER BY due_ms, created_ms LIMIT ?"
        if self._skip_locked:
            query += " FOR UPDATE SKIP LOCKED"
        with self._transaction() as cursor:
            self._run(cursor, query, now_ms, *ids, limit)
            found = [Row._make((*values, now_ms + lease_ms)) for values in cursor.fetchall()]
            return [row for row in found if self._move(cursor, row, row.due_ms, row.lease_ms)]

    def give_back(self, rows: Sequence[Row]) -> None:
        """As they were before they were claimed."""
        with self._transaction() as cursor:
            for row in rows:
                self._move(cursor, row, row.lease_ms, row.due_ms)

    def delete(self, rows: Sequence[Row]) -> None:
        with self._transaction() as cursor:
            marks = ", ".join("?" * len(rows))
            self._run(cursor, f"DELETE FROM celery_outbox WHERE id IN ({marks})", *(row.id for row in rows))  # noqa: S608

    def fail(self, row: Row, error: str, due_ms: int | None) -> None:
        """One more attempt was in vain; the next is due at ``due_ms``, or never."""
        statement = (
            "UPDATE celery_outbox SET attempts = attempts + 1, error = ?, due_ms = ? WHERE id = ? AND due_ms = ?"
        )
        with self._transaction() as cursor:
            self._run(cursor, statement, error, due_ms, row.id, row.lease_ms)

    def has_due(self, now_ms: int) -> bool:
        with self._transaction() as cursor:
            self._run(cursor, "SELECT id FROM celery_outbox WHERE due_ms <= ? LIMIT 1", now_ms)
            return bool(cursor.fetchall())

    def count_failed(self) -> int:
        """Rows that could not be published at least once, poison or not."""
        with self._transaction() as cursor:
            self._run(cursor, "SELECT COUNT(*) FROM celery_outbox WHERE attempts > 0")
            return int(cursor.fetchone()[0])

    def retry_poison(self, now_ms: int) -> int:
        """Have poison rows tried again, as if they were new. Returns how many."""
        with self._transaction() as cursor:
            self._run(cursor, "UPDATE celery_outbox SET due_ms = ?, attempts = 0 WHERE due_ms IS NULL", now_ms)
            return int(cursor.rowcount)

    def _move(self, cursor: Any, row: Row, due_ms: int, to_ms: int) -> bool:
        self._run(cursor, "UPDATE celery_outbox SET due_ms = ? WHERE id = ? AND due_ms = ?", to_ms, row.id, due_ms)
        return bool(cursor.rowcount)

    def _run(self, cursor: Any, statement: str, *values: Any) -> None:
        cursor.execute(statement.replace("?", self._mark), values)


def insert(cursor: Any, mark: str, row_id: str, signature: str, now_ms: int) -> None:
    """Into the transaction of the caller's cursor."""
    statement = (
        "INSERT INTO celery_outbox (id, signature, created_ms, due_ms, attempts, error) VALUES (?, ?, ?, ?, 0, NULL)"
    )
    cursor.execute(statement.replace("?", mark), (row_id, signature, now_ms, now_ms))


@contextmanager
def in_transaction(connection: Any) -> Iterator[Any]:
    """A cursor of a DB-API connection. Commits; rolls back after an exception."""
    with closing(connection.cursor()) as cursor:
        try:
            yield cursor
        except BaseException:
            connection.rollback()
            raise
        connection.commit()


def mark_of(of: Any) -> str:
    """The placeholder of a DB-API connection or cursor. Raises ``OptionError`` if its driver does not tell."""
    packages = [each.__module__.partition(".")[0] for each in type(of).__mro__]
    styles = [getattr(sys.modules.get(each), "paramstyle", None) for each in packages]
    mark = next((_MARKS[style] for style in styles if style in _MARKS), None)
    if mark is None:
        fix = "Give it: Outbox(app, connect, mark='?') or mark='%s'."
        raise OptionError("the placeholder of this SQL driver is not known", driver=packages[0], fix=fix)
    return mark


def has_skip_locked(connection: Any) -> bool:
    """Asks the database. Raises its error if the table is missing."""
    query = "SELECT id FROM celery_outbox WHERE 1 = 0"
    with in_transaction(connection) as cursor:
        cursor.execute(query)
        cursor.fetchall()
    try:
        with in_transaction(connection) as cursor:
            cursor.execute(f"{query} FOR UPDATE SKIP LOCKED")
            cursor.fetchall()
    except Exception:  # noqa: BLE001 - each driver has classes of its own
        return False
    return True
