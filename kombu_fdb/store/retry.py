"""The retry loop, and how it survives a commit whose answer was lost.

Model. One logical transaction is a ``body`` that is run in fresh transactions until one commits. Its outcome may be

* committed: the result of that run is returned;
* refused (conflict, too old): run again after a pause, until the deadline;
* unknown (FoundationDB's 1021, https://apple.github.io/foundationdb/developer-guide.html#transactions-with-unknown-results):
  the store no longer works on it, but it may or may not have happened.

For the last one each writing run also sets a *commit token*: one key that only this caller writes, to a value that only
this run writes. The next run reads the key first. If it finds the token of an earlier unknown run, that run has
committed, and its result is returned as if its answer had come. So no verb of the queue has to be idempotent by itself,
at the price of one blind write per transaction, and none on a store that answers every commit.

If the commit may still be under way (``in_flight``: the deadline passed while it ran) nothing can be concluded, and
``CommitUnknown`` goes to the caller; so it does when the store fails for good after a run of unknown outcome. What each
verb does then stands in ``queue/engine.py``.

Guarantee BOUNDED: a run ends by its deadline, whatever the store does, because every call of a transaction is given
what is left of it. A token key is used by one transaction at a time: see :class:`CommitTokens`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeVar

from kombu_fdb.clock import Clock
from kombu_fdb.errors import CommitUnknown, Conflict, StoreError, StoreUnavailable
from kombu_fdb.store.protocol import Database, Transaction

__all__ = ["CommitTokens", "Retry", "Token"]

T = TypeVar("T")

FIRST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 1.0


@dataclass(slots=True)
class Token:
    """One key, and the number of the logical transaction that may write it now."""

    key: bytes
    number: int = 0

    def value(self, attempt: int) -> bytes:
        return struct.pack(">QI", self.number, attempt)


class CommitTokens:
    """A stack of token keys for one process: as many as transactions ever ran at the same time.

    ``list.append`` and ``list.pop`` are atomic, so no lock is needed.
    """

    def __init__(self, make_key: Callable[[int], bytes]) -> None:
        self._make_key = make_key
        self._free: list[Token] = []
        self._made = 0

    @contextmanager
    def lend(self) -> Iterator[Token]:
        """A token nobody else uses meanwhile, with a number it never had before."""
        try:
            token = self._free.pop()
        except IndexError:
            self._made += 1
            token = Token(self._make_key(self._made))
        token.number += 1
        yield token
        # Not in a ``finally``: after an error the commit may still be in flight and write this key late. Such a token
        # is left behind, and swept from the store by age.
        self._free.append(token)


class Pauses(Protocol):
    """What the loop needs of chance."""

    def uniform(self, a: float, b: float) -> float: ...


@dataclass(slots=True)
class Retry:
    """Runs bodies to completion against one database.

    Raises (from :meth:`__call__`): ``StoreUnavailable`` when the deadline passes or the store fails for good,
    ``CommitUnknown`` when it passes during a commit, ``LimitExceeded``, and whatever the body raises.
    """

    database: Database
    clock: Clock
    tokens: CommitTokens
    pauses: Pauses

    def __call__(
        self, body: Callable[[Transaction], T], *, timeout_s: float, on_conflict: Callable[[], None] | None = None
    ) -> T:
        """Run ``body`` until it commits, for at most ``timeout_s`` seconds, and return its result.

        ``on_conflict`` is told of each lost race.
        """
        if not self.database.commit_may_be_unknown:
            return self._run(body, timeout_s, None, on_conflict)
        with self.tokens.lend() as token:
            return self._run(body, timeout_s, token, on_conflict)

    def repeat(self, body: Callable[[Transaction], T], *, timeout_s: float) -> T:
        """Run a ``body`` that may happen twice: no token is written, and after an unknown commit it just runs again.

        For bodies that look at what stands in the store and find there what an earlier run has done.
        """
        return self._run(body, timeout_s, None, None)

    def read(self, body: Callable[[Transaction], T], *, timeout_s: float) -> T:
        """Run a ``body`` that only reads."""
        return self._run(body, timeout_s, None, None, read_only=True)

    def _run(
        self,
        body: Callable[[Transaction], T],
        timeout_s: float,
        token: Token | None,
        on_conflict: Callable[[], None] | None,
        *,
        read_only: bool = False,
    ) -> T:
        deadline = self.clock.monotonic() + timeout_s
        unknown: dict[bytes, T] = {}
        pause = FIRST_PAUSE_S
        attempt = 0
        while True:
            attempt += 1
            try:
                return self._attempt(body, deadline, token, attempt, unknown, read_only)
            except StoreError as error:
                if on_conflict is not None and isinstance(error, Conflict):
                    on_conflict()
                final = not error.retryable or (isinstance(error, CommitUnknown) and error.in_flight)
                if final or not self._pause(pause, deadline):
                    _give_up(error, bool(unknown), attempt)
                pause = min(pause * 2, LONGEST_PAUSE_S)

    def _attempt(
        self,
        body: Callable[[Transaction], T],
        deadline: float,
        token: Token | None,
        attempt: int,
        unknown: dict[bytes, T],
        read_only: bool,
    ) -> T:
        timeout_s = max(deadline - self.clock.monotonic(), 0.001)
        tr = self.database.begin(timeout_s=timeout_s, read_only=read_only)
        try:
            if unknown and token is not None:
                committed = tr.get(token.key, snapshot=True)
                if committed in unknown:
                    return unknown[committed]
            result = body(tr)
            if tr.read_only:
                return self._finish_reading(tr, result)
            return self._commit(tr, token, attempt, unknown, result)
        finally:
            tr.cancel()

    @staticmethod
    def _finish_reading(tr: Transaction, result: T) -> T:
        tr.commit()  # nothing to conflict with; arms watches
        return result

    @staticmethod
    def _commit(tr: Transaction, token: Token | None, attempt: int, unknown: dict[bytes, T], result: T) -> T:
        if token is None:
            tr.commit()
            return result
        value = token.value(attempt)
        tr.set(token.key, value)
        try:
            tr.commit()
        except CommitUnknown:
            unknown[value] = result
            raise
        return result

    def _pause(self, seconds: float, deadline: float) -> bool:
        """Wait a little, unless that would pass the deadline."""
        seconds = self.pauses.uniform(seconds / 2, seconds)
        if self.clock.monotonic() + seconds >= deadline:
            return False
        self.clock.sleep(seconds)
        return True


def _give_up(error: StoreError, in_doubt: bool, attempts: int) -> NoReturn:
    """Raise what the caller must hear. ``in_doubt``: an earlier run may have committed, whatever happened since."""
    if in_doubt and not isinstance(error, CommitUnknown):
        raise CommitUnknown("the outcome of the commit is unknown, and the store failed since") from error
    if error.retryable and not isinstance(error, CommitUnknown):
        raise StoreUnavailable("the deadline passed while retrying", attempts=attempts) from error
    raise error
