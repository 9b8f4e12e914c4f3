"""The only way to the stored history: each method runs one operation in transactions.

A retry may run an operation twice. A group has a key of its own, and a process that writes it again, because the answer
of a commit was lost, first looks whether the group is stored already. So its runs are counted once.

Model of the segments. A segment is *open* while it is the newest, then *closed*, until *trim* clears it. A flush writes
into the newest one, or opens the next if that is full or has been open for long enough (``options.py``). Two workers
may open the same one at the same time: both write the same key, and one moment stands. Trim clears closed segments, the
oldest first: while there are more runs than the bound leaves room for, and those that were opened longer ago than the
bound says, which includes an open one that no worker writes to any more. So there are never more runs than the bound,
but for what several workers flush at the same moment, and none is older.

A flush conflicts with a trim of the segment that it writes to, and then writes into another one.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import wraps
from itertools import accumulate, islice
from typing import Any, Concatenate, ParamSpec, TypeVar

from celery_fdb.history import layout, reading
from celery_fdb.history.layout import Counters, HistoryKeys, RunGroup
from celery_fdb.history.options import History
from celery_fdb.history.run import LOST, Run
from kombu_fdb.keyspace.layout import pack_int, pack_text
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.store.protocol import Database, Transaction
from kombu_fdb.store.retry import Patience, Retry

# -- writing -----------------------------------------------------------------------------------------------------------


#: Tasks of one group with counters of their own. Names usually come from code, but a message may hold any name.
MOST_TASKS, OTHER_TASKS = 100, "(other)"
#: Indexes by group; those by run are "id" and "root".
INDEXES = ("task", "state")
#: Active runs of a dead worker that one transaction ends.
LOST_RUNS = 100


def write(tr: Transaction, keys: HistoryKeys, group: RunGroup, *, bounds: History, now_ms: int) -> bool:
    """Store a group, its index entries, and what it adds to the counters. Returns whether a segment was opened."""
    tr.fill()
    number, opened = _open_segment(tr, keys, bounds, now_ms)
    tr.set(keys.group(number, group.id), group.value)
    for kind in INDEXES:
        for name in {getattr(run, kind) for run in group.runs}:
            tr.set(keys.index(number, kind, name) + group.id, b"")
    _index_runs(tr, keys, number, group)
    tr.add(keys.segment_runs(number), len(group.runs))
    _count(tr, keys, group.runs, group.runs[-1].end_ms // 1000)
    return opened


def _open_segment(tr: Transaction, keys: HistoryKeys, bounds: History, now_ms: int) -> tuple[int, bool]:
    """The segment that a flush writes to, and whether it was opened for that."""
    found = reading.segments(tr, keys, limit=1)
    last = max(found, default=0)
    if found:
        opened_ms, runs = found[last]
        if runs < bounds.segment_runs and now_ms - opened_ms < bounds.segment_ms:
            tr.add_read_conflict_key(keys.segment(last))
            return last, False
    tr.set(keys.segment(last + 1), now_ms.to_bytes(8, "little"))
    return last + 1, True


def _index_runs(tr: Transaction, keys: HistoryKeys, number: int, group: RunGroup) -> None:
    by_id, by_root = keys.index_by(number, "id"), keys.index_by(number, "root")
    for at, run in enumerate(group.runs):
        place = group.id + pack_int(at)
        tr.set(by_id + pack_text(run.id) + place, b"")
        named = {run.root, run.group} - {""}
        for id_ in named or ({run.id} if run.followers else ()):
            tr.set(by_root + pack_text(id_) + place, b"")


def _count(tr: Transaction, keys: HistoryKeys, runs: Sequence[Run], end_s: int) -> None:
    by_task: Mapping[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_task[run.task if run.task in by_task or len(by_task) < MOST_TASKS else OTHER_TASKS].append(run)
    for task, its_runs in by_task.items():
        delta = layout.delta_of(its_runs)
        _add(tr, keys.total(task), delta, layout.TOTAL_WIDTH)
        for length_s in layout.SLOTS:
            _add(tr, keys.slot(length_s, end_s - end_s % length_s, task), delta, layout.SLOT_WIDTH)
    delta = layout.delta_of(runs)
    for length_s in layout.SLOTS:
        _add(tr, keys.all_tasks(length_s, end_s - end_s % length_s), delta, layout.ALL_WIDTH)


def _add(tr: Transaction, key: bytes, delta: bytes, width: int) -> None:
    tr.add(key, int.from_bytes(delta[:width], "little"), width=width)


# -- trimming ----------------------------------------------------------------------------------------------------------


#: Segments that one transaction deletes.
TRIM_SEGMENTS = 4


def trim(tr: Transaction, keys: HistoryKeys, bounds: History, now_ms: int) -> int:
    """Clear up to :data:`TRIM_SEGMENTS` segments that are beyond the bounds. Returns how many."""
    found = reading.segments(tr, keys)
    too_many = sum(runs for _, runs in found.values()) - (bounds.runs - bounds.segment_runs)
    cleared = 0
    # A segment was opened before the next one, whatever their workers' clocks said.
    opened_ms = [*accumulate((opened for opened, _ in reversed(found.values())), min)][::-1]
    for number, opened in zip(islice(found, TRIM_SEGMENTS), opened_ms, strict=False):
        is_closed = number != max(found)
        if not (is_closed and too_many > 0) and now_ms - opened < bounds.max_age * 1000:
            break
        too_many -= found[number][1]
        tr.clear_range(*keys.inside(number))
        tr.clear(keys.segment(number))
        tr.clear(keys.segment_runs(number))
        cleared += 1
    for length_s, kept_s in layout.SLOTS.items():
        end_s = max(now_ms // 1000 - kept_s, 0)
        tr.clear_range(*keys.slots(length_s, 0, end_s))
        tr.clear_range(*keys.all_tasks_in(length_s, 0, end_s))
    return cleared


# -- the store ---------------------------------------------------------------------------------------------------------


P = ParamSpec("P")
T = TypeVar("T")


def _reading(verb: Callable[Concatenate[Transaction, HistoryKeys, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A method of the store: the verb, in a transaction that only reads."""

    @wraps(verb)
    def method(self: HistoryStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._read(lambda tr: verb(tr, self.keys, *args, **kwargs))

    return method


#: Session, and the number that the worker gave the run.
ActiveKey = tuple[bytes, int]


class HistoryStore:
    """The history of one namespace. Thread-safe.

    ``timeout_s``: deadline of each call. Every method raises ``StoreUnavailable`` when it passes, and ``CommitUnknown``
    if it passed in the commit: call again. ``patience``: the process's own, which shortens the deadline at its end.
    """

    def __init__(
        self,
        database: Database,
        namespace: str,
        *,
        clock: Clock,
        timeout_s: float = 5.0,
        patience: Patience | None = None,
    ) -> None:
        self.keys = HistoryKeys(namespace)
        self._clock = clock
        self._timeout_s = timeout_s
        self.patience = patience or Patience()
        self._retry = Retry(database, clock, random.Random(), self.patience)

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, group: RunGroup, bounds: History) -> bool:
        """Store a group, once. Returns whether a segment was opened for it."""

        def body(tr: Transaction) -> bool:
            if group.tried and self._stands(tr, group):
                return False
            group.tried = True
            return write(tr, self.keys, group, bounds=bounds, now_ms=self._now())

        return self._write(body)

    def _stands(self, tr: Transaction, group: RunGroup) -> bool:
        """Whether an earlier try wrote the group. Reads serializably, in case that try is still on its way."""
        numbers = reading.segments(tr, self.keys, limit=2)
        found = tr.get_many([self.keys.group(number, group.id) for number in numbers])
        return any(each is not None for each in found)

    def activity(
        self, session: bytes, begun: Mapping[int, Run], ended: Sequence[ActiveKey] = (), *, dropped: int = 0
    ) -> None:
        """Write which runs became active, which of them ended, and how many could not be kept."""

        def body(tr: Transaction) -> None:
            for number, run in begun.items():
                tr.set(self.keys.active(session, number), layout.pack_groups([run])[0].value)
            for key in ended:
                tr.clear(self.keys.active(*key))
            if dropped:
                tr.add(self.keys.dropped, dropped)

        self._write(body)

    def lose(self, session: bytes, bounds: History) -> int:
        """End the active runs of an ended session. Returns how many."""

        def body(tr: Transaction) -> int:
            now_ms, rows = self._now(), tr.get_range(*self.keys.active_of(session), limit=LOST_RUNS)
            for key, _ in rows:
                tr.clear(key)
            active = [run for _, value in rows for run in reading.runs_in(value)]
            lost = [run._replace(state=LOST, end_ms=now_ms) for run in active]
            for group in layout.pack_groups(lost):
                write(tr, self.keys, group, bounds=bounds, now_ms=now_ms)
            return len(lost)

        total = 0
        while (lost := self._write(body)) > 0:
            total += lost
        return total

    def trim(self, bounds: History, *, parts: int, now_ms: int) -> int:
        """Delete what is beyond the bounds, in at most so many transactions. Returns how many segments."""
        total = 0
        for _ in range(parts):
            cleared = self._write(lambda tr: trim(tr, self.keys, bounds, now_ms))
            total += cleared
            if cleared < TRIM_SEGMENTS:
                break
        return total

    def set_settings(self, bounds: History) -> None:
        """Note that there is a history, and its bounds."""
        settings = json.dumps({**asdict(bounds), "since_ms": self._now()}).encode()
        self._write(lambda tr: tr.set(self.keys.settings, settings))

    # -- reading -----------------------------------------------------------------------------------------------------

    settings = _reading(reading.settings)
    dropped = _reading(reading.dropped)
    kept = _reading(reading.kept)
    page = _reading(reading.page)
    segments = _reading(reading.newest_first)
    workflows_in = _reading(reading.workflows_in)
    active = _reading(reading.active)
    holders = _reading(reading.holders)
    _runs_of = _reading(reading.runs_of)
    series = _reading(reading.series)
    totals = _reading(reading.totals)
    _slots = _reading(reading.slots)

    def runs_of_task(self, task_id: str, *, limit: int = 100) -> list[Run]:
        """The newest runs of a task, in the order in which they began."""
        return self._runs_of("id", task_id, limit=limit)[0]

    def runs_of_workflow(self, root_id: str, *, limit: int = 500) -> list[Run]:
        """The newest runs of the tasks that a root led to, without its own, or of a group's tasks. Reads in parts."""
        runs: list[Run] = []
        behind: reading.Row | None = None
        for left in range(limit, 0, -reading.RUNS_AT_ONCE):
            found, behind = self._runs_of("root", root_id, limit=min(left, reading.RUNS_AT_ONCE), behind=behind)
            runs = found + runs
            if behind is None:
                break
        return runs

    def slots(self, length_s: int, begin_s: int, end_s: int) -> list[tuple[int, str, Counters]]:
        """Counters of the slots of this length that begin in ``begin_s <= t < end_s``, by task."""
        found: list[tuple[int, str, Counters]] = []
        cursor = b""
        while True:
            part, cursor = self._slots(length_s, begin_s, end_s, cursor)
            found += [(at, task, counted) for (at, task), counted in part]
            if not cursor:
                return found

    # -- how ---------------------------------------------------------------------------------------------------------

    def _now(self) -> int:
        return self._clock.wall_ms()

    def _read(self, verb: Callable[[Transaction], T]) -> T:
        return self._retry.read(verb, timeout_s=self._timeout_s)

    def _write(self, verb: Callable[[Transaction], T]) -> T:
        return self._retry.repeat(verb, timeout_s=self._timeout_s)
