"""The relay as its own process: publishes rows until it is stopped.

It queries the database every ``interval`` seconds, and again at once after a full batch. An application that calls
``Outbox.relay()`` after its commit doesn't wait for that; the relay then finds only what was left behind. Both publish
by :meth:`Outbox.relay_some <celery_fdb.contrib.outbox.Outbox.relay_some>`, which also says when a row that failed is
tried again.

If the broker or the database does not answer, the relay logs it once and retries after pauses that double up to
:data:`LONGEST_PAUSE_S`. It gives up only at its start, if the table can't be read.

On SIGTERM or SIGINT it finishes the rows that it has claimed, and ends. A second signal ends it at once, which loses
nothing: the rows are due again after their lease.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

from kombu.exceptions import OperationalError

from celery_fdb.contrib.outbox import TABLE, Outbox, OutboxTable
from kombu_fdb.primitives.plural import plural
from kombu_fdb.primitives.ranges import Kind

logger = logging.getLogger(__name__)

#: Exit codes; 2 is wrong usage.
OK, FAILED, UNREACHABLE = 0, 1, 3
LONGEST_PAUSE_S = 30.0
#: The format of log lines.
FORMAT = "%(asctime)s %(levelname)s %(message)s"


class Relay:
    """Publishes the rows of an outbox. ``interval``: seconds between looks at an empty one. ``limit``: rows a batch."""

    def __init__(self, outbox: Outbox, *, interval: float = 1.0, limit: int = 100) -> None:
        self._outbox = outbox
        self._interval = interval
        self._limit = limit
        self._is_stopped = False
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._pause_s = 0.0
        self.published = 0

    def stop(self) -> None:
        """Stop at the end of the batch. Safe in a signal handler: unlike an event's, this queue's lock is reentrant."""
        self._is_stopped = True
        self._wake.put(None)

    def _wait(self, seconds: float) -> None:
        with suppress(Empty):
            self._wake.get(timeout=seconds)

    def run(self) -> int:
        """Publish rows until :meth:`stop`. Returns the exit code."""
        if self._failed() is None:
            return UNREACHABLE
        logger.info("relay started")
        while not self._is_stopped:
            try:
                with self._outbox.opened() as table:
                    self._work(table)
            except Exception as error:  # noqa: BLE001 - each SQL driver has classes of its own
                self._rest(error)
        logger.info("relay stopped, %d published", self.published)
        return OK

    def run_once(self) -> int:
        """Publish the rows that are due. Returns the exit code: 1 if some rows could not be published."""
        if self._asked(self._relay_due) is None:
            return UNREACHABLE
        logger.info("%d published", self.published)
        failed = self._failed()
        return UNREACHABLE if failed is None else FAILED if failed else OK

    def retry_poison(self) -> bool:
        """Have the rows that failed for good tried again. False if the table can't be read."""
        number = self._asked(OutboxTable.retry_poison)
        if number is None:
            return False
        logger.info("to be retried: %s", plural(number, "row"))
        return True

    def _asked(self, call: Callable[[OutboxTable], int]) -> int | None:
        """What the call returns; None, with a line in the log, if the database or the broker does not answer."""
        try:
            with self._outbox.opened() as table:
                return call(table)
        except Exception as error:  # noqa: BLE001 - as above
            self._complain(error)
            return None

    def _relay_due(self, table: OutboxTable) -> int:
        while table.has_due():
            self.published += self._outbox.relay_some(table, self._limit)
        return self.published

    def _work(self, table: OutboxTable) -> None:
        while not self._is_stopped:
            number = self._outbox.relay_some(table, self._limit)
            self._pause_s = 0.0
            self.published += number
            if number:
                logger.info("%d published", number)
            if number < self._limit:
                self._wait(self._interval)

    def _rest(self, error: Exception) -> None:
        if not self._pause_s:
            self._complain(error)
        self._pause_s = min(max(1.0, self._pause_s * 2), LONGEST_PAUSE_S)
        self._wait(self._pause_s)

    def _failed(self) -> int | None:
        """How many rows have failed; None if the table can't be read."""
        number = self._asked(OutboxTable.count_failed)
        if number:
            logger.warning("could not be published, see the column error: %s", plural(number, "row"))
        return number

    def _complain(self, error: Exception) -> None:
        about = f"{type(error).__name__}: {error}"
        if isinstance(error, OperationalError):
            logger.error("the broker does not answer: %s", about)
        elif is_about_the_table(error):
            logger.error("the database has no table %s: %s (%s)", TABLE, self._outbox.how_to_make_it, about)
        else:
            logger.error("the database does not answer: %s", about)


def is_about_the_table(error: Exception) -> bool:
    """Whether the database says that it has no such table, as SQLite, PostgreSQL and MySQL do."""
    text = str(error).lower()
    return TABLE in text and any(says in text for says in ("no such table", "does not exist", "doesn't exist"))


@contextmanager
def stopping(relay: Relay) -> Iterator[None]:
    """Have SIGTERM and SIGINT stop ``relay``; a second signal does what it did before."""
    before: dict[int, Any] = {}

    def on_signal(number: int, _: Any) -> None:
        signal.signal(number, before[number])
        relay.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, on_signal)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def run(outbox: Outbox, *, interval: float, limit: int, once: bool, retry_poison: bool) -> int:
    """Run a relay, for the command lines. Returns the exit code.

    The app's tasks are imported, as in a worker: their options (``fair_key`` and so on) count when they are published.
    Raises ``InvalidArgument`` for an interval or a limit out of range.
    """
    Kind.number("0.01 to 3600 seconds", 0.01, 3600).check("--interval", interval)
    Kind.whole("1 to 2000 rows", 1, 2000).check("--limit", limit)
    outbox.app.loader.import_default_modules()
    relay = Relay(outbox, interval=interval, limit=limit)
    if retry_poison and not relay.retry_poison():
        return UNREACHABLE
    if once:
        return relay.run_once()
    with stopping(relay):
        return relay.run()
