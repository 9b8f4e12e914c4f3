"""Tasks that are committed with the rows of an SQL database, and published afterwards, once each.

Model. A row of the table is a signature in JSON with an id. It is

* *waiting*: written in the application's own SQL transaction, so it exists if and only if the rest does;
* *claimed*: ``due_ms`` is one lease ahead, by the database's clock, while a relay publishes it;
* *gone*: deleted once the broker has it;
* *poison*: publishing it failed :data:`MOST_ATTEMPTS` times through its own fault, with the pauses of :data:`BACKOFF`
  in between; ``due_ms`` is null, ``error`` says why. It stays until a person deletes or retries it.

A relay publishes the rows that it claimed in one transaction of the broker. If a row makes this fail, the relay
publishes them one by one, and each failure counts against its own row. If the broker does not answer, that counts
against no row, and all rows are released at once.

If a relay is killed after it claimed rows, they are due again after the lease. If it is killed after it published and
before it deleted them, or the broker's answer is lost, they are published again, and the store drops them: it knows the
messages by the row's id and their number in it, in addition to a task's own ``dedup_id`` (``once_id`` in
:mod:`kombu_fdb.engine.messages.publish`). It remembers them for :data:`DEDUP_WINDOW_S`, seven days. So a row is
published at least once, and exactly once unless seven days pass between its publishing and the next relay that comes to
delete it. Several relays may run at once.

The table, in SQL that SQLite, PostgreSQL and MySQL understand. A row is *waiting* if its ``due_ms`` (milliseconds since
1970) is past, *claimed* if a relay has put it ahead by a lease, *poison* if it is null. What a relay does to a row it
claimed, except deleting it, counts only while ``due_ms`` is still what it wrote: later, the row is another relay's.

The database's clock decides what is past, in the statement's own transaction: relays on hosts whose clocks differ agree
about each lease. A new row is due at 0, so its writer's clock decides nothing but its place among other new ones.

Where the database has ``FOR UPDATE SKIP LOCKED``, relays that claim at the same moment take different rows without
waiting for each other; elsewhere the conditional update lets one of them have a row.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from celery import Celery
from celery.canvas import Signature
from celery.utils.saferepr import saferepr
from kombu.exceptions import OperationalError
from kombu.utils.json import dumps, loads

from celery_fdb.results import chords
from celery_fdb.tasks.publishing import unrepeated
from kombu_fdb.api.job import backoff_s as seconds
from kombu_fdb.engine.messages.publish import BATCH_MESSAGES
from kombu_fdb.errors import OptionError
from kombu_fdb.primitives.clock import Clock, random_id
from kombu_fdb.primitives.failure import ERROR_LENGTH
from kombu_fdb.primitives.masking import masked_text
from kombu_fdb.transport.batch import batched

__all__ = ["BACKOFF", "DDL", "DEDUP_WINDOW_S", "INDEX_DDL", "LEASE_S", "MOST_ATTEMPTS", "Outbox"]

logger = logging.getLogger(__name__)

# -- the table ---------------------------------------------------------------------------------------------------------


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
#: The index for a table with a million rows, which wait for a broker that is down.
INDEX_DDL = "CREATE INDEX celery_outbox_due ON celery_outbox (due_ms)"

#: The database's clock in milliseconds since 1970: for SQLite, PostgreSQL, and MySQL and MariaDB.
CLOCKS = (
    "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
    "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)",
    "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) DIV 1000",
)

_MARKS = {"qmark": "?", "format": "%s", "pyformat": "%s"}


class ClaimedRow(NamedTuple):
    """A claimed row: ``due_ms`` is what it was before, ``lease_ms`` what it is now."""

    id: str
    signature: str
    attempts: int
    due_ms: int
    lease_ms: int


class OutboxTable:
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
    def of(cls, connection: Any, mark: str | None, clock: str | None, skip_locked: bool | None) -> OutboxTable:
        """The table of a DB-API connection, which is asked for what is None. Raises its errors, and ``OptionError``."""
        if skip_locked is None:
            skip_locked = has_skip_locked(connection)
        clock = clock or clock_of(connection)
        return cls(partial(in_transaction, connection), mark or mark_of(connection), clock, skip_locked=skip_locked)

    def claim(self, limit: int, lease_ms: int, ids: Sequence[str] = ()) -> list[ClaimedRow]:
        """Claim due rows, or those of ``ids``, for ``lease_ms``: new ones, oldest first, then those tried before."""
        query = "SELECT id, signature, attempts, due_ms FROM celery_outbox WHERE due_ms <= ?"
        if ids:
            query += f" AND id IN ({', '.join('?' * len(ids))})"
        query += " ORDER BY due_ms, created_ms LIMIT ?"
        if self.skip_locked:
            query += " FOR UPDATE SKIP LOCKED"
        with self._transaction() as cursor:
            if not self.skip_locked:  # SQLite refuses the claim if it has read when another program writes
                self._run(cursor, "UPDATE celery_outbox SET due_ms = due_ms WHERE id = ''")
            now_ms = self._now(cursor)
            self._run(cursor, query, now_ms, *ids, limit)
            found = [ClaimedRow._make((*values, now_ms + lease_ms)) for values in cursor.fetchall()]
            return [row for row in found if self._move(cursor, row, row.due_ms, row.lease_ms)]

    def release(self, rows: Sequence[ClaimedRow]) -> None:
        """Put the rows back as they were before they were claimed."""
        with self._transaction() as cursor:
            for row in rows:
                self._move(cursor, row, row.lease_ms, row.due_ms)

    def delete(self, rows: Sequence[ClaimedRow]) -> None:
        with self._transaction() as cursor:
            marks = ", ".join("?" * len(rows))
            self._run(cursor, f"DELETE FROM celery_outbox WHERE id IN ({marks})", *(row.id for row in rows))  # noqa: S608

    def fail(self, row: ClaimedRow, error: str, pause_ms: int | None) -> None:
        """Note a failed attempt; the next is due after a pause, or never."""
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
        """How many rows could not be published at least once, poison or not."""
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

    def _move(self, cursor: Any, row: ClaimedRow, due_ms: int, to_ms: int) -> bool:
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
    """The placeholder of a DB-API connection or cursor. Raises ``OptionError`` if its driver is unknown."""
    packages = [each.__module__.partition(".")[0] for each in type(of).__mro__]
    styles = [getattr(sys.modules.get(each), "paramstyle", None) for each in packages]
    mark = next((_MARKS[style] for style in styles if style in _MARKS), None)
    if mark is None:
        fix = "Pass it: Outbox(app, connect, mark='?') or mark='%s'."
        raise OptionError("this SQL driver's placeholder is unknown", driver=packages[0], fix=fix)
    return mark


def has_skip_locked(connection: Any) -> bool:
    """Whether the database has ``SKIP LOCKED``. Raises its error if the table is missing."""
    query = "SELECT id FROM celery_outbox WHERE 1 = 0"
    with in_transaction(connection) as cursor:
        cursor.execute(query)
        cursor.fetchall()
    return _can_run(connection, f"{query} FOR UPDATE SKIP LOCKED")


def clock_of(connection: Any) -> str:
    """The expression that asks this database for the time. Raises ``OptionError`` if the database is unknown."""
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


# -- the outbox --------------------------------------------------------------------------------------------------------


LEASE_S = 30.0
#: How long the store remembers a row's messages, in seconds.
DEDUP_WINDOW_S = 7 * 86_400.0
MOST_ATTEMPTS = 10
#: The pauses between attempts; about an hour in all.
BACKOFF = "1/5/30/120/600s"
#: Stored instead of an error text that the database refuses.
UNTOLD = "the text of the error can't be stored: see the relay's log"


class Outbox:
    """``connect`` opens a DB-API connection of the relay's own; ``mark``: its placeholder, if its driver names none.

    ``clock``: an SQL expression for the time in milliseconds, if the database is not one of the known ones.
    """

    #: What to do if the table is missing.
    how_to_make_it = "execute celery_fdb.contrib.outbox.DDL and INDEX_DDL in it, once"

    def __init__(
        self, app: Celery, connect: Callable[[], Any], mark: str | None = None, clock: str | None = None
    ) -> None:
        self.app = app
        self._connect = connect
        self._mark = mark
        self._db_clock = clock
        self._skip_locked: bool | None = None
        self._clock = Clock()

    def add(self, cursor: Any, signature: Signature) -> Any:
        """Write the task into the transaction of ``cursor``; its result. Raises ``TypeError`` for what is not JSON.

        A ``countdown`` counts from now, whenever it is published.
        """
        return self.write(cursor, signature)[1]

    def write(self, cursor: Any, signature: Signature) -> tuple[str, Any]:
        """As :meth:`add`; the row's id and the result."""
        signature, row_id = signature.clone(), random_id().hex()
        result = signature.freeze()
        text = written(signature, self.now_ms())
        insert(cursor, self._mark, row_id, text, self.now_ms())
        return row_id, result

    def relay(self, limit: int = 100) -> int:
        """Publish up to ``limit`` rows that are due. Returns how many. Raises kombu's ``OperationalError``."""
        with self.opened() as table:
            return self.relay_some(table, limit)

    @contextmanager
    def opened(self) -> Iterator[OutboxTable]:
        """The table, through a connection of its own. Raises the driver's errors."""
        with closing(self._connect()) as connection:
            table = OutboxTable.of(connection, self._mark, self._db_clock, self._skip_locked)
            self._db_clock, self._skip_locked = table.clock, table.skip_locked
            yield table

    def relay_some(self, table: OutboxTable, limit: int, ids: Sequence[str] = ()) -> int:
        """As :meth:`relay`; only rows of ``ids``, if there are any."""
        return self._publish(table, table.claim(limit, int(LEASE_S * 1000), ids))

    def _publish(self, table: OutboxTable, claimed: Sequence[ClaimedRow]) -> int:
        if not claimed:
            return 0
        if self.app.conf.task_always_eager:  # to send a task is to run it: after a failed batch it would run once more
            return self._publish_each(table, claimed)
        try:
            send(self.app, claimed)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one row, the others go on
            self._unless_brokers(table, claimed, error)
            return self._publish_each(table, claimed)
        table.delete(claimed)
        return len(claimed)

    def _publish_each(self, table: OutboxTable, claimed: Sequence[ClaimedRow]) -> int:
        return sum(self._publish_one(table, claimed[at:]) for at in range(len(claimed)))

    def _publish_one(self, table: OutboxTable, left: Sequence[ClaimedRow]) -> bool:
        row = left[0]
        try:
            send(self.app, [row])
        except Exception as error:  # as above
            self._unless_brokers(table, left, error)
            attempt = row.attempts + 1
            logger.exception("outbox row %s can't be published, attempt %d of %d", row.id, attempt, MOST_ATTEMPTS)
            pause_ms = int(seconds(BACKOFF, attempt) * 1000) if attempt < MOST_ATTEMPTS else None
            try:
                table.fail(row, _told(error), pause_ms)
            except Exception:  # the database refuses a character of it; a database that is away raises again
                logger.exception("the error of outbox row %s can't be stored", row.id)
                table.fail(row, UNTOLD, pause_ms)
            return False
        table.delete([row])
        return True

    def _unless_brokers(self, table: OutboxTable, claimed: Sequence[ClaimedRow], error: Exception) -> None:
        if is_brokers(self.app, error):
            table.release(claimed)
            raise OperationalError(str(error)) from error

    def now_ms(self) -> int:
        """The time by this host's clock, from which ``countdown`` counts."""
        return self._clock.wall_ms()


