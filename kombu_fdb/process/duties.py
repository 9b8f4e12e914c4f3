"""The duties: what consumer processes do for the whole store, each within a budget, subject by subject.

A duty's ``run`` does what its budget allows, and returns in how many seconds, at the latest, to call it again: 0 if the
budget is spent. The duty remembers where it stopped, and continues there.

A *subject* is what a step is about: a queue, a session, or "" for a duty that has no parts. Subjects take turns, so a
slow or hopeless one does not delay the others. A step that fails for a reason of its own is *set aside*
(:class:`Guard`): reported, shown in the store (``quarantine.py``), and not tried again for :data:`ASIDE_PAUSE_S`. A
store that does not answer is no such reason: the caller gets that error. A full disk that refuses a step because of
what it adds is one, as other steps may add nothing. That failure is not shown in the store, as such a row would take
room, too.

A row of the table (:func:`table`) is a duty: its name, how its subjects are found, their step, the pause, and whether
every process has it or only the one that holds the role (``duty_cycle.py``, which adds the sweep). Duties that remember
more have functions of their own.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard, TypeVar

from kombu_fdb.engine import parts
from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.facade.upkeep import ROWS_PER_TRANSACTION, Upkeep
from kombu_fdb.engine.metrics.samples import SERIES, Series
from kombu_fdb.engine.scheduling import single
from kombu_fdb.engine.upkeep.quarantine import Aside
from kombu_fdb.errors import CommitUnknown, Conflict, KombuFDBError, StoreFull, StoreUnavailable, TransactionTooOld
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.process.failure_detector import FailureDetector
from kombu_fdb.store.protocol import KeyValue

T = TypeVar("T")

# -- the guard ---------------------------------------------------------------------------------------------------------


#: How long a failed subject is left alone, in seconds.
ASIDE_PAUSE_S = 10.0
#: How often a subject that keeps failing is shown again, in seconds.
SHOW_INTERVAL_S = 60.0
#: Failures of the store, not of the subject.
STORE_FAILURES = (CommitUnknown, Conflict, StoreUnavailable, TransactionTooOld)


def is_of_one(error: Exception) -> TypeGuard[StoreFull]:
    """Whether a full disk has refused this step because of what it adds; other steps may add nothing."""
    return isinstance(error, StoreFull) and bool(error.fills or error.moves)


@dataclass(slots=True)
class _Failing:
    """One subject that is set aside."""

    since_ms: int
    times: int = 0
    until: float = 0.0
    #: When it was last shown in the store.
    shown_at: float = -math.inf


class Guard:
    """Runs steps, and sets aside those that fail."""

    def __init__(self, upkeep: Upkeep, clock: Clock, report: Callable[[str, str, Exception | None], None]) -> None:
        """``report``: called with the duty, its subject, and the error, or None once it succeeds again."""
        self._upkeep = upkeep
        self._clock = clock
        self._report = report
        #: The failing subjects, in the order of their last failures.
        self._failing: dict[tuple[str, str], _Failing] = {}
        #: By duty, when a full disk was last reported.
        self._full_logged_at: dict[str, float] = {}

    def is_aside(self, duty: str, subject: str) -> bool:
        """Whether the subject has failed recently, and is left alone."""
        failing = self._failing.get((duty, subject))
        return failing is not None and self._clock.monotonic() < failing.until

    def attempt(self, duty: str, subject: str, step: Callable[[], T]) -> T | None:
        """The step's result; None if it fails, or its subject is set aside. Raises a failing store's ``StoreError``."""
        if self.is_aside(duty, subject):
            return None
        try:
            result = step()
        except STORE_FAILURES as error:
            if not is_of_one(error):
                raise
            self._leave(duty, subject, error)
            return None
        except Exception as error:  # noqa: BLE001 - no error may cost the other subjects their turns
            self._set_aside(duty, subject, error)
            return None
        failing = self._failing.get((duty, subject))
        if failing is not None:
            self._upkeep.forget_aside(duty, subject)
            del self._failing[duty, subject]  # only now: if the store did not answer, the next success does this
            if failing.shown_at >= 0:
                self._report(duty, subject, None)
        return result

    def _set_aside(self, duty: str, subject: str, error: Exception) -> None:
        failing = self._fail(duty, subject)
        now = self._clock.monotonic()
        if failing.shown_at < 0:
            self._report(duty, subject, error)
        if now - failing.shown_at >= SHOW_INTERVAL_S:
            failing.shown_at = now
            text = str(error) if isinstance(error, KombuFDBError) else repr(error)
            self._upkeep.set_aside(Aside(duty, subject, text, failing.times, failing.since_ms))

    def _leave(self, duty: str, subject: str, error: StoreFull) -> None:
        """Report it once for all subjects: there may be thousands, with one reason, and the store has no room."""
        self._fail(duty, subject)
        if self._clock.monotonic() >= self._full_logged_at.get(duty, -math.inf) + SHOW_INTERVAL_S:
            self._full_logged_at[duty] = self._clock.monotonic()
            self._report(duty, subject, error)

    def _fail(self, duty: str, subject: str) -> _Failing:
        now = self._clock.monotonic()
        while self._failing and now - next(iter(self._failing.values())).until >= LEFT_TTL_S:
            del self._failing[next(iter(self._failing))]  # its subject is gone, and so is its row in the store
        failing = self._failing.pop((duty, subject), None) or _Failing(self._clock.wall_ms())
        failing.times += 1
        failing.until = now + ASIDE_PAUSE_S
        self._failing[duty, subject] = failing  # behind those that failed earlier
        return failing


# -- a duty ------------------------------------------------------------------------------------------------------------


#: The longest time between two looks for due work, in seconds.
LOOK_S = 1.0
#: Rows without an owner are cleared after this time, in seconds; whatever needs them ends far sooner.
LEFT_TTL_S = 900.0
LEFT_INTERVAL_S = 200.0
#: The pauses between looks at queues over their maximum, at dead letters, dedup ids, and all ready messages.
FULL_INTERVAL_S = 10.0
TIDY_INTERVAL_S = 60.0
EXPIRED_INTERVAL_S = 60.0
#: The pause between looks at what older processes keep for this one.
NEWER_INTERVAL_S = 5.0

#: The share of time that sampling may take if there are very many queues.
SAMPLING = 1 / 50

K = TypeVar("K", bound=Hashable)


class Duty:
    """One duty: the same step for each subject found, repeated as long as the step says that there is more."""

    def __init__(
        self,
        name: str,
        find: Callable[[], Collection[str]],
        step: Callable[[str], object],
        pause: Callable[[bool], float],
        *,
        waits_for_messages: bool = False,
        everywhere: bool = False,
    ) -> None:
        """``step`` returns something true if its subject wants another turn.

        ``pause``: returns in how many seconds to call again after the subjects' turns; its argument is whether the
        budget is spent. ``waits_for_messages``: a pause shorter than :data:`LOOK_S` ends when a message is due.
        ``everywhere``: as the attribute.
        """
        #: The name that people see.
        self.name = name
        #: Whether every process has it, and not only the one that holds the role.
        self.everywhere = everywhere
        #: When it is due, by the monotonic clock.
        self.due_at = 0.0
        #: Whether it is due at a message's known time, and must not be late.
        self.is_exact = False
        self._find = find
        self._step = step
        self._pause = pause
        self._waits_for_messages = waits_for_messages
        #: The subject of the last step.
        self._last_subject = ""

    def is_due(self, now: float) -> bool:
        return now >= self.due_at

    def run(self, guard: Guard, budget: parts.Budget) -> float:
        """Do a part of the duty. Returns in how many seconds to call again."""
        self._take_turns(guard, budget)
        pause_s = self._pause(budget.is_spent)
        self.is_exact = self._waits_for_messages and pause_s < LOOK_S
        return pause_s

    def _take_turns(self, guard: Guard, budget: parts.Budget) -> None:
        """Give each subject a step in turn, starting after the last subject of the previous call."""
        ordered = sorted(each for each in self._find() if not guard.is_aside(self.name, each))
        first = bisect_right(ordered, self._last_subject)
        waiting = deque(ordered[first:] + ordered[:first])
        while waiting and budget.spend():
            subject = self._last_subject = waiting.popleft()
            if guard.attempt(self.name, subject, partial(self._step, subject)):
                waiting.append(subject)


# -- two kinds of duties -----------------------------------------------------------------------------------------------


def routine(
    name: str,
    find: Callable[[], Collection[str]],
    step: Callable[[str], object],
    pause_s: float,
    *,
    at_once: bool = True,
    everywhere: bool = False,
) -> Duty:
    """A duty with one pause. ``at_once``: whether it continues in the next round if its budget was spent."""

    def pause(is_spent: bool) -> float:
        return 0.0 if is_spent and at_once else pause_s

    return Duty(name, find, step, pause, everywhere=everywhere)


def walk(
    name: str,
    find: Callable[[], Collection[str]],
    part: Callable[[str, bytes], bytes],
    pause_s: float,
    *,
    between_s: float = 0.0,
) -> Duty:
    """Walk through all subjects to their ends, part by part; then find the subjects again.

    ``part``: one transaction of a subject from a cursor on; it returns the next cursor. b"" begins and ends a walk.
    ``between_s``: the pause while there is more to walk through.
    """
    #: The cursor of each subject that is not done.
    cursors: dict[str, bytes] = {}

    def unfinished() -> Collection[str]:
        if not cursors:
            cursors.update(dict.fromkeys(find(), b""))
        return cursors

    def step(subject: str) -> bool:
        cursor = part(subject, cursors.pop(subject))  # a subject that fails is done until the next walk
        if cursor:
            cursors[subject] = cursor
        return bool(cursor)

    def pause(is_spent: bool) -> float:
        if not is_spent:
            cursors.clear()  # the remaining ones are set aside
        return between_s if cursors else pause_s

    return Duty(name, unfinished, step, pause)


def _whole() -> list[str]:
    """The one subject of a duty that has no parts."""
    return [""]


# -- duties that remember more -----------------------------------------------------------------------------------------


def promotion(engine: Engine, clock: Clock, guard: Guard) -> Duty:
    """Make due messages ready, and wake consumers for keys whose rate allows a message again. Guarantee: NOT-EARLY."""
    upkeep, name = engine.upkeep, "promote"
    #: The times at which queues and keys are due again.
    moments: list[int | None] = []

    def find() -> list[str]:
        looked = guard.attempt(name, "", upkeep.due_queues)
        due, next_ms, parked = looked or ([], None, True)  # if this look failed, keys may still be parked
        moments[:] = [next_ms]
        if parked:
            moments.append(guard.attempt("unpark", "", upkeep.unpark))
        return due

    def step(queue: str) -> bool:
        moved, due_ms = upkeep.promote_part(queue)
        if moved and due_ms is not None and due_ms <= clock.wall_ms():
            return True
        moments.append(due_ms)
        return False

    def pause(is_spent: bool) -> float:
        return 0.0 if is_spent else _until(moments, clock)

    return Duty(name, find, step, pause, waits_for_messages=True)


def _until(moments: Iterable[int | None], clock: Clock) -> float:
    """In how many seconds the first message is due; :data:`LOOK_S` if that is sooner, or none is known."""
    now_ms = clock.wall_ms()
    return max(0.0, min([LOOK_S, *((each - now_ms) / 1000 for each in moments if each is not None)]))


def unused_queues(engine: Engine, clock: Clock, interval_s: float) -> Duty:
    """Delete queues that have been unused for longer than their ``x-expires``."""
    detector: FailureDetector[str] = FailureDetector()
    silent: dict[str, bytes] = {}

    def find() -> Collection[str]:
        found = engine.queues.expiring()
        detector.look([(queue, last_use, max(ms, 1) / 1000) for queue, last_use, ms in found], clock.monotonic())
        silent.clear()
        silent.update(detector.silent())
        return silent

    def expire(queue: str) -> None:
        engine.queues.expire(queue, silent[queue])

    return routine("expire queues", find, expire, interval_s)


def expired_heads(engine: Engine, clock: Clock) -> Duty:
    """Drop a message at the head of its queue as soon as its time to live is over."""
    upkeep = engine.upkeep
    #: The queues with a time to live, and when to look for them again.
    queues: Sequence[str] = ()
    look_at = 0.0
    due: dict[str, list[bytes]] = {}
    moments: list[int | None] = []

    def find() -> Collection[str]:
        nonlocal queues, look_at, due
        if clock.monotonic() >= look_at:
            queues, look_at = upkeep.ttl_queues(), clock.monotonic() + FULL_INTERVAL_S
        due, next_ms = upkeep.expired_heads(queues) if queues else ({}, None)
        moments[:] = [next_ms]
        return due

    def step(queue: str) -> bool:
        dropped, _following = upkeep.drop_expired_part(queue, due[queue][0])
        if dropped:
            moments.append(0)  # the messages after the expired ones may expire soon
        else:
            del due[queue][0]
        return bool(due[queue])

    def pause(_: bool) -> float:
        return _until(moments, clock) if queues else FULL_INTERVAL_S

    return Duty("drop expired heads", find, step, pause, waits_for_messages=True)


def unchanged(detector: FailureDetector[K], rows: Iterable[tuple[K, bytes]], clock: Clock) -> list[tuple[K, bytes]]:
    """The rows that the detector has seen unchanged for :data:`LEFT_TTL_S`."""
    detector.look([(key, value, LEFT_TTL_S) for key, value in rows], clock.monotonic())
    return detector.silent()


def leftovers(engine: Engine, clock: Clock) -> Duty:
    """Clear rows left by dead processes: commit tokens, copies that no burial took, asides, services."""
    upkeep, keys = engine.upkeep, engine.keys
    detector: FailureDetector[bytes] = FailureDetector()
    #: The rows left to clear if the budget ran out.
    left: dict[str, list[KeyValue]] = {}

    def find() -> Collection[str]:
        if left:
            return left
        rows = [row for whole in (keys.all_tokens, keys.all_copies, keys.all_asides) for row in upkeep.rows(whole)]
        alive = {session_id for session_id, _, _ in engine.sessions.beats()}
        rows += [row for row in upkeep.rows(keys.all_served) if row[1][: single.SESSION_BYTES] not in alive]
        silent = unchanged(detector, rows, clock)
        first, end = keys.all_copies
        others = [row for row in silent if not first <= row[0] < end]
        for at in range(0, len(others), ROWS_PER_TRANSACTION):
            left[f"rows {at // ROWS_PER_TRANSACTION}"] = others[at : at + ROWS_PER_TRANSACTION]
        left.update((row[0].hex(), [row]) for row in silent if first <= row[0] < end)
        return left

    def clear(name: str) -> None:
        rows = left.pop(name)
        if name.startswith("rows"):
            upkeep.clear_rows(rows)
        else:
            upkeep.clear_copy(rows[0])

    return routine("clear leftovers", find, clear, LEFT_INTERVAL_S)


def orphans(engine: Engine, clock: Clock) -> Duty:
    """Clear rows of deleted queues and exchanges."""
    detector: FailureDetector[tuple[str, str]] = FailureDetector()
    silent: dict[str, tuple[str, str, bytes]] = {}

    def find() -> Collection[str]:
        found = unchanged(detector, engine.upkeep.orphans().items(), clock)
        silent.clear()
        silent.update({f"{kind} {name}": (kind, name, value) for (kind, name), value in found})
        return silent

    def clear(subject: str) -> None:
        engine.upkeep.clear_orphan(*silent[subject])

    return routine("clear orphans", find, clear, LEFT_INTERVAL_S, at_once=False)


def totals(engine: Engine) -> Duty:
    """Forget the totals of deleted queues, and of all but the busiest keys."""
    steps: Iterator[None] = iter(())

    def part(_: str, cursor: bytes) -> bytes:
        nonlocal steps
        steps = steps if cursor else engine.upkeep.trim_totals()
        return b"more" if next(steps, "over") is None else b""

    return walk("trim totals", _whole, part, LEFT_INTERVAL_S)


def samples(engine: Engine, clock: Clock) -> Duty:
    """Sample what the queues hold and do, for charts."""
    began_s = 0.0
    #: The last sampled step of each series.
    last: dict[Series, int] = {}

    def begin() -> list[str]:
        nonlocal began_s
        began_s = clock.monotonic()
        return _whole()

    def sample(_: str) -> None:
        steps = {series: series.moment(clock.wall_ms()) for series in SERIES.values()}
        due = [series for series, step in steps.items() if last.get(series) != step]
        if due:
            engine.upkeep.sample(due)
        last.update(steps)

    def pause(_: bool) -> float:
        spent_s, step_s = clock.monotonic() - began_s, SERIES["hour"].step_s
        return max(step_s - clock.wall_ms() / 1000 % step_s, spent_s / SAMPLING)

    return Duty("sample", begin, sample, pause)


# -- the table ---------------------------------------------------------------------------------------------------------


def table(
    engine: Engine, clock: Clock, guard: Guard, interval_s: float, may_be_newer: Callable[[], bool]
) -> list[Duty]:
    """All duties but the sweep, in the order of their turns. A new one is a row here, and nothing else.

    ``interval_s``: between two looks at deleted and unused queues. ``may_be_newer``: whether older processes may keep
    messages for this version.
    """
    upkeep, queues = engine.upkeep, engine.queues

    def ready_queues() -> list[str]:
        return [queue for queue, counts in engine.inspect.queues().items() if counts.ready]

    return [
        promotion(engine, clock, guard),
        # Regain what older processes keep. Not at once: an older consumer may keep it again as fast as it returns.
        routine(
            "bring back newer messages",
            lambda: _whole() if may_be_newer() else [],
            lambda _: upkeep.regain_part(),
            NEWER_INTERVAL_S,
            at_once=False,
            everywhere=True,
        ),
        unused_queues(engine, clock, interval_s),
        expired_heads(engine, clock),
        # Purge the rest of deleted queues.
        walk("finish deletions", queues.being_deleted, queues.finish_deletion_part, interval_s),
        # Finish a change of limits whose process has died.
        routine("follow limits", upkeep.relimited_queues, queues.follow_limits_part, LOOK_S),
        # Shed the oldest. Not at once: a trimmed message may return as a dead letter, endlessly.
        routine("trim full queues", upkeep.limited_queues, upkeep.trim_full_part, FULL_INTERVAL_S, at_once=False),
        # Drop letters that the queues ``<queue>.dead`` no longer keep.
        walk(
            "trim dead letters",
            engine.dead_letters.queues,
            lambda queue, _: b"more" if engine.dead_letters.trim_part(queue) else b"",
            TIDY_INTERVAL_S,
        ),
        # Drop expired messages that no consumer claims: a slow walk through all ready ones.
        walk(
            "drop expired messages",
            ready_queues,
            lambda queue, cursor: upkeep.drop_expired_part(queue, cursor)[1],
            EXPIRED_INTERVAL_S,
            between_s=LOOK_S,
        ),
        # Clear dedup ids whose window is over.
        routine("clear dedup ids", _whole, lambda _: upkeep.clear_dedup_part(), TIDY_INTERVAL_S),
        # Clear rows that are no longer needed.
        walk("clear full buckets", _whole, lambda _, cursor: upkeep.clear_buckets_part(cursor), LEFT_INTERVAL_S),
        walk("clear marks of imports", _whole, lambda _, at: engine.transfer.forget_marks_part(at), LEFT_INTERVAL_S),
        leftovers(engine, clock),
        orphans(engine, clock),
        totals(engine),
        samples(engine, clock),
    ]
