"""One client per process and store: what all connections of a process share.

Model. A client is *closed* until a first connection attaches, then it holds the open store and the engine. Publishing
needs no more. The first consumer opens the process's **session** (``membership.py``), in whose name every message is
claimed; it ends when the last connection has detached and every message is settled, or with the process.

Two lists cross threads here, both drained by whoever talks to the store next:

* ``acks``: acknowledged messages whose leases still stand. A receiver takes them along with its next claim, or flushes
  them after a moment; without one, ``flush_acks`` is called at once.
* ``returns``: messages to hand back that nobody can hand back now (a finalizer must not block, the store may be down).
  The session's duties thread does it.

What happens at each failure:

* the store does not answer: both lists keep what they hold; acks and releases may be repeated without harm.
* the session was fenced (this process was silent for longer than its TTL): all leases are lost, other workers get the
  messages. The next ``membership()`` opens another one. Late acks of the old one change nothing; they are counted and
  logged.
* the process forks: the child forgets the registry and opens its own client when it needs one. It never touches the
  parent's store, session, threads or sockets: every use checks the process id.
* the process exits: unsettled messages go back at once. If it is killed, the session's TTL brings them back.
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
from multiprocessing.util import Finalize
from typing import Any

from kombu_fdb import connect
from kombu_fdb.errors import ForkedError, KombuFDBError, StoreError, StoreUnavailable
from kombu_fdb.location import Location
from kombu_fdb.membership import Membership
from kombu_fdb.model import Delivery, Lease
from kombu_fdb.options import Options
from kombu_fdb.overdue import Overdue
from kombu_fdb.queue.engine import Engine
from kombu_fdb.store.protocol import Database

__all__ = ["Client", "client_for", "close_clients"]

logger = logging.getLogger(__name__)

#: While the store is known not to answer, a new connection gives up after this many seconds.
SUSPECT_TIMEOUT_S = 1.0
#: Stands in the registry for all: each connection brings its own, Celery's differ from kombu's.
_ANY_CONNECT_TIMEOUT = 5.0
#: Leases settled in one transaction.
MOST_LEASES = 500

#: Stands in the history of a message that was too late too often.
OVERDUE = {"error": "its time to run (ttr) has passed"}

LOST = (
    "%d acknowledgement(s) came too late: this process had been silent for longer than session_ttl (%g s), so its "
    "messages were given to others, and may run twice. Make such tasks idempotent, see "
    "worker_deduplicate_successful_tasks, or raise session_ttl."
)


class Client:
    """The store as one process sees it. Thread-safe. Get it from :func:`client_for`."""

    def __init__(self, location: Location, options: Options, opened: connect.Opened | None = None) -> None:
        """``opened``: a store that is open already; it is closed with the client all the same."""
        self.pid = os.getpid()
        self.location = location
        self.options = options
        self.acks: deque[Lease] = deque()
        #: Late acknowledgements that changed nothing, since the process started.
        self.lost_acks = 0
        self._returns: deque[Lease] = deque()
        self._errands: deque[Callable[[], object]] = deque()
        self._users: weakref.WeakSet[Hashable] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._opened = opened
        self._membership: Membership | None = None
        self._suspect = False
        self._overdue = Overdue(self._take_back)

    # -- the store ---------------------------------------------------------------------------------------------------

    def attach(self, user: Hashable, *, timeout_s: float) -> None:
        """A connection begins to use the client: open the store, or check that it answers.

        Raises ``StoreUnavailable`` or ``FormatError`` within ``timeout_s`` seconds.
        """
        if self._suspect:
            timeout_s = min(timeout_s, SUSPECT_TIMEOUT_S)
        with self._lock:
            try:
                self._open(timeout_s)
            except StoreError:
                self._suspect = True
                raise
            self._suspect = False
            self._users.add(user)

    def _open(self, timeout_s: float) -> None:
        if self._opened is None:
            self._opened = connect.open_store(self.location, self.options, timeout_s=timeout_s)
            # Only now: exit handlers run backwards, and FoundationDB's, just registered, ends its network thread.
            atexit.register(self.close)
        else:
            connect.verify(self._opened.database, self.location, timeout_s=timeout_s)

    def detach(self, user: Hashable) -> None:
        """A connection was closed. With the last one, and nothing left to settle, everything closes."""
        with self._lock:
            self._users.discard(user)
        self.close(if_idle=True)

    def suspect(self) -> None:
        """A call failed: until one succeeds, new connections don't wait long."""
        self._suspect = True

    @property
    def engine(self) -> Engine:
        """Raises ``ForkedError`` in a child, ``StoreUnavailable`` when closed."""
        return self._open_store.engine

    @property
    def database(self) -> Database:
        """For others who keep something in the same store. Raises as ``engine`` does."""
        return self._open_store.database

    @property
    def _open_store(self) -> connect.Opened:
        self.check_process()
        if self._opened is None:
            raise StoreUnavailable("the connection is closed", location=str(self.location))
        return self._opened

    def check_process(self) -> None:
        """Raises ``ForkedError`` in another process than the one that made this client."""
        if os.getpid() != self.pid:
            raise ForkedError("this connection belongs to the parent process", parent=self.pid)

    # -- the session -------------------------------------------------------------------------------------------------

    def membership(self) -> Membership:
        """The process's session, opened when first needed, and again after it was fenced."""
        membership = self._membership
        if membership is not None and not membership.lost and membership.pid == os.getpid():
            return membership
        engine = self.engine
        with self._lock:
            if self._membership is None or self._membership.lost:
                self._membership = Membership.open(engine, self.options, self._housekeeping)
            return self._membership

    @property
    def owes(self) -> bool:
        """Whether messages are still unsettled."""
        membership = self._membership
        return membership is not None and not membership.lost and bool(membership.known)

    def _housekeeping(self) -> None:
        """Called about once a second, and on :meth:`nudge`, from the duties thread."""
        self.flush_acks()
        self._hand_back()
        self._run_errands()
        self.close(if_idle=True)

    def nudge(self) -> None:
        """Have the duties thread look at the lists now. Never blocks."""
        membership = self._membership
        if membership is not None:
            membership.nudge()

    # -- settling ----------------------------------------------------------------------------------------------------

    def take_acks(self) -> list[Lease]:
        """Remove the pending acks, for a caller who settles them or gives them back."""
        taken: list[Lease] = []
        while self.acks and len(taken) < MOST_LEASES:
            try:
                taken.append(self.acks.popleft())
            except IndexError:  # another thread was faster
                break
        return taken

    def flush_acks(self) -> None:
        """Settle the pending acks now. On an error they are kept."""
        while leases := self.take_acks():
            self.ack(leases)

    def ack(self, leases: list[Lease]) -> None:
        """Settle these. On an error they are kept for the next flush."""
        try:
            results = self.engine.ack(leases)
        except KombuFDBError:
            self.acks.extendleft(reversed(leases))
            raise
        self.settled(leases, results)

    def settled(self, leases: Sequence[Lease], results: Sequence[bool] | None = None) -> None:
        """These are no longer ours. ``results``: what the engine said; None if all are settled for certain."""
        membership = self._membership
        if membership is not None:
            membership.known.difference_update(leases)
        self._overdue.forget(leases)
        lost = 0 if results is None else len(results) - sum(results)
        if lost:
            self.lost_acks += lost
            logger.warning(LOST, lost, self.options.session_ttl)

    def release(self, leases: Iterable[Lease], *, counted: bool = False) -> None:
        """Hand messages back at once. On a ``StoreError`` the duties thread does it, uncounted, as soon as it can."""
        leases = list(leases)
        for start in range(0, len(leases), MOST_LEASES):
            part = leases[start : start + MOST_LEASES]
            try:
                self.engine.release(part, counted=counted)
            except StoreError:
                self.release_later(leases[start:])
                raise
            self.settled(part)

    def requeue(self, leases: list[Lease], details: dict[str, Any] | None = None) -> None:
        """Put back where they were, counting the attempt. Raises a ``StoreError``: nothing has changed, try again.

        ``details``: for the dead letters of those that have come back too often.
        """
        self.settled(leases, self.engine.release(leases, details=details))

    def reject(self, leases: list[Lease], *, reason: str = "rejected", **details: Any) -> None:
        """Dead-letter. Raises a ``StoreError``: nothing has changed, try again."""
        self.settled(leases, self.engine.reject(leases, reason=reason, **details))

    def watch(
        self,
        delivery: Delivery,
        *,
        started: Callable[[], bool] = lambda: True,
        gone: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin the delivery's time to run, if it has one; :meth:`settled` ends it. See :mod:`kombu_fdb.overdue`."""
        if delivery.ttr_ms:
            self._overdue.watch(delivery.lease, delivery.ttr_ms / 1000, started=started, gone=gone)

    def unwatch(self, lease: Lease) -> None:
        """The consumer was in time, even if the store hears of it later."""
        self._overdue.forget([lease])

    def _take_back(self, leases: list[Lease], counted: bool) -> int:
        """In the consumer's stead. Raises a ``StoreError``: try again."""
        released = self.engine.release(leases, counted=counted, details=OVERDUE)
        self.settled(leases)
        return sum(released)

    def leave(self, tags: Collection[str]) -> None:
        """These consumers end: where one was the only active one, another takes over. Raises a ``StoreError``."""
        membership = self._membership
        if membership is not None and not membership.lost:
            self.engine.leave(membership.session_id, tags)

    def release_later(self, leases: Iterable[Lease]) -> None:
        """Hand messages back from another thread. Never blocks; may be called from a finalizer."""
        self._returns.extend(leases)
        self.nudge()

    def _hand_back(self) -> None:
        leases = []
        while self._returns:
            leases.append(self._returns.popleft())
        if leases:
            self.release(leases)

    def later(self, errand: Callable[[], object]) -> None:
        """Have the duties thread do something, and repeat it until the store answers. Never blocks."""
        self._errands.append(errand)
        self.nudge()

    def _run_errands(self) -> None:
        while self._errands:
            errand = self._errands[0]
            errand()
            self._errands.popleft()

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, *, if_idle: bool = False) -> None:
        """Settle, end the session, close the store. Idempotent; may open again later.

        ``if_idle``: only if no connection uses it and no message is unsettled.
        """
        if os.getpid() != self.pid:
            return
        with self._lock:  # and not longer: the session's threads need it to end
            if if_idle and (self._users or self.owes):
                return
            membership, self._membership = self._membership, None
            opened, self._opened = self._opened, None
            self._overdue.clear()
            atexit.unregister(self.close)
        if opened is None:
            return
        try:
            if membership is not None:
                self._end(opened.engine, membership)
            if not self._suspect:
                opened.engine.add_totals(timeout_s=SUSPECT_TIMEOUT_S)
        except KombuFDBError as error:
            logger.debug("the last second's totals are not counted: %s", error)
        finally:
            opened.database.close()

    def _end(self, engine: Engine, membership: Membership) -> None:
        try:
            leases = self.take_acks()
            if leases:
                engine.ack(leases)
                membership.known.difference_update(leases)
            membership.close()
        except KombuFDBError as error:
            # Nothing is lost: what the session still holds comes back when its TTL has passed.
            logger.warning("could not end the session: %s", error)


# -- one per process -------------------------------------------------------------------------------------------------

_registry: dict[Hashable, Client] = {}
_registry_lock = threading.Lock()


def client_for(location: Location, options: Options) -> Client:
    """The process's client for this store; the same for all connections whose options agree."""
    options = replace(options, connect_timeout=_ANY_CONNECT_TIMEOUT)
    key = (os.getpid(), location, options)
    with _registry_lock:
        client = _registry.get(key)
        if client is None:
            client = _registry[key] = Client(location, options)
            # For multiprocessing's children, which run no exit handlers; it does nothing in a child that inherited it.
            Finalize(None, client.close, exitpriority=1)
        return client


def close_clients() -> None:
    """Close every client of this process, as its exit would. For who ends a store before the process ends."""
    with _registry_lock:
        clients = list(_registry.values())
    for client in clients:
        client.close()


def _forget_parent() -> None:
    """In a forked child. The lock is new because a thread that is not here any more may have held it."""
    global _registry_lock  # noqa: PLW0603
    _registry_lock = threading.Lock()
    _registry.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)
