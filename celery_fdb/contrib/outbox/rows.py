"""The table of an outbox, in SQL that SQLite, PostgreSQL and MySQL understand.

A row is *waiting* if its ``due_ms`` (milliseconds since 1970) is past, *claimed* if a relay has put it ahead by a
lease, *poison* if it is null. What a relay does to a row it claimed, except deleting it, counts only while ``due_ms``
is still what it wrote: later, the row is another relay's.

The database's clock decides what is past, in the statement's own transaction: relays on hosts whose clocks differ agree
about each lease. A new row is due at 0, so its writer's clock decides nothing but its place among other new ones.

Where the database has ``FOR UPDATE SKIP LOCKED``, relays that claim at the same moment take different rows without
waiting for each other; elsewhere the conditional update lets one of them have a row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import Any, NamedTuple

from kombu_fdb.errors import OptionError

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

#: The database's clock in milliseconds since 1970: for SQLite, PostgreSQL, and MySQL and MariaDB.
CLOCKS = (
    "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
    "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)",
    "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) DIV 1000",
)

_MARKS = {"qmark": "?", "format": "%s", "pyformat": "%s"}


class Row(NamedTuple):
    """A claimed row: ``due_ms`` is what it was before, ``lease_ms`` what it is now."""

    id: str
    signature: str
    attempts: int
    due_ms: int
    lease_ms: int


class Rows:
    """``transaction`` gives a cursor in a transaction, which it commits; ``mark`` is the driver's placeholder."""

    def __init__(
        self,
        transaction: Callable[[], AbstractContextManager[Any]],
        mark: str,
        clock: str,
        *,
        skip_locked: bool = False,
    ) -> None:
        """``clock``: an expression for the time in milliseconds, one of :data:`CLOCKS`."""
        self._transaction = transaction
        self._mark = mark
        self.clock = clock
        self.skip_locked = skip_locked

    @classmethod
    def of(cls, connection: Any, mark: str | None, clock: str | None, skip_locked: bool | None) -> Rows:
        """Through a DB-API connection; what is None is asked of it. Raises its errors, and ``OptionError``."""
        if skip_locked is None:
            skip_locked = has_skip_locked(connection)
        clock = clock or clock_of(connection)
        return cls(partial(in_transaction, connection), mark or mark_of(connection), clock, skip_locked=skip_locked)

    def claim(self, limit: int, lease_ms: int, ids: Sequence[str] = ()) -> list[Row]:
        """Claim the rows that have been due for longest, or those of ``ids``. Each is the caller's for ``lease_ms``."""
        query = "SELECT id, signature, attempts, due_ms FROM celery_outbox WHERE due_ms <= ?"
        if ids:
            query += f" AND id IN ({', '.join('?' * len(ids))})"
        query += " ORDER BY due_ms, created_ms LIMIT ?"
        if self.skip_locked:
            query += " FOR UPDATE SKIP LOCKED"
        with self._transaction() as cursor:
            now_ms = self._now(cursor)
            self._run(cursor, query, now_ms, *ids, limit)
            found = [Row._make((*values, now_ms + lease_ms)) for values in cursor.fetchall()]
            return [row for row in found if self._move(cursor, row, row.due_ms, row.lease_ms)]

    def release(self, rows: Sequence[Row]) -> None:
        """Put the rows back as they were before they were claimed."""
        with self._transaction() as cursor:
            for row in rows:
                self._move(cursor, row, row.lease_ms, row.due_ms)

    def delete(self, rows: Sequence[Row]) -> None:
        with self._transaction() as cursor:
            marks = ", ".join("?" * len(rows))
            self._run(cursor, f"DELETE FROM celery_outbox WHERE id IN ({marks})", *(row.id for row in rows))  # noqa: S608

    def fail(self, row: Row, error: str, pause_ms: int | None) -> None:
        """One more attempt has failed; the next is due after a pause, or never."""
        statement = (
            "UPDATE celery_outbox SET attempts = attempts + 1, error = ?, due_ms = ? WHERE id = ? AND due_ms = ?"
        )
        with self._transaction() as cursor:
            due_ms = None if pause_ms is None else self._now(cursor) + pause_ms
            self._run(cursor, statement, error, due_ms, row.id, row.lease_ms)

    def has_due(self) -> bool:
        with self._transaction() as cursor:
            self._run(cursor, "SELECT id FROM celery_outbox WHERE due_ms <= ? LIMIT 1", self._now(cursor))
            return bool(cursor.fetchall())

    def count_failed(self) -> int:
        """Rows that could not be published at least once, poison or not."""
        with self._transaction() as cursor:
            self._run(cursor, "SELECT COUNT(*) FROM celery_outbox WHERE attempts > 0")
            return int(cursor.fetchone()[0])

    def retry_poison(self) -> int:
        """Have poison rows tried again, as if they were new. Returns how many."""
        with self._transaction() as cursor:
            self._run(cursor, "UPDATE celery_outbox SET due_ms = 0, attempts = 0 WHERE due_ms IS NULL")
            return int(cursor.rowcount)

    def _now(self, cursor: Any) -> int:
        self._run(cursor, f"SELECT {self.clock}")
        return int(cursor.fetchone()[0])

    def _move(self, cursor: Any, row: Row, due_ms: int, to_ms: int) -> bool:
        self._run(cursor, "UPDATE celery_outbox SET due_ms = ? WHERE id = ? AND due_ms = ?", to_ms, row.id, due_ms)
        return bool(cursor.rowcount)

    def _run(self, cursor: Any, statement: str, *values: Any) -> None:
        cursor.execute(statement.replace("?", self._mark), values)


def insert(cursor: Any, mark: str | None, row_id: str, signature: str, now_ms: int) -> None:
    """Insert a row in the caller's transaction. ``now_ms``: by the writer's clock, for people and for the order."""
    statement = (
        "INSERT INTO celery_outbox (id, signature, created_ms, due_ms, attempts, error) VALUES (?, ?, ?, 0, 0, NULL)"
    )
    marked = statement.replace("?", mark or mark_of(cursor))
    cursor.execute(marked, (row_id, signature, now_ms))


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
        fix = "Pass it: Outbox(app, connect, mark='?') or mark='%s'."
        raise OptionError("this SQL driver's placeholder is unknown", driver=packages[0], fix=fix)
    return mark


def has_skip_locked(connection: Any) -> bool:
    """Ask the database. Raises its error if the table is missing."""
    query = "SELECT id FROM celery_outbox WHERE 1 = 0"
    with in_transaction(connection) as cursor:
        cursor.execute(query)
        cursor.fetchall()
    return _can_run(connection, f"{query} FOR UPDATE SKIP LOCKED")


def clock_of(connection: Any) -> str:
    """How to ask this database for the time. Raises ``OptionError`` if it is not one of the known ones."""
    found = next((each for each in CLOCKS if _can_run(connection, f"SELECT {each}")), None)
    if found is None:
        fix = "It is known for SQLite, PostgreSQL, MySQL and MariaDB. Pass yours: Outbox(app, connect, clock='...')."
        raise OptionError("unknown SQL expression for the time of this database", fix=fix)
    return found


def _can_run(connection: Any, query: str) -> bool:
    try:
        with in_transaction(connection) as cursor:
            cursor.execute(query)
            cursor.fetchall()
    except Exception:  # noqa: BLE001 - each driver has classes of its own
        return False
    return True
