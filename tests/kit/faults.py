"""A store in memory in which things go wrong, each fault by name; by chance from a seed, or where a test wants it.

A commit whose caller gave up waiting (``Fault.COMMIT_LATE``) happens up to :data:`LATEST_LANDING_S` later, against the
read version it was sent with, or never: other transactions begin and commit in between. Some land where it hurts most:
behind the reads of the next transaction, and before its commit.

With a ``ManualClock`` and a seeded ``rng`` a run can be repeated exactly.
"""

from __future__ import annotations

import math
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from enum import Enum

from kombu_fdb.errors import CommitUnknown, Conflict, StoreError, StoreUnavailable, TransactionTooOld
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.store.protocol import Watch
from kombu_fdb.testing.memory import Change, MemoryDatabase, MemoryTransaction, Range

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


# -- the store ---------------------------------------------------------------------------------------------------------


class FaultyTransaction(MemoryTransaction):
    """A transaction that suffers the database's faults."""

    _db: FaultyDatabase

    def __init__(self, database: FaultyDatabase, timeout_s: float, read_only: bool) -> None:
        super().__init__(database, timeout_s, read_only)
        #: Whose it is; a simulation's note.
        self.author: object = None
        #: Of a commit that was not answered: when it lands, or between the look and the commit of another, if that
        #: comes first.
        self.lands_s = math.inf
        self.lands_after_a_look = False
        #: Fired although the committer never got its answer.
        self.lost_watches: list[Watch] = []

    def _before_read(self) -> None:
        self._check_alive()
        match self._db.faults.next_at_read():
            case Fault.TOO_OLD:
                raise TransactionTooOld
            case Fault.UNAVAILABLE:
                raise StoreUnavailable("a fault was injected")
            case Fault.INTERRUPTED:
                raise Interrupted
            case _:
                self._ensure_read_version()

    def commit(self) -> None:
        if not self.read_only and self._db.before_commit is not None:
            self._db.before_commit()
        super().commit()
        if not self.read_only and self._db.after_answer is not None:
            self._db.after_answer()

    def _commit_writes(self) -> list[Watch]:
        try:
            return super()._commit_writes()
        except (CommitUnknown, Interrupted):
            for watch in self.lost_watches:
                watch.fire()
            raise

    def _check_age(self) -> None:
        super()._check_age()
        if self.read_version is not None and self.read_version < self._db.recovered:
            raise TransactionTooOld


class FaultyDatabase(MemoryDatabase):
    """The store in memory, with faults and with hooks for a simulation."""

    commit_may_be_unknown = True

    def __init__(
        self, *, clock: Clock | None = None, rng: random.Random | None = None, faults: Faults | None = None
    ) -> None:
        super().__init__(clock=clock)
        self.faults = faults or Faults()
        #: Called before each writing commit, so that a simulation can let others run exactly there.
        self.before_commit: Callable[[], None] | None = None
        #: Told of each commit when it happens, late ones too: the transaction, and what it changed.
        self.after_commit: Callable[[FaultyTransaction, list[Change]], None] | None = None
        #: Called after each writing commit that is answered, before its caller hears of it.
        self.after_answer: Callable[[], None] | None = None
        self._rng = rng or random.Random(0)
        #: Those whose commits were sent, and not answered.
        self._late: list[FaultyTransaction] = []
        self.recovered = 0

    def begin(self, *, timeout_s: float, read_only: bool = False) -> FaultyTransaction:
        if self.closed:
            raise StoreUnavailable("the database was closed")
        return FaultyTransaction(self, timeout_s, read_only)

    def land_late_commits(self, *, before_s: float = math.inf) -> None:
        """Let the late commits happen that land before that moment of the clock; by default all that ever will."""
        with self.lock:
            self._land([late for late in self._late if late.lands_s <= before_s])

    def _land(self, due: list[FaultyTransaction]) -> None:
        for late in sorted(due, key=lambda late: late.lands_s):
            try:
                fired = super().commit(late)
            except StoreError:  # too late
                fired = []
            for watch in fired:
                watch.fire()
            self._late.remove(late)  # not before: as long as it waits, the log is kept for it

    def recover(self, versions: int = 100_000_000) -> None:
        """The cluster gets a new transaction system.

        Versions jump by ``versions``, transactions that have read are too old, and every watch fires, as
        FoundationDB's may.
        """
        with self.lock:
            self.land_late_commits()
            self.version += versions
            self.recovered = self.version
            fired = [watch for _, watches in sorted(self._watches.items()) for watch in watches]
            self._watches.clear()
        for watch in fired:
            watch.fire()

    @property
    def open_transactions(self) -> int:
        """How many have read and were neither committed nor cancelled; for tests that look for leaks."""
        with self.lock:
            return len(self._readers)

    # What transactions call, under the lock.

    def take_read_version(self, transaction: MemoryTransaction) -> int:
        self._land_due()
        return super().take_read_version(transaction)

    def _land_due(self) -> None:
        if self._late:
            self.land_late_commits(before_s=self.clock.monotonic())

    def commit(self, transaction: MemoryTransaction) -> list[Watch]:
        assert isinstance(transaction, FaultyTransaction)
        self._land_due()
        if transaction.read_version is not None:
            self._land([late for late in self._late if late.lands_after_a_look])
        fault = self.faults.next_at_commit(can_conflict=transaction.can_conflict)
        match fault:
            case None:
                return super().commit(transaction)
            case Fault.CONFLICT:
                raise Conflict
            case Fault.TOO_OLD:
                raise TransactionTooOld
            case Fault.UNAVAILABLE:
                raise StoreUnavailable("a fault was injected")
            case Fault.ANSWER_LOST_APPLIED:
                transaction.lost_watches = super().commit(transaction)
                raise CommitUnknown
            case Fault.INTERRUPTED:
                transaction.lost_watches = super().commit(transaction)
                raise Interrupted
            case Fault.COMMIT_LATE:
                self._send_late(transaction)
                raise CommitUnknown(in_flight=True)
            case _:
                raise CommitUnknown

    def _send_late(self, transaction: FaultyTransaction) -> None:
        """Its read version is of now, if it has none yet: it was sent."""
        landing = self.faults.landing()
        if landing is None:
            return
        if transaction.can_conflict and transaction.read_version is None:
            transaction.read_version = self.version
        lateness_s, transaction.lands_after_a_look = landing
        transaction.lands_s = self.clock.monotonic() + lateness_s
        if not transaction.is_too_old(transaction.lands_s):
            self._late.append(transaction)

    def _check_conflicts(self, transaction: MemoryTransaction) -> None:
        version = transaction.read_version
        if version is not None and transaction.can_conflict and version < self.recovered:
            raise TransactionTooOld
        super()._check_conflicts(transaction)

    def _replay(self, transaction: MemoryTransaction) -> tuple[list[Change], list[Range]]:
        changes, ranges = super()._replay(transaction)
        if self.after_commit is not None:
            assert isinstance(transaction, FaultyTransaction)
            self.after_commit(transaction, changes)
        return changes, ranges

    def _oldest_read(self) -> int:
        """The oldest version that is still read, or can conflict with a commit that is still to land."""
        late = [each.read_version for each in self._late if each.read_version is not None]
        return min([super()._oldest_read(), *late])

    def _due_watches(self, keys: list[bytes]) -> list[Watch]:
        due = [watch for watch in super()._due_watches(keys) if not self.faults.loses_watch()]
        if self._watches and self.faults.fires_for_nothing():
            due += self._watches.pop(self._rng.choice(sorted(self._watches)))
        return due
