"""Records the runs of a worker's tasks: notes the facts of each, buffers, flushes, and tidies up.

Whatever stands in a message was written by another program: names of 100 kB, errors of 10 MB, texts that have no UTF-8
form. Texts are cut before they are buffered, so that a hostile message costs no more than any other.

In every pool, each attempt of a task has a ``Request`` in the worker's main process, which sees the attempt's end even
if the child process was killed. A mixin notes that end. Reading the request takes some microseconds; the flush does the
rest. Child processes do not record anything.

================================== =================================================================================
``on_success``                     SUCCESS; or the child has reported an exception, and ``on_failure`` follows
``on_failure``                     FAILURE, RETRY, REJECTED, IGNORED; SUCCESS if its child died after it had succeeded
``on_timeout``                     FAILURE, after the hard limit
``_announce_revoked``              REVOKED: before it began, expired, or terminated
``_announce_cancelled``            RETRY: the connection was lost, and its message is released
================================== =================================================================================

Celery makes a class of its own for each task. Its ``on_success`` does not call ``super()``, so it is wrapped when the
class is made.

Model. One recorder per application and process. It is *open* from the moment the worker's consumer has started
(:meth:`Recorder.open`) until the worker has shut down (:meth:`Recorder.close`); in between, its daemon thread flushes
once a second, or as soon as enough runs wait. A run *waits* in the buffer, then it is *unwritten*, packed into a group,
and stays so until the store has answered. The thread that runs tasks only appends to the buffer, under a lock that no
thread holds while the store is asked.

Active runs are not reported by events. Each flush looks at the requests that Celery counts as active, and writes a row
for those that no flush has seen before. A task that begins and ends between two flushes costs no row. When such a run
ends, its row is cleared after its group was written: in between it is seen twice, and it is never missing.

What happens at each failure:

* the store does not answer: groups stay unwritten and runs wait, up to :data:`MOST_BYTES`. Further runs are dropped and
  counted, and a later flush stores the count. No task waits, and none fails.
* the worker is killed: the runs of about the last second are not kept. Rows of active runs stay, until another worker
  finds that their session has ended (:meth:`Recorder.find_lost`).
* the worker shuts down: what waits is flushed, for at most :data:`CLOSING_S`, and no longer than the process is
  patient with a store that does not answer (``kombu_fdb/store/retry.py``).
* the process forks: the child has no thread, and never writes what its parent has buffered.
* the session ends while the worker lives (it was silent for too long): active runs are written anew under the next one.
* something unexpected is raised here: it is logged once and the run is dropped; it never reaches the task.

After a flush, a worker deletes what is beyond the bounds, and ends the active runs of workers that have died.

Every worker that keeps a history does it, and none is elected: who first clears a segment, or ends a lost run, wins
by a conflict. A trim is due when the flush has opened a segment. Trims and lost runs are also due about every
:data:`INTERVAL_S`, with jitter.

A worker's active runs stand under its session. A session that has ended (its process died, or was silent for longer
than ``session_ttl``) has none: its runs are stored as :data:`~celery_fdb.history.run.LOST`. If the process was only
silent, it later writes the same runs with their real ends, beside the lost ones.

A segment's age is measured by the median of the workers' clocks, so one clock that is ahead deletes no history.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import Terminated, TimeLimitExceeded
from celery import Celery, bootsteps, states
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import worker_shutdown
from celery.utils.log import get_logger
from celery.worker import state as worker_state

from celery_fdb import brokers
from celery_fdb.history.layout import RunGroup, pack_groups
from celery_fdb.history.options import History
from celery_fdb.history.run import NAME_LENGTH, PUBLISHED, Run, bounded
from celery_fdb.history.store import ActiveKey, HistoryStore
from celery_fdb.inspection import formats
from celery_fdb.tasks import failures
from kombu_fdb import Broker
from kombu_fdb.errors import KombuFDBError
from kombu_fdb.model import SessionFacts
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.failure import ERROR_LENGTH, TRACEBACK_LENGTH
from kombu_fdb.primitives.interruption import start
from kombu_fdb.primitives.masking import masked_text
from kombu_fdb.primitives.ranges import LATEST_MS, LONGEST_S, MOST, is_number, is_whole
from kombu_fdb.process.client import Client
from kombu_fdb.transport.channel import Channel

logger = get_logger(__name__)
CLOCK = Clock()

# -- what is noted, and the run that is made of it ---------------------------------------------------------------------


#: Characters of arguments that are kept, and how many followers of a task. An error and its traceback are cut as in a
#: dead letter. A traceback is cut to its end, every other text to its beginning.
ARGUMENTS_LENGTH, MOST_FOLLOWERS = 1_024, 20


#: What is read from a request when its run ends: bounded texts, numbers, and tuples of them, in the order of
#: :func:`facts_of`. A plain tuple, because the garbage collector does not track tuples of such values.
Facts = tuple[Any, ...]
#: Class of the error, its text, the end of the traceback.
Error = tuple[str, str, str]
NO_ERROR: Error = ("", "", "")


def facts_of(request: Any, state: str, end_ms: int, runtime: float | None, error: Error = NO_ERROR) -> Facts:
    """Read the facts of a request whose run ends. Called in the worker's event loop, for each run."""
    get = request._request_dict.get
    info = request._message.delivery_info
    task_id, root = _name(get("id")), get("root_id")
    return (
        task_id,
        _name(request.name),
        _name(info.get("queue")) if info else "",
        _name(request._hostname),
        state,
        request.time_start,
        end_ms,
        runtime,
        _cut(request._argsrepr),
        _cut(request._kwargsrepr),
        _whole(get(PUBLISHED)),
        _cut(get("eta")),
        "" if root is None or root == task_id else _name(root),
        _name(get("parent_id")),
        _name(get("group")),
        _name((info and info.get("fair_key")) or get("fair_key")),
        _whole(get("retries")),
        _whole(get("x-delivery-count")),
        _followers(request),
        error,
    )


