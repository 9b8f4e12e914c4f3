"""The recorder: buffers what a worker tells, writes it, and trims the history.

Model. One recorder per application and process. It is *open* from the moment the worker's consumer has started
(:meth:`Recorder.open`) until the worker has shut down (:meth:`Recorder.close`); in between, its daemon thread flushes
once a second, or as soon as enough runs wait. A run *waits* in the buffer, then it is *unwritten*, packed into a group,
and stays so until the store has answered. The thread that runs tasks only appends to the buffer, under a lock that no
thread holds while the store is asked.

Active runs are not reported by events. Each flush looks at the requests that Celery counts as active, and writes a row
for those that no flush has seen before; a task that begins and ends between two flushes costs no row. When such a run
ends, its row is cleared after its group was written: in between it is seen twice, and it is never missing.

What happens at each failure:

* the store does not answer: groups stay unwritten, runs wait, up to :data:`MOST_BYTES`; what comes then is dropped and
  counted, and the count is stored with a later flush. No task waits, none fails.
* the worker is killed: the runs of about the last second are not kept. Rows of active runs stay, until another worker
  finds that their session has ended (:class:`Upkeep`).
* the worker shuts down: what waits is flushed, for at most :data:`CLOSING_S`, and no longer than the process is
  patient with a store that does not answer (``kombu_fdb/store/retry.py``).
* the process forks: the child has no thread, and never writes what its parent has buffered.
* the session ends while the worker lives (it was silent for too long): active runs are written anew under the next one.
* something unexpected is raised here: it is logged once and the run is dropped; it never reaches the task.

After a flush: delete what is beyond the bounds, and end the active runs of workers that have died.

Every worker that keeps a history does it, and none is elected: who first clears a segment, or ends a lost run, wins
by a conflict. Trim is due when the flush has opened a segment, and as the lost are, now and then, with jitter.

A worker's active runs stand under its session. A session that has ended (its process died, or was silent for longer
than ``session_ttl``) has none: they become :data:`~celery_fdb.history.run.LOST`, and are in the history as such. If the
process was only silent, what its runs come to is written later, as runs of their own.

How old a segment is, the clocks of most workers say: one that is ahead deletes no history.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from celery.utils.log import get_logger

from celery_fdb.brokers import common_ms
from celery_fdb.history.layout import Group
from celery_fdb.history.options import History
from celery_fdb.history.run import Run
from celery_fdb.history.store import ActiveKey, HistoryStore
from kombu_fdb.errors import KombuFDBError
from kombu_fdb.model import SessionFacts
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.threads import start

# -- the recorder ------------------------------------------------------------------------------------------------------


logger = get_logger(__name__)

#: Seconds between two flushes, and how many runs make one come earlier.
FLUSH_S, FLUSH_RUNS = 1.0, 500
#: What may wait for the store, and what a run weighs besides its texts.
MOST_BYTES, RUN_WEIGHT = 32_000_000, 500
#: The last flush takes no longer.
CLOSING_S = 5.0
#: Active runs that one flush writes, and rows of ended ones that it clears.
MOST_BEGUN, MOST_ENDED = 500, 1_000


class Running(Protocol):
    """A request that Celery counts as active."""

    #: Under which key its row stands, or is about to.
    active_key: ActiveKey | None
    #: It has ended, whatever Celery says.
    recorded: bool


class Source(NamedTuple):
    """Where the runs come from. ``running``: the requests that are active; ``run_of``: what is written of one."""

    running: Callable[[], Collection[Running]]
    run_of: Callable[[Running], Run]
    #: Of what was noted the run that is stored.
    make: Callable[[Any], Run]
    #: Of the process, for the rows of active runs. Raises a ``StoreError``.
    session: Callable[[], bytes]


class Recorder:
    """Thread-safe."""

    def __init__(self, bounds: History) -> None:
        self.bounds = bounds
        #: Since the process started; of these, how many are not stored yet.
        self.dropped = self._untold = 0
        self._pid = 0
        self._store: HistoryStore | None = None
        self._source: Source | None = None
        self._upkeep: Upkeep | None = None
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._waiting: list[Any] = []
        self._weight = 0
        self._unwritten: list[Group] = []
        self._numbers = 0
        self._ended: list[ActiveKey] = []
        #: Keys of runs that have not ended, whose rows may be written or not.
        self._doubtful: set[ActiveKey] = set()
        self._opened = False
        self._wake = threading.Event()
        self._stopped = True
        self._thread: threading.Thread | None = None
        self._failing = self._failed_once = False

    # -- the worker's life -------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """In this process."""
        return self._pid == os.getpid() and not self._stopped

    def open(self, store: HistoryStore, source: Source, upkeep: Upkeep | None = None) -> None:
        """Begin to write into ``store``; again after a reconnection. ``upkeep``: called after each flush."""
        self._store, self._source, self._upkeep = store, source, upkeep
        if self.is_open:
            return
        self._pid, self._stopped = os.getpid(), False
        self._lock, self._flushing, self._wake = threading.Lock(), threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="celery-fdb-history", daemon=True)
        start(self._thread)

    def close(self, timeout_s: float = CLOSING_S) -> None:
        """Flush the rest, for at most so long. Idempotent; does nothing in a forked child. Raises nothing."""
        if not self.is_open:
            return
        self._stopped = True
        self._wake.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout_s)  # whatever deadline the store's calls have
        else:
            self._flush_safely()
        left = self.waiting
        if left:
            logger.warning("the history of the last %d runs is not kept: the store does not answer", left)

    def _run(self) -> None:
        stopped = False
        while not stopped:
            self._wake.wait(FLUSH_S)
            stopped = self._stopped  # what was noted before is flushed below
            self._wake.clear()
            self._flush_safely()

    def _flush_safely(self) -> None:
        try:
            self.flush()
            if self._upkeep is not None and not self._stopped:
                self._upkeep(opened=self._opened)
                self._opened = False
            self._failing = False
        except Exception as error:  # whatever it is, the next flush may succeed
            if not self._failing:
                unexpected = not isinstance(error, KombuFDBError)
                logger.warning("the history can't be written now: %s", error, exc_info=unexpected)
            self._failing = True

    # -- what happens ------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Runs that are not in the store yet."""
        return len(self._waiting) + sum(len(each.runs) for each in self._unwritten)

    def note(self, facts: Any, weight: int, active_key: ActiveKey | None) -> None:
        """A run has ended. Never blocks, raises nothing.

        ``facts``: what :attr:`Source.make` makes a run of, later, as it takes time; best a plain tuple of texts and
        numbers, which Python's garbage collector need not look at while it waits. ``weight``: the length of the texts.
        """
        if self._stopped:
            return
        weight += RUN_WEIGHT
        with self._lock:
            if active_key is not None:
                self._ended.append(active_key)
            if self._weight + weight > MOST_BYTES:
                self._drop()
                return
            self._weight += weight
            self._waiting.append(facts)
            enough = len(self._waiting) == FLUSH_RUNS
        if enough:
            self._wake.set()

    def failed(self, error: Exception) -> None:
        """A run could not be noted, for a reason of ours."""
        if not self._failed_once:
            self._failed_once = True
            logger.warning("the history of a run is not kept: %r", error, exc_info=error)
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        self.dropped += 1
        self._untold += 1

    # -- flushing ----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write all that waits. Raises a ``StoreError``: what is left is kept for the next time."""
        store, source = self._store, self._source
        if store is None or source is None or self._pid != os.getpid():
            return
        if not self._flushing.acquire(timeout=CLOSING_S):
            return
        try:
            self._write_groups(store)  # of a flush that failed
            self._pack(store, source)
            self._write_groups(store)
            self._write_activity(store, source)
        finally:
            self._flushing.release()

    def _pack(self, store: HistoryStore, source: Source) -> None:
        with self._lock:
            noted, self._waiting, self._weight = self._waiting, [], 0
        self._unwritten = store.packed([run for each in noted if (run := self._made(each, source)) is not None])

    def _made(self, facts: Any, source: Source) -> Run | None:
        try:
            return source.make(facts)
        except Exception as error:  # noqa: BLE001 - a hostile message must not keep others out of the history
            self.failed(error)
            return None

    def _write_groups(self, store: HistoryStore) -> None:
        while self._unwritten:
            self._opened |= store.write(self._unwritten[0], self.bounds)
            del self._unwritten[0]

    def _write_activity(self, store: HistoryStore, source: Source) -> None:
        running = [each for each in list(source.running()) if not each.recorded]
        session = source.session() if running else b""
        begun = dict(self._begun(running, session))
        ended, untold = self._ended[:MOST_ENDED], self._untold
        if not (begun or ended or untold):
            return
        runs = {number: source.run_of(each) for number, each in begun.items()}
        keys = {(session, number) for number in begun}
        self._doubtful |= keys  # until it has answered; if it does not, they are written again under the same keys
        store.activity(session, runs, ended, dropped=untold)
        with self._lock:
            del self._ended[: len(ended)]
            self._untold -= untold
        self._doubtful -= keys.union(ended)

    def _begun(self, running: Sequence[Running], session: bytes) -> Iterator[tuple[int, Running]]:
        """Those without a row under the session that the process has now.

        A request gets its key before it is asked whether it has ended. So either who notes its end sees the key, and
        the row is cleared later, or its end is seen here, and no row is written.
        """
        doubtful = self._doubtful
        fresh = [
            (key, each) for each in running if (key := each.active_key) is None or key[0] != session or key in doubtful
        ]
        for old, each in fresh[:MOST_BEGUN]:
            key = old if old is not None and old[0] == session else self._new_key(each, session)
            if not each.recorded:
                yield key[1], each

    def _new_key(self, request: Running, session: bytes) -> ActiveKey:
        self._forget(request)
        self._numbers += 1
        request.active_key = key = (session, self._numbers)
        return key

    def _forget(self, request: Running) -> None:
        if request.active_key is not None:
            self._doubtful.discard(request.active_key)
            self._ended.append(request.active_key)
            request.active_key = None


