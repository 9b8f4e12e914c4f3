"""Retry: run a verb until it commits, even if an answer is lost. Patience: how long a process waits, even at its end.

Model of the loop. One logical transaction is a ``body`` that runs in fresh transactions until one commits. Its outcome
may be

* committed: the result of that run is returned;
* refused (conflict, too old): run again after a pause, until the deadline;
* unknown (FoundationDB's 1021,
  https://apple.github.io/foundationdb/developer-guide.html#transactions-with-unknown-results): the store no longer
  works on the commit, but it may or may not have happened.

Because the outcome may be unknown, each run that writes also sets a *commit token*. The next run reads it first. If it
finds the token of an earlier unknown run, that run has committed, and its result is returned as if the answer had
arrived. So no verb of the engine has to be idempotent by itself. The price is one blind write and one conflict key per
transaction, or nothing on a store that answers every commit.

If the commit may still be under way (``in_flight``: the deadline passed while it ran), reading proves nothing: it may
succeed after the read. Then the caller gets ``CommitUnknown``; so it does if the store fails for good after a run of
unknown outcome. A caller that passes a :class:`~kombu_fdb.store.retry.Doubt` finds there what may have happened, even
after a signal handler's exception. :meth:`Retry.resolve` settles the doubt later. It reads the token and *fences* in
one transaction, so that what has not happened never will. ``engine/facade/engine.py`` says what each verb does in this
case.

Guarantee BOUNDED: a run ends by its deadline, whatever the store does, because each call in a transaction gets the
remaining time.

Model of the tokens. A *token* is a key of the store that only one process writes, for one transaction at a time. Each
run of that transaction that writes anything also

* sets the token to a value that only this run writes, and
* reads it, only as a conflict key: the store compares versions at the commit, and no data travels.

So the token shows which run has committed. And once a later run, or a fence, *changes* the token, no earlier run ever
commits, however late its commit arrives: it conflicts on its own token.

A *doubt* is a transaction whose outcome the process does not know: the answer to a commit was lost, or a signal
handler's exception came before the answer was noted. The doubt begins before the commit is sent and ends when the
outcome is known:

* *open*: one of its runs may have committed, or may yet;
* *settled*: ``landed`` is the run that has committed, or empty: none has, and none will.

Other processes clear tokens that they have seen unchanged for ``duties.LEFT_TTL_S``, as the owners are probably dead.
So a missing token proves nothing; nor does one whose doubt is older than :data:`LONGEST_DOUBT_S` by either clock (the
wall clock also runs while a machine sleeps). Such a doubt can no longer be settled. A token that has been unused for
that long is left to the clean-up.

Model of patience: how long a caller waits for a store that does not answer, in all its transactions together. A single
verb has a deadline of its own. The verbs of one public call share the call's (:meth:`Patience.within`): each gets what
is left of it, and at least an attempt.

A closing connection, or a program that is asked to stop, makes many calls in a row. They share :data:`ENDING_S` seconds
of futile waiting: a failed call uses up the time it took, and later calls get the rest, at least :data:`LEAST_S`. A
commit restores all of it, so calls to a working store are never cut short, however many there are. Calls to a store
that only answers reads (a locked file, a full disk) are.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from itertools import count
from math import inf
from random import Random
from typing import Any, Generic, TypeVar

from kombu_fdb.errors import CommitUnknown, Conflict, StoreError, StoreUnavailable
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.store.protocol import Database, Transaction

T = TypeVar("T")

# -- commit tokens -----------------------------------------------------------------------------------------------------


#: How long a token proves what happened, in seconds: far shorter than others wait before they clear it.
LONGEST_DOUBT_S = 300.0
#: An attempt number that no run has: a fence writes it.
_FENCE = 0xFFFFFFFF


@dataclass(slots=True)
class Token:
    """One key, and the number of the logical transaction that may write it now."""

    key: bytes
    number: int = 0
    #: Its value from the last transaction known to have happened; None if it was never set.
    before: bytes | None = None
    used_s: float = 0.0

    def value(self, attempt: int) -> bytes:
        return struct.pack(">QI", self.number, attempt)

    @property
    def fence(self) -> bytes:
        return self.value(_FENCE)


@dataclass(slots=True)
class Doubt(Generic[T]):
    """What a transaction may have done. The caller makes it; :class:`~kombu_fdb.store.retry.Retry` fills it in."""

    token: Token | None = None
    #: For each run that may have committed: the value of the token, and what the run would have returned.
    results: dict[bytes, T] = field(default_factory=dict)
    #: Whether the outcome is known, and which run has committed; None if no run has.
    settled: bool = False
    landed: bytes | None = None
    _since_s: float = 0.0
    _since_ms: int = 0

    def begin(self, value: bytes, result: T, clock: Clock) -> None:
        """Note that a run is about to send its commit."""
        if not self.results:
            self._since_s, self._since_ms = clock.monotonic(), clock.wall_ms()
        self.results[value] = result

    def forget(self) -> None:
        """Note that no run so far has committed, or ever will, and start over with another token."""
        self.results.clear()

    def settle(self, landed: bytes | None) -> None:
        self.landed = landed
        self.settled = True

    @property
    def is_open(self) -> bool:
        """Whether the transaction may have happened, or may yet."""
        return bool(self.results) and not self.settled

    @property
    def may_have_happened(self) -> bool:
        return self.is_open or self.landed is not None

    @property
    def result(self) -> T | None:
        """The result of the run that has committed."""
        return None if self.landed is None else self.results[self.landed]

    def is_too_old(self, clock: Clock) -> bool:
        """Whether its token may have been cleared by now."""
        passed_s, shown_s = clock.monotonic() - self._since_s, abs(clock.wall_ms() - self._since_ms) / 1000
        return max(passed_s, shown_s) > LONGEST_DOUBT_S


# -- patience ----------------------------------------------------------------------------------------------------------


#: Seconds of futile waiting: twice this (a child process, then its parent) is well within the 10 s after which service
#: managers begin to kill.
ENDING_S = 4.0
LEAST_S = 0.05

_ending: ContextVar[bool] = ContextVar("kombu_fdb_ending", default=False)
#: The thread of the call, and its deadline. A thread that a call starts may inherit this, but has no deadline.
_deadline: ContextVar[tuple[int, float] | None] = ContextVar("kombu_fdb_deadline", default=None)


class Patience:
    """The patience of a process with a store. Thread-safe: time that two threads waste at once counts once or twice."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        #: Whether the program has been asked to stop.
        self.stopping: Callable[[], bool] = lambda: False
        #: How many seconds may still be wasted.
        self.left_s = ENDING_S
        self._of_thread = threading.local()

    @staticmethod
    @contextmanager
    def ending() -> Iterator[None]:
        """Mark what this thread does inside as part of a shutdown."""
        token = _ending.set(True)
        try:
            yield
        finally:
            _ending.reset(token)

    def within(self, seconds: float, call: Callable[[], T]) -> T:
        """Call ``call`` with one deadline for all its transactions, or an enclosing call's deadline if that is earlier.

        It runs in a context of its own, so that no signal handler's exception leaves its deadline to the next call.
        """
        context = copy_context()
        context.run(_deadline.set, (threading.get_ident(), self.clock.monotonic() + self._left_of_call(seconds)))
        return context.run(call)

    def allow(self, timeout_s: float) -> float:
        """How much of ``timeout_s`` a verb may wait."""
        if _ending.get() or self.stopping():
            timeout_s = min(timeout_s, max(self.left_s, LEAST_S))
        return timeout_s if _deadline.get() is None else self._left_of_call(timeout_s)

    def _left_of_call(self, timeout_s: float) -> float:
        call = _deadline.get()
        if call is None or call[0] != threading.get_ident():
            return timeout_s
        return min(timeout_s, max(call[1] - self.clock.monotonic(), 0.0))

    def wasted(self, seconds: float) -> None:
        """Note that a failed call has waited this long."""
        now_s, (since_s, last_s) = self.clock.monotonic(), self._failures
        goes_on = now_s - seconds - last_s <= ENDING_S
        self._of_thread.failures = (since_s if goes_on else now_s - seconds), now_s
        if _ending.get() or self.stopping():
            self.left_s = max(0.0, self.left_s - seconds)

    @property
    def _failures(self) -> tuple[float, float]:
        """When this thread's series of failed calls began, and when the last one failed."""
        return getattr(self._of_thread, "failures", (-inf, -inf))

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0

    @property
    def failing_s(self) -> float:
        """How long this thread's calls have failed in a row, even if other threads' calls were answered."""
        now_s, (since_s, last_s) = self.clock.monotonic(), self._failures
        return 0.0 if now_s - last_s > ENDING_S else now_s - since_s

    @property
    def pause_s(self) -> float:
        """How long this thread should still wait before it connects again: as long as it has been failing."""
        _, last_s = self._failures
        return max(0.0, min(self.failing_s, LONGEST_PAUSE_S) - (self.clock.monotonic() - last_s))

    def answered(self) -> None:
        """Note that the store has accepted a commit."""
        self.left_s = ENDING_S