def error_of(exc: Any, traceback: Any) -> Error:
    """The error's class, its text and the end of its traceback. ``exc``: an exception, or a text, or None."""
    if exc is None:
        return NO_ERROR
    if not isinstance(exc, BaseException):
        return "", bounded(exc, ERROR_LENGTH), ""
    tried = exc.exc if isinstance(exc, Retry) else None  # what a retry is for
    details = failures.details_of(tried if isinstance(tried, BaseException) else exc, traceback)
    return bounded(details["error_class"]), details["error"], details["traceback"]


def weight_of(facts: Facts) -> int:
    """About how many characters a waiting run holds."""
    _error_class, error, traceback = facts[-1]
    return len(facts[8]) + len(facts[9]) + len(error) + len(traceback) + 200 * len(facts[-2])


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return text if len(text) <= ARGUMENTS_LENGTH else text[:ARGUMENTS_LENGTH]


def _followers(request: Any) -> tuple[tuple[str, str], ...]:
    """The tasks that are published after it: the rest of its chain, and its chord's body."""
    payload = request._payload
    embed = payload[2] if isinstance(payload, (list, tuple)) and len(payload) > 2 else None
    if not isinstance(embed, dict):
        return ()
    chain, chord = embed.get("chain"), embed.get("chord")
    if not chain and not chord:
        return ()
    signatures = [*reversed(chain[-MOST_FOLLOWERS:] if isinstance(chain, list) else ()), chord]
    found = [each for each in map(_follower, signatures) if each is not None]
    return tuple(found[:MOST_FOLLOWERS])


def _follower(signature: Any) -> tuple[str, str] | None:
    options = signature.get("options") if isinstance(signature, dict) else None
    task_id = options.get("task_id") if isinstance(options, dict) else None
    return (bounded(task_id), bounded(signature.get("task"))) if task_id else None


