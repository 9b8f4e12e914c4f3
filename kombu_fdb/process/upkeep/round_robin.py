"""Round robin: many subjects of one duty, each of which may be slow or hopeless, and none of which delays the others.

A *subject* is what a step is about: a queue, a session, or "" for a duty that has no parts. A step that fails for a
reason of its own is *set aside*: reported, shown in the store (``quarantine.py``), and not tried again for
:data:`ASIDE_PAUSE_S`. A store that does not answer is no reason of its own: that error goes to the caller. A full disk
that refuses a step for what it adds is one: others may add nothing. It is not shown in the store, for that would add to
it as well.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kombu_fdb.engine.facade.upkeep import Upkeep
from kombu_fdb.engine.stored.batches import Budget
from kombu_fdb.engine.upkeep.quarantine import Aside
from kombu_fdb.errors import CommitUnknown, Conflict, KombuFDBError, StoreFull, StoreUnavailable, TransactionTooOld
from kombu_fdb.primitives.clock import Clock

T = TypeVar("T")

#: How long what failed is left alone, in seconds.
ASIDE_PAUSE_S = 10.0
#: How often what goes on failing is shown again, in seconds.
SHOW_INTERVAL_S = 60.0
#: The store's trouble, not the subject's.
TROUBLE = (CommitUnknown, Conflict, StoreUnavailable, TransactionTooOld)


@dataclass(slots=True)
class _Failing:
    """One subject that is set aside."""

    since_ms: int
    times: int = 0
    until: float = 0.0
    shown_at: float = -SHOW_INTERVAL_S


class Guard:
    """Runs steps, and sets aside those that fail."""

    def __init__(self, upkeep: Upkeep, clock: Clock, report: Callable[[str, str, Exception], None]) -> None:
        self._upkeep = upkeep
        self._clock = clock
        self._report = report
        self._failing: dict[tuple[str, str], _Failing] = {}
        #: By duty, when it was last told that the disk is full.
        self._full_told_at: dict[str, float] = {}

    def attempt(self, duty: str, subject: str, step: Callable[[], T]) -> T | None:
        """The step's result; None if it failed, or is still set aside. Raises ``StoreError`` if the store is away."""
        failing = self._failing.get((duty, subject))
        if failing is not None and self._clock.monotonic() < failing.until:
            return None
        try:
            result = step()
        except TROUBLE as error:
            if not (isinstance(error, StoreFull) and (error.fills or error.moves)):
                raise
            self._leave(duty, subject, error)
            return None
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not keep the others from their turn
            self._set_aside(duty, subject, error)
            return None
        if failing is not None:
            del self._failing[duty, subject]
            self._upkeep.forget_aside(duty, subject)
        return result

    def _set_aside(self, duty: str, subject: str, error: Exception) -> None:
        failing = self._fail(duty, subject)
        now = self._clock.monotonic()
        if failing.times == 1:
            self._report(duty, subject, error)
        if now - failing.shown_at >= SHOW_INTERVAL_S:
            failing.shown_at = now
            text = str(error) if isinstance(error, KombuFDBError) else repr(error)
            self._upkeep.set_aside(Aside(duty, subject, text, failing.times, failing.since_ms))

    def _leave(self, duty: str, subject: str, error: StoreFull) -> None:
        """Told once of all subjects: there may be thousands, one reason, and no room to show it in the store."""
        self._fail(duty, subject)
        if self._clock.monotonic() >= self._full_told_at.get(duty, -math.inf) + SHOW_INTERVAL_S:
            self._full_told_at[duty] = self._clock.monotonic()
            self._report(duty, subject, error)

    def _fail(self, duty: str, subject: str) -> _Failing:
        failing = self._failing.setdefault((duty, subject), _Failing(self._clock.wall_ms()))
        failing.times += 1
        failing.until = self._clock.monotonic() + ASIDE_PAUSE_S
        return failing


class RoundRobin:
    """Gives each subject a step in turn, and begins the next time behind the one that was last."""

    def __init__(self, guard: Guard, duty: str) -> None:
        self._guard = guard
        self._duty = duty
        self._last = ""

    def run(self, subjects: Collection[str], step: Callable[[str], object], budget: Budget) -> None:
        """``step`` returns something true if its subject wants another turn."""
        ordered = sorted(subjects)
        first = bisect_right(ordered, self._last)
        waiting = deque(ordered[first:] + ordered[:first])
        while waiting and budget.spend():
            subject = self._last = waiting.popleft()
            if self._guard.attempt(self._duty, subject, partial(step, subject)):
                waiting.append(subject)
