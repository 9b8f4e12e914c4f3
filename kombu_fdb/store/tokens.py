"""Commit tokens, and what is left in doubt without them.

Model. A *token* is a key of the store that only one process writes, lent to one transaction at a time. Each run of that
transaction that writes anything also

* sets the token to a value that only this run writes, and
* reads it, for conflicts only: the store compares versions when it commits, and nothing travels.

So the token tells which run has committed; and a transaction that *changes* the token (a later run, or a fence) makes
sure that no earlier run ever commits, however late its commit arrives: it conflicts on its own token.

A *doubt* is a transaction of which the process does not know whether it has happened: the answer to a commit was lost,
or an exception came out of a signal handler before the answer was noted. It begins before the commit is sent and ends
when its outcome is known:

* *open*: one of its runs may have committed, or may still;
* *settled*: ``landed`` is the run that has committed, or empty: none has, and none will.

Tokens of processes that are gone are cleared by others, when they have not changed for ``duties.LEFT_TTL_S`` under
observation. A token that is missing where it was, or a doubt older than :data:`LONGEST_DOUBT_S` by either clock (the
wall clock also runs while a machine sleeps), therefore proves nothing, and the doubt can't be settled any more. A token
that was not used for so long is left to the sweepers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kombu_fdb.primitives.clock import Clock

T = TypeVar("T")

#: For how long a token tells what happened, in seconds: far shorter than it takes others to clear it.
LONGEST_DOUBT_S = 300.0
#: The run that is none: settling a doubt writes it.
_FENCE = 0xFFFFFFFF


@dataclass(slots=True)
class Token:
    """One key, and the number of the logical transaction that may write it now."""

    key: bytes
    number: int = 0
    #: What it was set to by the last transaction that is known to have happened; None if it was never set.
    before: bytes | None = None
    used_s: float = 0.0

    def value(self, attempt: int) -> bytes:
        return struct.pack(">QI", self.number, attempt)

    @property
    def fence(self) -> bytes:
        return self.value(_FENCE)


class CommitTokens:
    """A stack of token keys for one process: as many as transactions ever ran at the same time.

    ``list.append`` and ``list.pop`` are atomic, so no lock is needed.
    """

    def __init__(self, make_key: Callable[[int], bytes]) -> None:
        self._make_key = make_key
        self._free: list[Token] = []
        self._made = 0

    def take(self, now_s: float) -> Token:
        """A token that no other run uses meanwhile, with a number it never had before."""
        token = self._fresh(now_s)
        token.number += 1
        token.used_s = now_s
        return token

    def _fresh(self, now_s: float) -> Token:
        while self._free:
            token = self._free.pop()
            if now_s - token.used_s < LONGEST_DOUBT_S:
                return token
        self._made += 1
        return Token(self._make_key(self._made))

    def give_back(self, token: Token) -> None:
        """No commit that writes it can be under way any more. Else it is left behind, and swept by age."""
        self._free.append(token)


@dataclass(slots=True)
class Doubt(Generic[T]):
    """What a transaction may have done. Made by its caller, kept by :class:`~kombu_fdb.store.retry.Retry`."""

    token: Token | None = None
    #: Of each run that may have committed: the value of the token, and what the run would have returned.
    results: dict[bytes, T] = field(default_factory=dict)
    #: Whether its outcome is known, and which run it was; None: none of them.
    settled: bool = False
    landed: bytes | None = None
    _since_s: float = 0.0
    _since_ms: int = 0

    def begin(self, value: bytes, result: T, clock: Clock) -> None:
        """A run is about to send its commit."""
        if not self.results:
            self._since_s, self._since_ms = clock.monotonic(), clock.wall_ms()
        self.results[value] = result

    def forget(self) -> None:
        """None of the runs so far has committed, or ever will: what follows begins anew, with another token."""
        self.results.clear()

    def settle(self, landed: bytes | None) -> None:
        self.landed = landed
        self.settled = True

    @property
    def is_open(self) -> bool:
        """Whether it may have happened, or still may."""
        return bool(self.results) and not self.settled

    @property
    def may_have_happened(self) -> bool:
        return self.is_open or self.landed is not None

    @property
    def result(self) -> T | None:
        """Of the run that has committed."""
        return None if self.landed is None else self.results[self.landed]

    def is_too_old(self, clock: Clock) -> bool:
        """Whether its token may have been cleared by now."""
        passed_s, shown_s = clock.monotonic() - self._since_s, abs(clock.wall_ms() - self._since_ms) / 1000
        return max(passed_s, shown_s) > LONGEST_DOUBT_S