# -- retry -------------------------------------------------------------------------------------------------------------


FIRST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 1.0
#: The advice if others were faster each time, or the store was too slow.
CALL_AGAIN = "Call again; if it happens often, raise operation_timeout (publish_timeout for a publish)"


@dataclass(slots=True)
class Retry:
    """Runs bodies to completion against one database.

    Raises (from :meth:`__call__`): ``StoreUnavailable`` when the deadline passes or the store fails for good,
    ``CommitUnknown`` when it passes during a commit, ``LimitExceeded``, and whatever the body raises.

    ``token_key``: makes the key of this process's n-th token; not needed for :meth:`read` and :meth:`repeat`.
    """

    database: Database
    clock: Clock
    pauses: Random
    patience: Patience = field(default_factory=Patience)
    token_key: Callable[[int], bytes] | None = None
    #: The tokens that no run uses: in total, as many tokens as transactions have ever run at once. Then the numbers of
    #: new ones. No lock is needed, as ``list.append``, ``list.pop`` and ``next`` are atomic.
    _free: list[Token] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def __call__(
        self,
        body: Callable[[Transaction], T],
        *,
        timeout_s: float,
        on_conflict: Callable[[], None] | None = None,
        doubt: Doubt[T] | None = None,
    ) -> T:
        """Run ``body`` until it commits, for at most ``timeout_s`` seconds, and return its result.

        ``on_conflict`` is called at each lost race. ``doubt``: records what may have happened if this raises; pass an
        empty one, or an earlier call's, to continue its transaction.
        """
        if not self.database.commit_may_be_unknown:
            return self.repeat(body, timeout_s=timeout_s, on_conflict=on_conflict)
        doubt = Doubt() if doubt is None else doubt
        token = self._token_for(doubt)
        try:
            return self.repeat(body, timeout_s=timeout_s, on_conflict=on_conflict, doubt=doubt)
        finally:
            if not doubt.is_open:  # else a late commit may still write it: it is abandoned, and cleared by age
                token.before = doubt.landed or token.before
                self._free.append(token)

    def _token_for(self, doubt: Doubt[T]) -> Token:
        """A new token, or an open doubt's own, which tells its next run about earlier ones.

        It gets a number that it never had before.
        """
        if not doubt.is_open:
            assert not doubt.results, "what has been settled is another transaction's"
            doubt.token = self._free_token()
        token = _token(doubt)
        token.number += 1
        return token

    def _free_token(self) -> Token:
        """A token that no other run uses."""
        now_s = self.clock.monotonic()
        while self._free:
            token = self._free.pop()
            if now_s - token.used_s < LONGEST_DOUBT_S:
                token.used_s = now_s
                return token
        assert self.token_key is not None, "only reads and what may be repeated go without tokens"
        return Token(self.token_key(next(self._numbers)), used_s=now_s)

    def resolve(self, doubt: Doubt[T], *, timeout_s: float) -> bool | None:
        """Settle a doubt: True if it has happened (``doubt.result``), False if it has not, and never will.

        None: it was too long ago to find out. Raises what :meth:`__call__` raises, and then the doubt stays open.
        """
        if not doubt.is_open:
            return doubt.landed is not None
        try:
            landed = self.repeat(lambda tr: self._fence(tr, doubt), timeout_s=timeout_s)
        except _Forgotten:
            return None
        doubt.settle(landed)
        return landed is not None

    def _fence(self, tr: Transaction, doubt: Doubt[Any]) -> bytes | None:
        token = _token(doubt)
        landed = self._landed(tr, doubt)
        if landed is None:
            tr.set(token.key, token.fence)
        return landed

    def _landed(self, tr: Transaction, doubt: Doubt[Any]) -> bytes | None:
        """The run that has committed. Read serializably, so that no run can commit together with this transaction."""
        token = _token(doubt)
        stored = tr.get(token.key)
        if stored in doubt.results:
            return stored
        if stored not in (token.before, token.fence) or doubt.is_too_old(self.clock):
            raise _Forgotten
        return None

    def read(self, body: Callable[[Transaction], T], *, timeout_s: float) -> T:
        """Run a ``body`` that only reads."""
        return self.repeat(body, timeout_s=timeout_s, read_only=True)

    def repeat(
        self,
        body: Callable[[Transaction], T],
        *,
        timeout_s: float,
        on_conflict: Callable[[], None] | None = None,
        doubt: Doubt[T] | None = None,
        read_only: bool = False,
    ) -> T:
        """Run a ``body`` that may take effect twice: without a token; after an unknown commit it just runs again.

        For bodies that see in the store what an earlier run has done, and for stores that answer each commit.
        ``doubt``: has a token; for :meth:`__call__`.
        """
        began = self.clock.monotonic()
        deadline = began + self.patience.allow(timeout_s)
        pause = FIRST_PAUSE_S
        attempt = 0
        while True:
            attempt += 1
            try:
                return self._attempt(body, deadline, doubt, attempt, read_only)
            except StoreError as error:
                if on_conflict is not None and isinstance(error, Conflict):
                    on_conflict()
                if self._is_final(error, began) or not self._pause(pause, deadline):
                    self.patience.wasted(self.clock.monotonic() - began)
                    _give_up(error, doubt is not None and doubt.is_open, attempt)
                    raise
                pause = min(pause * 2, LONGEST_PAUSE_S)

    def _is_final(self, error: StoreError, began: float) -> bool:
        in_flight = isinstance(error, CommitUnknown) and error.in_flight
        return not error.retryable or in_flight or self.clock.monotonic() - began > error.retry_s

    def _attempt(
        self,
        body: Callable[[Transaction], T],
        deadline: float,
        doubt: Doubt[T] | None,
        attempt: int,
        read_only: bool,
    ) -> T:
        tr = self.database.begin(timeout_s=max(deadline - self.clock.monotonic(), 0.001), read_only=read_only)
        try:
            try:
                if doubt is not None and doubt.results:
                    landed = self._landed(tr, doubt)
                    if landed is not None:
                        doubt.settle(landed)
                        tr.cancel()
                        return doubt.results[landed]
                result = body(tr)
                if doubt is not None and not tr.read_only:
                    self._commit(tr, doubt, attempt, result)
                else:
                    tr.commit()  # a transaction that only reads can't conflict; its commit arms its watches
                if self.patience.left_s < ENDING_S and not tr.read_only:
                    self.patience.answered()
            except BaseException:
                tr.cancel()
                raise
        except BaseException:  # a signal handler's exception may have interrupted the first cancel
            tr.cancel()
            raise
        return result

    def _commit(self, tr: Transaction, doubt: Doubt[T], attempt: int, result: T) -> None:
        token = _token(doubt)
        value = token.value(attempt)
        tr.add_read_conflict_key(token.key)
        tr.set(token.key, value)
        doubt.begin(value, result, self.clock)
        try:
            tr.commit()
        except CommitUnknown:
            raise
        except StoreError:
            del doubt.results[value]
            raise
        doubt.settle(value)

    def _pause(self, seconds: float, deadline: float) -> bool:
        """Wait a little, unless that would pass the deadline."""
        seconds = self.pauses.uniform(seconds / 2, seconds)
        if self.clock.monotonic() + seconds >= deadline:
            return False
        self.clock.sleep(seconds)
        return True


class _Forgotten(StoreError):
    """The token that would show the outcome may have been cleared."""

    text = "the commit was too long ago to find out whether it happened"


def _token(doubt: Doubt[Any]) -> Token:
    assert doubt.token is not None, "a doubt has a token from its first run on"
    return doubt.token


def _give_up(error: StoreError, in_doubt: bool, attempts: int) -> None:
    """Raise the error that the caller should get, if it is a different one.

    ``in_doubt``: an earlier run may have committed, whatever happened since.
    """
    if in_doubt and not isinstance(error, CommitUnknown):
        raise CommitUnknown("the outcome of the commit is unknown, and the store has failed since") from error
    if error.retryable and not isinstance(error, (CommitUnknown, StoreUnavailable)):
        told = {"reason": error.text, "fix": CALL_AGAIN, **error.attributes}
        raise StoreUnavailable("the deadline passed while retrying", attempts=attempts, **told) from error
