"""What can go wrong in a store, each fault by name; by chance from a seed, or exactly where a test wants it."""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Mapping
from enum import Enum

__all__ = ["LATEST_LANDING_S", "Fault", "Faults", "Interrupted"]

#: How much later a commit whose outcome is unknown may land, in seconds. FoundationDB refuses one whose read version is
#: older than that.
LATEST_LANDING_S = 5.0


class Fault(Enum):
    """One way a store fails. The comment says where it strikes."""

    CONFLICT = "conflict"  # commit
    ANSWER_LOST_APPLIED = "commit applied, answer lost"  # commit
    ANSWER_LOST_NOT_APPLIED = "commit not applied, answer lost"  # commit
    INTERRUPTED = "an exception out of a signal handler"  # commit: it is applied; read
    COMMIT_LATE = "deadline passed in the commit, which may land later"  # commit
    TOO_OLD = "transaction too old"  # commit, read
    UNAVAILABLE = "store unavailable"  # commit, read
    WATCH_LOST = "watch lost"  # a watch that should fire
    WATCH_FOR_NOTHING = "watch fired for nothing"  # after a commit


_AT_COMMIT = (
    Fault.CONFLICT,
    Fault.ANSWER_LOST_APPLIED,
    Fault.ANSWER_LOST_NOT_APPLIED,
    Fault.COMMIT_LATE,
    Fault.TOO_OLD,
    Fault.UNAVAILABLE,
)
_AT_READ = (Fault.TOO_OLD, Fault.UNAVAILABLE)


class Interrupted(BaseException):
    """What a signal handler, gevent's timeout or a soft time limit raises wherever the program is just then."""


class Faults:
    """Decides what goes wrong next.

    ``rates`` gives each fault's probability at each point where it can strike. A script goes first: ``at_commits(a,
    None, b)`` lets the next commit suffer ``a``, the one after pass, the third suffer ``b``. A script of commits or
    reads is for the thread that writes it: a session's own threads commit at any time, and would use it up.
    """

    def __init__(self, rng: random.Random | None = None, rates: Mapping[Fault, float] | None = None) -> None:
        self._rng = rng or random.Random(0)
        self.rates = dict(rates or {})
        self._commits: deque[Fault | None] = deque()
        self._reads: deque[Fault | None] = deque()
        self._watches: deque[Fault | None] = deque()
        self._landings: deque[float | None] = deque()
        self._scripted_thread = 0
        #: How often each fault struck.
        self.struck: Counter[Fault] = Counter()

    def at_commits(self, *faults: Fault | None) -> None:
        """Script the next commits of writing transactions."""
        self._scripted_thread = threading.get_ident()
        self._commits.extend(faults)

    def at_reads(self, *faults: Fault | None) -> None:
        """Script the next reads."""
        self._scripted_thread = threading.get_ident()
        self._reads.extend(faults)

    def at_watches(self, *faults: Fault | None) -> None:
        """Script the next firings of watches: ``WATCH_LOST`` or ``None``."""
        self._watches.extend(faults)

    def at_landings(self, *seconds: float | None) -> None:
        """Script how late the next late commits land; None: never."""
        self._landings.extend(seconds)

    def stop(self) -> None:
        """Nothing goes wrong from now on; for the end of a simulation, where everything must come to rest."""
        self.rates.clear()
        for script in (self._commits, self._reads, self._watches, self._landings):
            script.clear()

    def next_at_commit(self, *, can_conflict: bool) -> Fault | None:
        """``can_conflict``: a transaction that read nothing never conflicts, and callers may rely on that."""
        if self._commits and threading.get_ident() == self._scripted_thread:
            return self._count(self._commits.popleft())
        kinds = _AT_COMMIT if can_conflict else _AT_COMMIT[1:]
        return self._by_chance(kinds)

    def next_at_read(self) -> Fault | None:
        if self._reads and threading.get_ident() == self._scripted_thread:
            return self._count(self._reads.popleft())
        return self._by_chance(_AT_READ)

    def loses_watch(self) -> bool:
        if self._watches:
            return self._count(self._watches.popleft()) is Fault.WATCH_LOST
        return self._by_chance((Fault.WATCH_LOST,)) is not None

    def fires_for_nothing(self) -> bool:
        return self._by_chance((Fault.WATCH_FOR_NOTHING,)) is not None

    def landing(self) -> tuple[float, bool] | None:
        """How many seconds after its caller's error a late commit happens; None: it does not.

        And whether it happens between the reads and the commit of another transaction, if that is sooner.
        """
        if self._landings:
            lateness_s = self._landings.popleft()
            return None if lateness_s is None else (lateness_s, False)
        if self._rng.random() < 0.5:
            return None
        return self._rng.uniform(0.0, LATEST_LANDING_S), self._rng.random() < 0.25

    def _by_chance(self, kinds: tuple[Fault, ...]) -> Fault | None:
        for kind in kinds:
            rate = self.rates.get(kind, 0.0)
            if rate and self._rng.random() < rate:
                return self._count(kind)
        return None

    def _count(self, fault: Fault | None) -> Fault | None:
        if fault is not None:
            self.struck[fault] += 1
        return fault