def run_of(facts: Facts, options: History) -> Run:
    """Make the run as it is stored. Called for each run, so fields that most runs lack must cost nothing."""
    task_id, task, queue, worker, state, started_s, end_ms, runtime, args, kwargs, *rest = facts
    published_ms, eta, root, parent, group, key, retries, redeliveries, followers, (error_class, error, traceback) = (
        rest
    )
    start_ms = _moment(started_s)
    runtime_s = _runtime(runtime, start_ms, end_ms)
    if start_ms and runtime_s:  # when the child ended it, not when the main process heard of it
        end_ms = min(end_ms, start_ms + int(runtime_s * 1000))
    return Run(  # by their places: by their names takes a microsecond more
        task_id,
        task,
        queue,
        worker,
        state,
        start_ms,
        end_ms,
        runtime_s,
        _argument(args, options),
        _argument(kwargs, options),
        min(published_ms, LATEST_MS),
        _eta_ms(eta) if eta else 0,
        key,
        retries,
        redeliveries,
        root,
        parent,
        error_class,
        _shown(error, ERROR_LENGTH),
        _shown(traceback, TRACEBACK_LENGTH, end=True) if options.tracebacks else "",
        group,
        followers,
    )


def _name(value: Any) -> str:
    """A name as :func:`bounded` cuts it; at once for one that is empty or short."""
    if value is None:
        return ""
    return value if type(value) is str and len(value) <= NAME_LENGTH and value.isascii() else bounded(value)


def _argument(text: str, options: History) -> str:
    if options.arguments == "none":
        return ""
    return _shown(text, ARGUMENTS_LENGTH) if options.arguments == "masked" else bounded(text, ARGUMENTS_LENGTH)


def _shown(text: str, most: int, *, end: bool = False) -> str:
    """The text without the secrets that it names."""
    return bounded(masked_text(text), most, end=end) if text else ""