def _told(error: Exception) -> str:
    """The error's text, cut to the column's length, and without secrets."""
    return masked_text(saferepr(error, ERROR_LENGTH)).replace("\0", "")


# -- a row's messages --------------------------------------------------------------------------------------------------


def written(signature: Signature, now_ms: int) -> str:
    """The signature in JSON. ``countdown`` and ``expires`` in seconds become moments, counted from ``now_ms``.

    Raises ``TypeError`` for arguments that are not JSON.
    """
    text = dumps(signature)
    content = loads(text)
    _anchor(content, datetime.fromtimestamp(now_ms / 1000, UTC))
    return str(dumps(content))


def _anchor(signature: dict[str, Any], now: datetime) -> None:
    """Turn delays into moments, also in the parts of a canvas that are published now; workers publish the others."""
    options = signature.get("options") or {}
    if (countdown := options.pop("countdown", None)) is not None:
        options["eta"] = now + timedelta(seconds=countdown)
    if isinstance(options.get("expires"), (int, float)):
        options["expires"] = now + timedelta(seconds=options["expires"])
    for part in _first_parts(signature):
        _anchor(part, now)


def _first_parts(signature: dict[str, Any]) -> Iterable[dict[str, Any]]:
    kwargs = signature.get("kwargs") or {}
    kind, tasks = signature.get("subtask_type"), list(kwargs.get("tasks") or ())
    if kind == "chord":
        header = kwargs.get("header") or ()
        return [header] if isinstance(header, dict) else list(header)
    return tasks[:1] if kind == "chain" else tasks