# -- upkeep ------------------------------------------------------------------------------------------------------------


#: Seconds between two looks that no new segment makes necessary.
INTERVAL_S = 30.0
#: Transactions of one trim.
TRIM_PARTS = 5
#: Active runs of which one look sees the sessions; the next one goes on behind them.
MOST_ACTIVE = 1_000


class Upkeep:
    """Of one recorder. Not thread-safe."""

    def __init__(
        self, store: HistoryStore, bounds: History, sessions: Callable[[], Sequence[SessionFacts]], *, clock: Clock
    ) -> None:
        """``sessions``: of the broker; raises a ``StoreError``."""
        self._store = store
        self._bounds = bounds
        self._sessions = sessions
        self._clock = clock
        self._random = random.Random()
        self._next = clock.monotonic()
        self._cursor = b""

    def __call__(self, *, opened: bool) -> None:
        """Do what is due. Raises a ``StoreError``."""
        due = self._clock.monotonic() >= self._next
        if opened or due:
            now_ms = common_ms(self._sessions(), self._clock.wall_ms())
            self._store.trim(self._bounds, parts=TRIM_PARTS, now_ms=now_ms)
        if due:
            self.find_lost()
            self._next = self._clock.monotonic() + INTERVAL_S * self._random.uniform(0.8, 1.2)

    def find_lost(self) -> int:
        """End active runs whose session has ended, of the next :data:`MOST_ACTIVE`. Returns how many."""
        holders, self._cursor = self._store.holders(limit=MOST_ACTIVE, cursor=self._cursor)
        if not holders:
            return 0
        # Asked after the rows were read: a session opens before it has one.
        ended = holders - {bytes(each.session_id) for each in self._sessions() if each.open}
        return sum(self._store.lose(session, self._bounds) for session in sorted(ended))
