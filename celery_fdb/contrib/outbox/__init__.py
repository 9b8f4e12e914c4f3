"""Tasks that are committed with the rows of an SQL database, and published afterwards, once each.

Model. A row of the table (:mod:`celery_fdb.contrib.outbox.rows`) is a signature in JSON with an id. It is

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
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from celery import Celery
from celery.canvas import Signature
from celery.utils.saferepr import saferepr
from kombu.exceptions import OperationalError
from kombu.utils.json import dumps, loads

from celery_fdb.contrib.outbox.rows import DDL, INDEX_DDL, Row, Rows, insert
from celery_fdb.tasks.publishing import everywhere
from kombu_fdb.api.job import backoff_s as seconds
from kombu_fdb.engine.messages.publish import BATCH_MESSAGES
from kombu_fdb.primitives.clock import SystemClock, random_id
from kombu_fdb.primitives.masking import masked_text
from kombu_fdb.transport.batch import batched

__all__ = ["BACKOFF", "DDL", "DEDUP_WINDOW_S", "INDEX_DDL", "LEASE_S", "MOST_ATTEMPTS", "Outbox"]

logger = logging.getLogger(__name__)

LEASE_S = 30.0
#: How long the store remembers a row's messages, in seconds.
DEDUP_WINDOW_S = 7 * 86_400.0
MOST_ATTEMPTS = 10
#: Between two attempts; about an hour in all.
BACKOFF = "1/5/30/120/600s"
#: The longest error text that is stored, in characters.
ERROR_LENGTH = 2_000
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
        self._clock = SystemClock()

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
        with self.opened() as rows:
            return self.relay_some(rows, limit)

    @contextmanager
    def opened(self) -> Iterator[Rows]:
        """The table, through a connection of its own. Raises the driver's errors."""
        with closing(self._connect()) as connection:
            rows = Rows.of(connection, self._mark, self._db_clock, self._skip_locked)
            self._db_clock, self._skip_locked = rows.clock, rows.skip_locked
            yield rows

    def relay_some(self, rows: Rows, limit: int, ids: Sequence[str] = ()) -> int:
        """As :meth:`relay`; only rows of ``ids``, if there are any."""
        return self._publish(rows, rows.claim(limit, int(LEASE_S * 1000), ids))

    def _publish(self, rows: Rows, claimed: Sequence[Row]) -> int:
        if not claimed:
            return 0
        try:
            send(self.app, claimed)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one row, the others go on
            self._unless_brokers(rows, claimed, error)
            return sum(self._publish_one(rows, claimed[at:]) for at in range(len(claimed)))
        rows.delete(claimed)
        return len(claimed)

    def _publish_one(self, rows: Rows, left: Sequence[Row]) -> bool:
        row = left[0]
        try:
            send(self.app, [row])
        except Exception as error:  # as above
            self._unless_brokers(rows, left, error)
            attempt = row.attempts + 1
            logger.exception("outbox row %s can't be published, attempt %d of %d", row.id, attempt, MOST_ATTEMPTS)
            pause_ms = int(seconds(BACKOFF, attempt) * 1000) if attempt < MOST_ATTEMPTS else None
            try:
                rows.fail(row, _told(error), pause_ms)
            except Exception:  # a character that the database does not know; if it does not answer, nor does it now
                logger.exception("the error of outbox row %s can't be stored", row.id)
                rows.fail(row, UNTOLD, pause_ms)
            return False
        rows.delete([row])
        return True

    def _unless_brokers(self, rows: Rows, claimed: Sequence[Row], error: Exception) -> None:
        if is_brokers(self.app, error):
            rows.release(claimed)
            raise OperationalError(str(error)) from error

    def now_ms(self) -> int:
        """By the clock of this host: what ``countdown`` counts from."""
        return self._clock.wall_ms()


def _told(error: Exception) -> str:
    """Cut to the column's length, and without secrets."""
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
    """In a canvas, anchor also what is published with it, but not what workers publish later."""
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


def send(app: Celery, rows: Iterable[Row]) -> None:
    """Publish in as few transactions as there can be: none, if building a message fails.

    Raises whatever building and publishing raise; :func:`is_brokers` tells them apart.
    """
    if app.conf.task_always_eager:
        for row in rows:
            _signature(app, row).apply_async()
        return
    with app.producer_pool.acquire(block=True) as producer, batched(producer, BATCH_MESSAGES):
        for row in rows:
            once = _Once(producer, row.id)
            with everywhere(app, once):
                _signature(app, row).apply_async(producer=once)


def _signature(app: Celery, row: Row) -> Signature:
    return Signature.from_dict(loads(row.signature), app=app)


def is_brokers(app: Celery, error: BaseException) -> bool:
    """Whether the broker did not answer: no row's fault."""
    with app.connection_for_write() as connection:
        kinds = (OperationalError, *connection.recoverable_connection_errors)
    return isinstance(error, kinds) or isinstance(error.__cause__, kinds)


class _Once:
    """A producer that gives each message an id made from its row's."""

    def __init__(self, producer: Any, row_id: str) -> None:
        self._producer = producer
        self._row_id = row_id
        self._published = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, headers: dict[str, Any] | None = None, **options: Any) -> Any:
        self._published += 1
        ids = {"once_id": f"outbox:{self._row_id}:{self._published}", "once_window": DEDUP_WINDOW_S}
        return self._producer.publish(body, headers={**(headers or {}), **ids}, **options)
