"""One client per process and store: what all connections of a process share, and what survives a fork.

Model. A client is *closed* until a first connection attaches, then it holds the open store and the engine. That
suffices for publishing. The first consumer opens the process's **session** (``process/client_session.py``), which
claims every message. The session ends when the last connection has detached and every message is settled, or with the
process.

Three lists pass work from thread to thread:

* ``acks``: acknowledged messages whose leases still exist. A receiver settles them with its next claim, or flushes them
  soon; without a receiver, ``flush_acks`` is called at once.
* ``returns``: messages that can't be released now (a finalizer must not block, the store may be down).
* ``deferred``: other calls to be made later, such as ending what a collected connection held.

The session's duties thread handles the last two lists, and retries until the store answers. A process without a
session, which only publishes, has a thread for them while there are any (``process/session_threads.py``). That thread
also closes the store after the last connection has been collected.

Guarantee BOUNDED: while the store does not answer, threads that need it at the same time wait for one attempt to open
it and share its error (:class:`SingleFlight`), so their waits don't add up.

What happens at each failure:

* the store does not answer: the lists keep their entries; acks and releases may be repeated without harm.
* the session was fenced (this process was silent for longer than its TTL): all leases are lost, and other workers get
  the messages. The next ``session()`` opens another one. Late acks of the old session change nothing; they are counted
  and logged.
* the process forks: the child forgets the registry and opens its own client when it needs one. It never touches the
  parent's store, session, threads or sockets: every use checks the process id.
* the process exits: deferred calls are made and unsettled messages are released at once. If the process is killed, its
  messages are released when the session's TTL is over.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from time import monotonic
from typing import Any, Generic, TypeVar

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.messages.publish import Doubts
from kombu_fdb.errors import (
    ClientUnusable,
    CommitUnknown,
    ForkedError,
    KombuFDBError,
    SessionLost,
    StoreError,
    StoreUnavailable,
)
from kombu_fdb.model import Delivery, Lease, SessionId
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.interruption import FairLock, move
from kombu_fdb.primitives.plural import plural
from kombu_fdb.process import connect
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.process.duties import STORE_FAILURES, is_of_one
from kombu_fdb.process.duty_cycle import Reclaim
from kombu_fdb.process.session_threads import DeferredCalls, OnDemandThread, open_session
from kombu_fdb.process.time_to_run import TimesToRun
from kombu_fdb.settings.location import Location
from kombu_fdb.settings.options import Options
from kombu_fdb.store.protocol import Database, Transaction
from kombu_fdb.store.retry import Patience

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: While the store is known not to answer, a new connection gives up after this many seconds.
SUSPECT_TIMEOUT_S = 1.0
#: The connect timeout in every registry key: connections share a client even if their timeouts differ.
_ANY_CONNECT_TIMEOUT = 5.0
#: Leases settled in one transaction.
MOST_LEASES = 500

#: The details in the death record of a message that was overdue too often.
OVERDUE = {"error": "its time to run (ttr) has passed"}

LOST = (
    "%s came too late: this process had been silent for longer than session_ttl (%g s), so its "
    "messages were released and may run twice. Make such tasks idempotent, see "
    "worker_deduplicate_successful_tasks, or raise session_ttl."
)


class SingleFlight(Generic[T]):
    """Work that all threads need, done by one for all. Thread-safe, even if signal handlers raise exceptions."""

    def __init__(self, found: Callable[[], T | None]) -> None:
        """``found``: returns the result of an earlier attempt, as long as it is usable."""
        self._found = found
        self._lock = FairLock()
        self._failed: StoreError | None = None

    def run(self, work: Callable[[], T], timeout_s: float) -> T:
        """The result of an earlier attempt, or else that of ``work()``, which must store it for other threads.

        Raises what ``work`` raises. A thread that waited raises ``StoreUnavailable`` if the attempt that it waited for
        has failed, or has not ended within ``timeout_s`` seconds; a thread that would wait for itself raises a
        ``StoreError``.
        """
        before, late = self._failed, "the store has not answered another thread of this process yet"
        return self._lock.run(lambda: self._in_turn(work, before), timeout_s, late)

    def _in_turn(self, work: Callable[[], T], before: StoreError | None) -> T:
        found = self._found()
        if found is not None:
            return found
        if self._failed is not None and self._failed is not before:
            raise type(self._failed)(self._failed.text, **self._failed.attributes)
        try:
            return work()
        except StoreError as error:
            kind = ClientUnusable if isinstance(error, ClientUnusable) else StoreUnavailable
            self._failed = kind(error.text, **error.attributes)  # without its frames and what they refer to
            raise


class Client:
    """The store as one process sees it. Thread-safe. Get it from :func:`client_for`."""

    def __init__(self, location: Location, options: Options, engine: Engine | None = None) -> None:
        """``engine``: that of an open store; closing the client closes it, too."""
        self.pid = os.getpid()
        self.location = location
        self.options = options
        self.acks: deque[Lease] = deque()
        #: Acks whose outcome is unknown: the answer was lost.
        self._in_doubt: set[Lease] = set()
        #: Held messages for which an attempt was made: it counts, in whatever way they are released.
        self.attempted: set[Lease] = set()
        #: Held messages that a consumer was given: when they are released, they are marked as redelivered.
        self.seen: set[Lease] = set()
        #: Late acknowledgements that changed nothing, since the process started.
        self.lost_acks = 0
        self._returns: deque[Lease] = deque()
        self.deferred_calls = DeferredCalls()
        self._deferred_thread = OnDemandThread(self._run_without_session)
        self._users: weakref.WeakSet[Hashable] = weakref.WeakSet()
        #: Guards what is open; its holder does not call the store.
        self._lock = threading.RLock()
        self._opening: SingleFlight[Engine] = SingleFlight(lambda: self.engine_if_open)
        self._joining: SingleFlight[ClientSession] = SingleFlight(self._standing)
        #: The engine of the open store; in a forked child, still the parent's.
        self.engine_if_open = engine
        self._session: ClientSession | None = None
        #: Whether the store failed to answer the last call: until a call succeeds, new connections don't wait long.
        self.suspected = False
        self._doubts = Doubts(Clock())
        self._reclaim = Reclaim(Clock())
        #: How long to wait for a store that does not answer at the program's end.
        self.patience = Patience()
        self.time_to_run = TimesToRun(self._release_overdue)

    # -- the store ---------------------------------------------------------------------------------------------------

    def attach(self, user: Hashable, *, timeout_s: float) -> None:
        """Begin to use the client for a connection: open the store, or check that it answers.

        Raises ``StoreUnavailable`` or ``FormatError`` within ``timeout_s`` seconds.
        """
        if self.suspected:
            timeout_s = min(timeout_s, SUSPECT_TIMEOUT_S)
        with self._lock:  # from here on the client is not idle
            known, engine = user in self._users, self.engine_if_open
            self._users.add(user)
        try:
            if engine is None:
                opening = partial(self._opening.run, partial(self._open, timeout_s), timeout_s)
                self.patience.within(timeout_s, opening)
            else:
                connect.verify(engine.database, self.location, timeout_s=timeout_s)
        except BaseException as error:
            if isinstance(error, StoreError):
                self.suspected = True
            if not known:
                self._users.discard(user)
                self._look_whether_idle()
            raise
        self.suspected = False
        if self.deferred_calls:  # left over from before the store was closed
            self.nudge()

    def _open(self, timeout_s: float) -> Engine:
        engine = connect.open_store(self.location, self.options, timeout_s=self.patience.allow(timeout_s))
        # The doubts must outlive the engine: kombu drops the connection, perhaps the last, before it publishes again.
        engine.publisher.doubts = self._doubts
        engine.transactions.share_patience(self.patience)
        engine.transactions.make_room = partial(self._reclaim.run, engine)
        with self._lock:
            self.engine_if_open = engine
            # Only now: exit handlers run in reverse order, and FoundationDB's, just registered, ends its network
            # thread.
            atexit.register(self.close)
        return engine

    def detach(self, user: Hashable) -> None:
        """End a connection's use. After the last one, once nothing is left to settle, everything closes."""
        with self._lock:
            self._users.discard(user)
        self.close(if_idle=True)
        self._look_whether_idle()

    def abandon(self, user: Hashable) -> None:
        """Have another thread :meth:`detach` a collected connection. For a finalizer."""
        self._users.discard(user)
        self._look_whether_idle()

    def _look_whether_idle(self) -> None:
        """If no connection is left, have a thread finish the remaining work and close the store."""
        if not self._users:
            self.nudge()

    @property
    def engine(self) -> Engine:
        """Raises ``ForkedError`` in a child, ``StoreUnavailable`` when closed."""
        if os.getpid() != self.pid:
            raise ForkedError("this connection belongs to the parent process", parent=self.pid)
        engine = self.engine_if_open  # read once: another thread may close it
        if engine is None:
            raise StoreUnavailable("the connection is closed", location=str(self.location))
        return engine

    @property
    def database(self) -> Database:
        """The store, for other users of it. Raises what ``engine`` raises."""
        return self.engine.database

    def join(self, tr: Any) -> Transaction:
        """A caller's own FoundationDB transaction, for ``Publisher.publish_in``. Raises ``OptionError``."""
        return connect.join(self.database, self.location, tr)

    # -- the session -------------------------------------------------------------------------------------------------

    def session(self) -> ClientSession:
        """The process's session, opened when first needed, and again after it has been fenced."""
        session = self._standing()
        if session is not None:
            return session
        return self._joining.run(partial(self._join, self.engine), self.options.operation_timeout)

    def in_session(self, verb: Callable[[ClientSession], T]) -> T:
        """Call ``verb`` with the session; if others have fenced it, again with a new one, until the deadline.

        Raises ``StoreUnavailable`` if others have fenced every session by then.
        """
        deadline = monotonic() + self.patience.allow(self.options.operation_timeout)
        while True:
            session = self.session()
            try:
                return verb(session)
            except SessionLost as error:
                session.lose()
                if monotonic() >= deadline:
                    reason = "other processes end each session of this one at once: is session_ttl too short?"
                    raise StoreUnavailable(reason, location=str(self.location)) from error

    def _standing(self) -> ClientSession | None:
        session = self._session
        return None if session is None or session.lost or session.pid != os.getpid() else session

    def _join(self, engine: Engine) -> ClientSession:
        session = open_session(engine, self.options, self._run_deferred)
        try:
            with self._lock:
                if self.engine_if_open is engine:
                    self._session = session
                    return session
        finally:  # even after a signal handler's exception: nothing else would stop its threads
            if self._session is not session:
                session.stop()
        raise StoreUnavailable("the connection is closed", location=str(self.location))  # closed in the meantime

    @property
    def owes(self) -> bool:
        """Whether messages are still unsettled."""
        session = self._session
        return session is not None and not session.lost and bool(session.known)

    def _run_deferred(self) -> None:
        """Called about once a second, and on :meth:`nudge`, from the duties thread."""
        failure: Exception | None = None
        for step in (self.flush_acks, self._release_pending, self.deferred_calls.run):
            try:
                step()
            except STORE_FAILURES:
                raise
            except Exception as error:  # noqa: BLE001 - raised after the others have run
                failure = failure or error
        try:
            self.close(if_idle=True)
            if failure is not None:
                raise failure
        finally:
            del failure  # its frames refer to this local

    def _run_without_session(self) -> None:
        """In a process without a session, make the deferred calls and empty the lists."""
        if self.engine_if_open is not None:
            self._run_deferred()

    def nudge(self) -> None:
        """Have a thread handle the lists now, and close the store if it is idle. Never blocks; for finalizers, too."""
        session = self._standing()
        if session is not None:
            session.bell.ring()
        elif self.engine_if_open is not None and os.getpid() == self.pid:
            self._deferred_thread.call()

    # -- settling ----------------------------------------------------------------------------------------------------

    def take_acks(self, into: list[Lease]) -> list[Lease]:
        """Move pending acks ``into`` the caller's list; the caller settles them or makes them pending again."""
        move(self.acks, into, MOST_LEASES - len(into))
        return into

    def flush_acks(self) -> None:
        """Settle the pending acks now. After an error, or any exception, they are pending again."""
        leases: list[Lease] = []
        try:
            while self.take_acks(leases):
                self.settled(leases, self.engine.messages.ack(leases))
                leases.clear()
        except BaseException as error:
            self.give_acks_back(leases, error)
            raise

    def give_acks_back(self, leases: Sequence[Lease], error: BaseException) -> None:
        """Make these acks pending again. Unless the error rules it out, note that they may have been settled."""
        if not isinstance(error, KombuFDBError) or isinstance(error, CommitUnknown):
            self._in_doubt.update(leases)
        self.acks.extendleft(reversed(leases))

    def ack(self, leases: list[Lease]) -> None:
        """Settle these acks. After an error they wait for the next flush."""
        self.acks.extendleft(reversed(leases))
        self.flush_acks()

    def settled(self, leases: Sequence[Lease], results: Sequence[bool] | None = None) -> None:
        """Note that these are no longer held here. ``results``: the engine's; None if all are surely settled."""
        session = self._session
        if session is not None:
            session.known.difference_update(leases)
        if self.time_to_run.timers:
            self.time_to_run.forget(leases)
        self.attempted.difference_update(leases)
        self.seen.difference_update(leases)
        gone = [] if results is None else [lease for lease, done in zip(leases, results, strict=False) if not done]
        lost = len(set(gone) - self._in_doubt)
        self._in_doubt.difference_update(leases)
        if lost:
            self.lost_acks += lost
            logger.warning(LOST, plural(lost, "acknowledgement"), self.options.session_ttl)

    def release(self, leases: Iterable[Lease], *, counted: bool = False) -> None:
        """Release messages at once. After an error, the duties thread releases them as soon as it can.

        Without ``counted``, only an attempt that was made counts (:attr:`attempted`).
        """
        leases = list(leases)
        for start in range(0, len(leases), MOST_LEASES):
            part = leases[start : start + MOST_LEASES]
            try:
                self._release(part, counted=counted)
            except BaseException:
                self.release_later(leases[start:])
                raise

    def _release(self, leases: list[Lease], *, counted: bool = False) -> None:
        attempted = [lease for lease in leases if counted or lease in self.attempted]
        others = [lease for lease in leases if not (counted or lease in self.attempted)]
        seen = [lease for lease in others if lease in self.seen]
        unseen = [lease for lease in others if lease not in self.seen]
        for part in filter(None, (attempted, seen, unseen)):
            self.engine.messages.release(part, counted=part is attempted, seen=part is seen)
            self.settled(part)

    def requeue(self, leases: list[Lease], details: dict[str, Any] | None = None, *, due_ms: int = 0) -> None:
        """Release messages, counting the attempt. Raises a ``StoreError``: nothing has changed, try again.

        ``details``: for dead letters, if a message is over its delivery limit. ``due_ms``: when they become ready.
        """
        self.settled(leases, self.engine.messages.release(leases, due_ms=due_ms, details=details))

    def reject(self, leases: list[Lease], *, reason: str = "rejected", **details: Any) -> None:
        """Dead-letter. Raises a ``StoreError``: nothing has changed, try again."""
        self.settled(leases, self.engine.messages.reject(leases, reason=reason, **details))

    def refuse(self, delivery: Delivery, error: str, **details: str) -> None:
        """Dead-letter a message that no consumer can handle; if the store refuses, retry until it accepts."""
        logger.error("dead-lettered message %s of queue %s: %s", delivery.message_id.hex(), delivery.queue, error)
        try:
            self.reject([delivery.lease], reason="malformed", error=error, **details)
        except StoreError:
            self.settle_later(delivery.lease, {"error": error, **details}, reason="malformed", requeue=False)

    def settle_later(self, lease: Lease, details: dict[str, Any], *, reason: str, requeue: bool) -> None:
        """Reject a message, or requeue it, as soon as the store answers. Until then it stays leased. Never blocks."""

        def settle() -> None:
            self._in_doubt.add(lease)  # an earlier attempt may have committed: then the lease is settled, not lost
            try:
                if requeue:
                    self.requeue([lease], details)
                else:
                    self.reject([lease], reason=reason, **details)
            except STORE_FAILURES:
                raise
            except Exception:
                logger.warning("a message can't be rejected, and is released", exc_info=True)
                self.release_later([lease])

        self.attempted.add(lease)
        if self.time_to_run.timers:
            self.time_to_run.forget((lease,))  # the consumer was in time
        self.later(settle)

    def discard(self, leases: list[Lease]) -> int:
        """Delete messages that no consumer has seen. Returns how many. Raises a ``StoreError``: try again."""
        deleted = self.engine.messages.ack(leases)
        self.settled(leases)
        return sum(deleted)

    def watch(
        self,
        delivery: Delivery,
        *,
        started: Callable[[], bool] = lambda: True,
        gone: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin the delivery's time to run, if it has one; :meth:`settled` ends it. See ``time_to_run.py``."""
        if delivery.ttr_ms:
            self.time_to_run.watch(delivery.lease, delivery.ttr_ms / 1000, started=started, gone=gone)

    def _release_overdue(self, leases: list[Lease], counted: bool) -> int:
        """Release overdue messages on their consumers' behalf. Raises a ``StoreError``: try again."""
        released = self.engine.messages.release(leases, counted=counted, details=OVERDUE)
        self.settled(leases)
        return sum(released)

    def leave(self, tags: Collection[str], held: Callable[[], Collection[Lease]] = list) -> None:
        """End these consumers; if one was the active one of its queue, another takes over. Raises a ``StoreError``.

        ``held``: returns the leases to release first. It is called when none of the consumers' claims is under way, so
        it includes their messages.
        """
        session = self._session
        if session is not None and session.lost:
            session = None
        if session is not None:
            session.end_consumers(tags)
        self._release_before(held())
        if session is not None:
            self.engine.queues.leave(session.session_id, tags)

    def remove_consumer(
        self, session_id: SessionId, queue: str, tag: str, held: Callable[[], Collection[Lease]] = list
    ) -> None:
        """End a consumer of this queue; an auto-delete queue ends with its last one. Raises a ``StoreError``.

        ``held``: as in :meth:`leave`.
        """
        session = self._session
        if session is not None and session.session_id == session_id:
            session.end_consumers([tag])
        self._release_before(held())
        self.engine.queues.remove_consumer(session_id, queue, tag)

    def _release_before(self, held: Collection[Lease]) -> None:
        """Release these, and all pending ones, before another consumer takes over: the messages stay in order."""
        self.release(held)
        self._release_pending()

    def release_later(self, leases: Iterable[Lease]) -> None:
        """Have another thread release messages. Never blocks; may be called from a finalizer."""
        self._returns.extend(leases)
        self.nudge()

    def _release_pending(self) -> None:
        leases: list[Lease] = []
        try:
            while move(self._returns, leases, MOST_LEASES):
                self._release(leases)
                leases.clear()
        except BaseException:
            self._returns.extendleft(reversed(leases))
            raise

    def later(self, call: Callable[[], object]) -> None:
        """Have another thread make this call, and repeat it until the store answers. Never blocks."""
        self.deferred_calls.add(call)
        self.nudge()

    def make_deferred_calls(self) -> None:
        """Make the deferred calls now: one may end a queue that is about to be declared. Raises a ``StoreError``."""
        patience_s = self.patience.allow(self.options.operation_timeout)
        for _ in range(2):  # the second time for those that have failed in another thread
            try:
                self.deferred_calls.run()
            except STORE_FAILURES as error:
                if not is_of_one(error):
                    raise
            except Exception as error:  # noqa: BLE001 - the duties thread repeats and reports it
                logger.debug("a deferred call failed: %s", error)
            self.deferred_calls.wait(patience_s)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, *, if_idle: bool = False) -> None:
        """Settle, end the session, close the store. Idempotent; may open again later.

        ``if_idle``: only if no connection uses it, no message is unsettled and no call is deferred.
        """
        if os.getpid() != self.pid:
            return
        if not if_idle:
            self._finish()
        with self._lock:  # no longer: the session's threads need it to end
            if if_idle and (self._users or self.owes or self._returns or self.deferred_calls):
                return
            session, self._session = self._session, None
            engine, self.engine_if_open = self.engine_if_open, None
            self.time_to_run.clear()
            atexit.unregister(self.close)
        if engine is None:
            return
        with self.patience.ending():
            self._close(engine, session)

    def _finish(self) -> None:
        """Make the deferred calls, whose threads have ended."""
        if self.engine_if_open is None:
            return
        with self.patience.ending():
            began, longest_s = monotonic(), self.options.operation_timeout
            if not self._deferred_thread.stop(self.patience.allow(longest_s)):
                self.patience.wasted(monotonic() - began)
            if self._session is not None:
                self._session.stop()
            try:
                self.deferred_calls.run()
            except Exception as error:  # noqa: BLE001 - whatever a call raises, the others must run, too
                logger.warning("%d deferred call(s) are not done: %s", len(self.deferred_calls), error)

    def _close(self, engine: Engine, session: ClientSession | None) -> None:
        try:
            if session is not None:
                self._end(engine, session)
            if not self.suspected:
                engine.upkeep.flush_totals(timeout_s=SUSPECT_TIMEOUT_S)
        except KombuFDBError as error:
            logger.debug("the last second's totals are not counted: %s", error)
        finally:
            engine.database.close()

    def _end(self, engine: Engine, session: ClientSession) -> None:
        leases: list[Lease] = []
        try:
            while self.take_acks(leases):
                engine.messages.ack(leases)
                session.known.difference_update(leases)
                leases.clear()
            for counted, leases_ in ((True, self.attempted), (False, self.seen - self.attempted)):
                own = [lease for lease in leases_ if lease.session == session.session_id]
                if own and not session.lost:
                    engine.messages.release(own, counted=counted, seen=True)
            session.close()
        except KombuFDBError as error:
            # Nothing is lost: what the session still holds is released when its TTL is over.
            logger.warning("could not end the session: %s", error)
        finally:
            self.attempted.clear()
            self.seen.clear()
            self.acks.extendleft(reversed(leases))  # they can be settled until the session is fenced


# -- one per process -------------------------------------------------------------------------------------------------

_registry: dict[Hashable, Client] = {}


def client_for(location: Location, options: Options) -> Client:
    """The process's client for this store, shared by all connections with equal options."""
    options = replace(options, connect_timeout=_ANY_CONNECT_TIMEOUT)
    key = (os.getpid(), location, options)
    known = _registry.get(key)
    if known is not None:
        return known
    client = Client(location, options)
    known = _registry.setdefault(key, client)  # without a lock: another thread, or a signal handler, may be faster
    if known is client:
        # For multiprocessing's children, which run no exit handlers; a child that inherits it does nothing.
        Finalize(None, client.close, exitpriority=1)
    return known


def close_clients() -> None:
    """Close every client of this process, as its exit would: for a program that outlives its store."""
    for client in list(_registry.values()):
        client.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_registry.clear)