def send(app: Celery, rows: Iterable[ClaimedRow]) -> None:
    """Publish the rows in as few transactions as possible; in none if building a message fails.

    Raises whatever building and publishing raise; :func:`is_brokers` tells them apart.
    """
    if app.conf.task_always_eager:
        for row in rows:
            _signature(app, row).apply_async()
        return
    again = chords.PERHAPS_AGAIN.set(True)
    try:
        with app.producer_pool.acquire(block=True) as producer, batched(producer, BATCH_MESSAGES):
            for row in rows:
                with unrepeated(app, producer, _ids(row.id)) as once:
                    _signature(app, row).apply_async(producer=once)
    finally:
        chords.PERHAPS_AGAIN.reset(again)


def _signature(app: Celery, row: ClaimedRow) -> Signature:
    return Signature.from_dict(loads(row.signature), app=app)


def is_brokers(app: Celery, error: BaseException) -> bool:
    """Whether the error means that the broker did not answer, so that no row is at fault."""
    with app.connection_for_write() as connection:
        kinds = (OperationalError, *connection.recoverable_connection_errors)
    return isinstance(error, kinds) or isinstance(error.__cause__, kinds)


def _ids(row_id: str) -> Iterator[dict[str, Any]]:
    """The headers by which the store knows each of a row's messages again."""
    for number in count(1):
        yield {"once_id": f"outbox:{row_id}:{number}", "once_window": DEDUP_WINDOW_S}