def _moment(seconds: Any) -> int:
    return int(seconds * 1000) if is_number(seconds, 0, LATEST_MS // 1000) else 0


def _eta_ms(eta: str) -> int:
    """The moment in the header ``eta``, which Celery writes as a date; without a zone it is in UTC."""
    try:
        return _moment(formats.read(eta).timestamp())
    except (ValueError, OverflowError):
        return 0


def _runtime(runtime: Any, start_ms: int, end_ms: int) -> float | None:
    """The runtime that the child process has measured, else the time since the run was accepted."""
    if is_number(runtime, 0, LONGEST_S):
        return round(float(runtime), 6)
    return max(end_ms - start_ms, 0) / 1000 if start_ms and end_ms else None


def _whole(value: Any) -> int:
    return value if is_whole(value, 0, MOST) else 0


# -- requests ----------------------------------------------------------------------------------------------------------


CANCELLED = "cancelled: the connection to the broker was lost"


class HistoryRequest:
    """Mixed in before a task's own ``Request``."""

    #: The application's recorder; set where the class is made.
    recorder: Recorder
    #: The key of this run's row of active runs, once the row is written or about to be.
    active_key: ActiveKey | None = None
    #: The session under which the store has confirmed that row.
    stored_under: bytes | None = None
    #: Whether the run has ended, whatever Celery says.
    recorded = False
    _runtime: float | None = None
    _released = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inner = cls.__dict__.get("on_success")
        if inner is not None:
            cls.on_success = _noting(inner)  # type: ignore[attr-defined]  # of the Request

    def note(self, state: str, exc: Any = None, traceback: Any = None, *, runtime: float | None = None) -> None:
        """Note that the run has ended. Raises nothing."""
        if self.recorded:
            return
        self.recorded = True
        try:
            runtime = self._runtime if runtime is None else runtime
            facts = facts_of(self, state, CLOCK.wall_ms(), runtime, error_of(exc, traceback))
            self.recorder.note(facts, weight_of(facts), self.active_key)
        except Exception as error:  # noqa: BLE001 - whatever it is, the task goes on
            self.recorder.failed(error)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Celery calls this when an attempt did not succeed."""
        try:
            return super().on_failure(exc_info, send_failed_event, return_ok)  # type: ignore[misc]  # a mixin
        finally:
            exc = exc_info.exception
            exc = exc.exc if isinstance(exc, ExceptionWithTraceback) else exc
            if not isinstance(exc, Terminated):
                self.note(self._state_of(exc), exc, exc_info.traceback)

    def _state_of(self, exc: Any) -> str:
        if isinstance(exc, Retry) or self._released:
            return str(states.RETRY)
        if isinstance(exc, Reject):
            return str(states.REJECTED)
        return str(states.IGNORED if isinstance(exc, Ignore) else states.FAILURE)

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """Celery calls this when a time limit has passed; the hard one ends the attempt."""
        result = super().on_timeout(soft, timeout)  # type: ignore[misc]  # a mixin
        if not soft and not worker_state.should_terminate:
            self.note(states.RETRY if self._released else states.FAILURE, TimeLimitExceeded(timeout))
        return result

    def reject(self, requeue: bool = False) -> Any:
        """Celery calls this to dead-letter the message, or to release it."""
        self._released = requeue
        return super().reject(requeue)  # type: ignore[misc]  # a mixin

    def _announce_revoked(self, reason: str, *rest: Any) -> Any:
        try:
            return super()._announce_revoked(reason, *rest)  # type: ignore[misc]  # a mixin
        finally:
            self.note(states.REVOKED, reason)

    def _announce_cancelled(self, *rest: Any, **options: Any) -> Any:
        try:
            return super()._announce_cancelled(*rest, **options)  # type: ignore[misc]  # a mixin
        finally:
            self.note(states.RETRY, CANCELLED)

    def _success_was_stored(self) -> Any:
        stored = super()._success_was_stored()  # type: ignore[misc]  # a mixin
        if stored:
            self.note(states.SUCCESS)
        return stored

    def _retry_worker_lost(self, exc: Any, exc_info: Any) -> Any:
        retried = super()._retry_worker_lost(exc, exc_info)  # type: ignore[misc]  # a mixin
        if retried:
            self.note(states.RETRY, exc, exc_info.traceback)
        return retried


def _noting(inner: Callable[..., Any]) -> Callable[..., Any]:
    """An ``on_success`` that notes the success before it does anything else."""

    @wraps(inner)
    def on_success(self: HistoryRequest, failed__retval__runtime: Any, **kwargs: Any) -> Any:
        failed, _result, runtime = failed__retval__runtime
        if failed:
            self._runtime = runtime
        else:
            self.note(states.SUCCESS, runtime=runtime)
        return inner(self, failed__retval__runtime, **kwargs)

    return on_success


def active_requests() -> list[HistoryRequest]:
    """The requests that Celery counts as active."""
    return [each for each in list(worker_state.active_requests) if isinstance(each, HistoryRequest)]


# -- the recorder ------------------------------------------------------------------------------------------------------


#: Seconds between two flushes, and how many runs make one come earlier.
FLUSH_S, FLUSH_RUNS = 1.0, 500
#: What may wait for the store, and what a run weighs besides its texts.
MOST_BYTES, RUN_WEIGHT = 32_000_000, 500
#: The longest time of the last flush, in seconds.
CLOSING_S = 5.0
#: Active runs that one flush writes, and rows of ended ones that it clears.
MOST_BEGUN, MOST_ENDED = 500, 1_000
#: Seconds between two looks that no new segment makes necessary.
INTERVAL_S = 30.0
#: Transactions of one trim.
TRIM_PARTS = 5
#: Rows of active runs whose sessions one look checks; the next look goes on behind them.
MOST_ACTIVE = 1_000

#: Lists the sessions of the broker; raises a ``StoreError``.
Sessions = Callable[[], Sequence[SessionFacts]]


class Recorder:
    """The recorder of one application in one process. Thread-safe."""

    def __init__(self, bounds: History, clock: Clock = CLOCK) -> None:
        self.bounds = bounds
        self._clock = clock
        #: Runs that were dropped, and are not counted in the store yet.
        self._untold = 0
        self._pid = 0
        self._store: HistoryStore | None = None
        self._session: Callable[[], bytes] | None = None
        self._sessions: Sessions | None = None
        #: Reentrant: Celery ends tasks in a signal handler, which may have interrupted :meth:`note`.
        self._lock = threading.RLock()
        self._flushing = threading.Lock()
        self._waiting: list[Facts] = []
        self._weight = 0
        self._unwritten: list[RunGroup] = []
        self._numbers = 0
        self._ended: list[ActiveKey] = []
        self._opened = False
        self._wake = threading.Event()
        self._stopped = True
        self._thread: threading.Thread | None = None
        self._failing = self._failed_once = False
        #: When to tidy up next, and behind which row to look for lost runs.
        self._due_s = 0.0
        self._cursor = b""

    # -- the worker's life -------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether it is open, and in this process."""
        return self._pid == os.getpid() and not self._stopped

    def open(self, store: HistoryStore, session: Callable[[], bytes], sessions: Sessions | None = None) -> None:
        """Begin to write into ``store``; again after a reconnection.

        ``session``: of the process, for the rows of active runs; raises a ``StoreError``. ``sessions``: without it,
        nothing is tidied up.
        """
        self._store, self._session, self._sessions = store, session, sessions
        self._due_s, self._cursor = 0.0, b""  # the store may be another one
        if self.is_open:
            return
        self._pid, self._stopped = os.getpid(), False
        self._lock, self._flushing, self._wake = threading.RLock(), threading.Lock(), threading.Event()
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
            if self._store is not None and self._sessions is not None and not self._stopped:
                self.tidy(self._store, self._sessions, opened=self._opened)
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

    def note(self, facts: Facts, weight: int, active_key: ActiveKey | None) -> None:
        """Note a run that has ended. Never blocks, raises nothing. The run is made later, as that takes time."""
        if self._stopped:
            return
        weight += RUN_WEIGHT
        with self._lock:
            if active_key is not None:
                self._ended.append(active_key)
            if self._weight + weight > MOST_BYTES:
                self._untold += 1
                return
            self._weight += weight
            self._waiting.append(facts)
            enough = len(self._waiting) == FLUSH_RUNS
        if enough:
            self._wake.set()

    def failed(self, error: Exception) -> None:
        """Drop a run that could not be noted because of an error here, and log the first such error."""
        if not self._failed_once:
            self._failed_once = True
            logger.warning("the history of a run is not kept: %r", error, exc_info=error)
        with self._lock:
            self._untold += 1

    # -- flushing ----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write all waiting runs. Raises a ``StoreError``; runs not written by then stay for the next flush."""
        store, session = self._store, self._session
        if store is None or session is None or self._pid != os.getpid():
            return
        if not self._flushing.acquire(timeout=CLOSING_S):
            return
        try:
            self._write_groups(store)  # of a flush that failed
            with self._lock:
                noted, self._waiting, self._weight = self._waiting, [], 0
            self._unwritten = pack_groups([run for each in noted if (run := self._made(each)) is not None])
            self._write_groups(store)
            self._write_activity(store, session)
        finally:
            self._flushing.release()

    def _made(self, facts: Facts) -> Run | None:
        try:
            return run_of(facts, self.bounds)
        except Exception as error:  # noqa: BLE001 - a hostile message must not keep others out of the history
            self.failed(error)
            return None

    def _write_groups(self, store: HistoryStore) -> None:
        while self._unwritten:
            self._opened |= store.write(self._unwritten[0], self.bounds)
            del self._unwritten[0]

    def _write_activity(self, store: HistoryStore, session_of: Callable[[], bytes]) -> None:
        running = [each for each in active_requests() if not each.recorded]
        session = session_of() if running else b""
        begun = dict(self._begun(running, session))
        ended, untold = self._ended[:MOST_ENDED], self._untold
        if not (begun or ended or untold):
            return
        runs = {number: run_of(facts_of(each, states.STARTED, 0, None), self.bounds) for number, each in begun.items()}
        store.activity(session, runs, ended, dropped=untold)
        with self._lock:
            del self._ended[: len(ended)]
            self._untold -= untold
        for each in begun.values():
            each.stored_under = session

    def _begun(self, running: Sequence[HistoryRequest], session: bytes) -> Iterator[tuple[int, HistoryRequest]]:
        """The running requests whose rows may not be stored under the process's session, each with its number.

        A row that was written in vain, or perhaps, is written again under its key.

        A request gets its key before this asks whether it has ended. So either the code that notes its end sees the
        key and has the row cleared later, or this sees the end and writes no row.
        """
        for each in [each for each in running if each.stored_under != session][:MOST_BEGUN]:
            key = each.active_key
            if key is None or key[0] != session:
                if key is not None:
                    self._ended.append(key)
                self._numbers += 1
                each.active_key = key = (session, self._numbers)
            if not each.recorded:
                yield key[1], each

    # -- tidying up --------------------------------------------------------------------------------------------------

    def tidy(self, store: HistoryStore, sessions: Sessions, *, opened: bool) -> None:
        """Trim the history if a look is due or a segment was ``opened``; if due, end the runs of dead workers, too.

        Raises a ``StoreError``.
        """
        due = self._clock.monotonic() >= self._due_s
        if opened or due:
            now_ms = brokers.common_ms(sessions(), self._clock.wall_ms())
            store.trim(self.bounds, parts=TRIM_PARTS, now_ms=now_ms)
        if due:
            self.find_lost(store, sessions)
            self._due_s = self._clock.monotonic() + INTERVAL_S * random.uniform(0.8, 1.2)

    def find_lost(self, store: HistoryStore, sessions: Sessions) -> int:
        """End the active runs of ended sessions, among the next :data:`MOST_ACTIVE` rows. Returns how many."""
        holders, self._cursor = store.holders(limit=MOST_ACTIVE, cursor=self._cursor)
        if not holders:
            return 0
        # The sessions are read after the rows: a session opens before it has a row.
        ended = holders - {bytes(each.session_id) for each in sessions() if each.open}
        return sum(store.lose(session, self.bounds) for session in sorted(ended))


# -- the worker --------------------------------------------------------------------------------------------------------


class Keeper(bootsteps.StartStopStep):
    """A step of the worker's consumer. Celery makes it before the consumer builds its tasks' strategies."""

    requires = ("celery.worker.consumer.tasks:Tasks",)
    #: The application's recorder.
    recorder: Recorder

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        failures.mix_in(consumer.app, HistoryRequest, recorder=self.recorder)
        worker_shutdown.connect(self._on_shutdown)
        super().__init__(consumer, **kwargs)

    def start(self, consumer: Any) -> None:
        """Open the recorder. Celery calls this also after a reconnection."""
        channel = consumer.task_consumer.channel
        if not isinstance(channel, Channel):
            logger.warning("no history is kept: it needs a broker at fdb:// or fdb+sqlite://")
            return
        client = channel.client
        options = client.options
        client.attach(self.recorder, timeout_s=options.connect_timeout)  # it outlives the connection
        store = HistoryStore(
            client.database,
            client.location.namespace,
            clock=CLOCK,
            timeout_s=options.operation_timeout,
            patience=client.patience,
        )
        store.set_settings(self.recorder.bounds)
        self.recorder.open(store, lambda: bytes(client.session().session_id), Broker.of(client).inspect.sessions)
        self._client = client

    def stop(self, consumer: Any) -> None:
        """Do nothing: running tasks end later, and the worker's shutdown flushes their runs."""

    _client: Client | None = None

    def _on_shutdown(self, **_: Any) -> None:
        if self._client is None or not self.recorder.is_open:
            return
        patience = self._client.patience
        with patience.ending():
            self.recorder.close(patience.allow(CLOSING_S))
        self._client.detach(self.recorder)


def keep_history(app: Celery, bounds: History) -> None:
    """Have the app's workers keep a history. A further call replaces the bounds."""
    steps = app.steps["consumer"]
    steps -= {each for each in steps if isinstance(each, type) and issubclass(each, Keeper)}
    steps.add(type("Keeper", (Keeper,), {"recorder": Recorder(bounds)}))
