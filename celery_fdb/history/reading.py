"""Reading a history: pages of runs, the runs of a task or a workflow, active runs, counters.

Every function reads a bounded number of rows. A page walks the segments, and the groups in each, from the newest to the
oldest; it reads all groups, or only those that an index names, and filters their runs. A page ends when it is full, or
when it has read :data:`GROUPS_PER_PAGE` groups; its cursor says where the next page begins. So a filter that matches
nothing gives empty pages with cursors, each at a bounded cost.

Groups are ordered by their newest run, and each holds about a second of one worker. So runs of several workers are in
order to about a second. Unreadable rows are skipped.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from celery.states import FAILURE

from celery_fdb.history.layout import Counters, HistoryKeys, RunGroup
from celery_fdb.history.options import LARGEST_SEGMENT
from celery_fdb.history.run import FAILED, Run, bounded
from kombu_fdb.engine.parts import rows_from
from kombu_fdb.errors import FormatError, InvalidArgument
from kombu_fdb.keyspace.layout import Range, pack, pack_int, range_of, readable, unpack_as
from kombu_fdb.store.protocol import Transaction

P = TypeVar("P")

#: Groups that one page reads at most, and at once.
GROUPS_PER_PAGE, GROUPS_AT_ONCE = 60, 10
#: Runs of one task or workflow that are read at once.
RUNS_AT_ONCE = 500
#: Rows of counters that are read at once.
MOST_COUNTERS = 5_000
#: Rows of a segment's index that are read at once.
MOST_OF_SEGMENT = 20_000
#: Segments that are asked for an id at once.
SEGMENTS_AT_ONCE = 100


# -- segments ----------------------------------------------------------------------------------------------------------


#: More runs than a segment can have: a damaged counter is cut to it, so that it has no other segment cleared.
MOST_COUNTED = 10 * LARGEST_SEGMENT
#: Segments that are read at once: more than any bounds leave.
MOST_SEGMENTS = 2_000


def segments(tr: Transaction, keys: HistoryKeys, *, limit: int = MOST_SEGMENTS) -> dict[int, tuple[int, int]]:
    """The newest segments by number, the oldest of them first: when each was opened (ms), and how many runs it has."""
    rows = reversed(tr.get_range(*keys.segments, limit=2 * limit, reverse=True, snapshot=True))
    found: dict[int, tuple[int, int]] = {}
    for (number, is_runs), value in readable(rows, keys.split_segment):
        # What can't be read is the largest number: no worker writes into that segment.
        amount = int.from_bytes(value, "little") if len(value) == 8 else 2**64 - 1
        if not is_runs:
            found[number] = amount, 0
        elif number in found:
            found[number] = found[number][0], min(amount, MOST_COUNTED)
    return found


def newest_first(tr: Transaction, keys: HistoryKeys) -> list[int]:
    """The segments' numbers, the newest first."""
    return [*reversed(segments(tr, keys))]


# -- pages of runs -----------------------------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """The filter of a page. ``since_ms``, ``until_ms``: when runs ended, 0 for no bound. "" matches everything."""

    task: str = ""
    state: str = ""
    key: str = ""
    queue: str = ""
    worker: str = ""
    since_ms: int = 0
    until_ms: int = 0
    #: A part of the arguments, in any case.
    arguments: str = ""

    def matches(self, run: Run) -> bool:
        return (
            (not self.task or run.task == self.task)
            and (not self.state or run.state == self.state)
            and (not self.key or run.key == self.key)
            and (not self.queue or run.queue == self.queue)
            and (not self.worker or run.worker == self.worker)
            and run.end_ms >= self.since_ms
            and (not self.until_ms or run.end_ms <= self.until_ms)
            and (not self.arguments or self.arguments.lower() in f"{run.args} {run.kwargs}".lower())
        )

    def found_by(self) -> list[tuple[str, str]]:
        """The index entries by which a workflow is found: by its task, or its failed states; empty: by any run."""
        if self.task:
            return [("task", self.task)]
        return [("state", each) for each in FAILED] if self.state == FAILURE else []


class Cursor(NamedTuple):
    """Where a page begins: a group, and how many of its runs, from the newest, the pages before have ``taken``.

    ``taken`` 0: all of them.
    """

    segment: int
    group: bytes
    taken: int

    def __str__(self) -> str:
        end_ms, nonce = unpack_as(self.group, int, bytes)
        return f"{self.segment}.{end_ms}.{nonce.hex()}.{self.taken}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Raises ``InvalidArgument``."""
        try:
            segment, end_ms, nonce, taken = text.split(".")
            found = cls(int(segment), pack(int(end_ms), bytes.fromhex(nonce)), int(taken))
            pack_int(found.segment), pack_int(found.taken)
            return found
        except (ValueError, FormatError) as error:
            fix = "Use the cursor that the page before gave."
            raise InvalidArgument("not a cursor of the history", given=text[:80], fix=fix) from error


def page(
    tr: Transaction, keys: HistoryKeys, wanted: Wanted, *, limit: int, after: Cursor | None = None
) -> tuple[list[Run], Cursor | None]:
    """Runs that have ended, the newest first; and the cursor of the next page, None at the end."""
    found: list[Run] = []
    for read, (segment, group, runs) in enumerate(_walk(tr, keys, wanted, after), 1):
        newest_first = list(enumerate(reversed(runs), 1))
        skipped = after.taken if after is not None and (segment, group) == (after.segment, after.group) else 0
        for taken, run in newest_first[skipped:]:
            if wanted.matches(run):
                found.append(run)
                if len(found) == limit:
                    return found, Cursor(segment, group, taken % len(runs))
        if read == GROUPS_PER_PAGE:
            return found, Cursor(segment, group, 0)
    return found, None


def _walk(
    tr: Transaction, keys: HistoryKeys, wanted: Wanted, after: Cursor | None
) -> Iterator[tuple[int, bytes, list[Run]]]:
    """The groups that may hold matching runs, the newest first, each with its segment and its runs."""
    numbers = [each for each in newest_first(tr, keys) if after is None or each <= after.segment]
    if wanted.task or wanted.state or wanted.until_ms:
        ended = wanted.since_ms, wanted.until_ms
        numbers = _segments_with(tr, numbers, lambda number: keys.ended_in(_prefix(keys, number, wanted), *ended))
    for number in numbers:
        behind = after if after is not None and number == after.segment else None
        for group, value in _groups(tr, keys, number, wanted, behind):
            yield number, group, runs_in(value)


def _groups(
    tr: Transaction, keys: HistoryKeys, number: int, wanted: Wanted, behind: Cursor | None
) -> Iterator[tuple[bytes, bytes]]:
    """One segment's groups, the newest first. ``behind``: begin at a group that the last page may not have finished."""
    prefix = _prefix(keys, number, wanted)
    is_index = prefix != keys.groups(number)
    begin, end = keys.ended_in(prefix, wanted.since_ms, wanted.until_ms)
    if behind is not None:
        end = min(end, prefix + behind.group + (b"\x00" if behind.taken else b""))
    while begin < end:
        rows = tr.get_range(begin, end, limit=GROUPS_AT_ONCE, reverse=True, snapshot=True)
        groups = list(readable(rows, partial(keys.split_group, len(prefix))))
        if is_index and groups:
            values = tr.get_many([keys.group(number, group) for group, _ in groups], snapshot=True)
            yield from ((group, value) for (group, _), value in zip(groups, values, strict=True) if value is not None)
        else:
            yield from groups
        if len(rows) < GROUPS_AT_ONCE:
            return
        end = rows[-1][0]


def _prefix(keys: HistoryKeys, number: int, wanted: Wanted) -> bytes:
    """The prefix of the index that names the fewest groups. Tasks come first: there are more tasks than states."""
    if wanted.task:
        return keys.index(number, "task", wanted.task)
    if wanted.state:
        return keys.index(number, "state", wanted.state)
    return keys.groups(number)


# -- by id -------------------------------------------------------------------------------------------------------------


#: A row of an index: its segment, and its key.
Row = tuple[int, bytes]


def runs_of(
    tr: Transaction, keys: HistoryKeys, kind: str, id_: str, *, limit: int, behind: Row | None = None
) -> tuple[list[Run], Row | None]:
    """The newest runs of a task (``kind`` is "id") or of a workflow ("root"), in the order in which they began.

    And the row behind which older runs stand, None if there are none.
    """
    places: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    id_, left, last = bounded(id_), limit, None
    numbers = [each for each in newest_first(tr, keys) if behind is None or each <= behind[0]]
    for number in _segments_with(tr, numbers, lambda each: range_of(keys.index(each, kind, id_))):
        prefix = keys.index(number, kind, id_)
        begin, end = range_of(prefix)
        end = behind[1] if behind is not None and number == behind[0] else end
        rows = tr.get_range(begin, end, limit=left, reverse=True, snapshot=True)
        for (group, at), _ in readable(rows, partial(keys.split_run, len(prefix))):
            places[number, group].append(at)
        left -= len(rows)
        if left <= 0:
            last = number, rows[-1][0]
            break
    runs: list[Run] = []
    groups = sorted(places)
    for start in range(0, len(groups), GROUPS_AT_ONCE):
        some = groups[start : start + GROUPS_AT_ONCE]
        for place, value in zip(some, tr.get_many([keys.group(*each) for each in some], snapshot=True), strict=True):
            runs += runs_in(value, sorted(places[place]))
    # A retry may have ended before the parent process hears that the attempt before it did.
    return sorted(runs, key=lambda run: (run.start_ms or run.end_ms, run.end_ms)), last


def workflows_in(tr: Transaction, keys: HistoryKeys, number: int, wanted: Wanted) -> tuple[list[tuple[int, str]], int]:
    """The roots and groups of a segment's runs: when about the newest run of each ended, and its id.

    And how many rows were read for them. The newest first; at most :data:`MOST_OF_SEGMENT` runs are looked at. Left out
    are those of which the index says that no run is wanted: none of that task, or, of what has failed, none that has.
    """
    prefix = keys.index_by(number, "root")
    rows = tr.get_range(*range_of(prefix), limit=MOST_OF_SEGMENT, snapshot=True)
    named: set[bytes] | None = None
    read = len(rows)
    for kind, name in wanted.found_by() if rows else ():
        behind = keys.index(number, kind, name)
        found = tr.get_range(*range_of(behind), limit=MOST_OF_SEGMENT, snapshot=True)
        named = (named or set()) | {group for group, _ in readable(found, partial(keys.split_group, len(behind)))}
        read += len(found)
    newest: dict[str, int] = {}
    matching: set[str] = set()
    for (id_, end_ms, group), _ in readable(rows, partial(keys.split_root, len(prefix))):
        newest[id_] = max(newest.get(id_, 0), end_ms)
        if named is None or group in named:
            matching.add(id_)
    found_ids = [(end_ms, id_) for id_, end_ms in newest.items() if id_ in matching and end_ms >= wanted.since_ms]
    return sorted(found_ids, reverse=True), read


def _segments_with(tr: Transaction, numbers: Sequence[int], range_in: Callable[[int], Range]) -> list[int]:
    """The segments that have a row in their range. Asks :data:`SEGMENTS_AT_ONCE` segments at a time."""
    having: list[int] = []
    for start in range(0, len(numbers), SEGMENTS_AT_ONCE):
        some = numbers[start : start + SEGMENTS_AT_ONCE]
        found = tr.get_ranges([(*range_in(each), 1) for each in some], snapshot=True)
        having += [number for number, rows in zip(some, found, strict=True) if rows]
    return having


def runs_in(value: bytes | None, at: Iterable[int] | None = None) -> list[Run]:
    """The runs of a stored group; none of one that is missing, or can't be read."""
    try:
        return [] if value is None else RunGroup.decode(value, at)
    except FormatError:
        return []


# -- active runs, counters ---------------------------------------------------------------------------------------------


def active(tr: Transaction, keys: HistoryKeys, *, limit: int = 1_000) -> list[tuple[bytes, Run]]:
    """Active runs, each with the session of its worker."""
    rows = tr.get_range(*keys.all_active, limit=limit, snapshot=True)
    return [(session, run) for session, value in readable(rows, keys.split_active) for run in runs_in(value)]


def holders(tr: Transaction, keys: HistoryKeys, *, limit: int, cursor: bytes = b"") -> tuple[set[bytes], bytes]:
    """The sessions of ``limit`` rows of active runs, and the cursor to go on with; b"" at the end."""
    rows, following = rows_from(tr, [keys.all_active], cursor, limit)
    return {session for session, _ in readable(rows, keys.split_active)}, following


#: Some rows of counters, with what their keys say; and where to go on, b"" at the end.
Counted = tuple[list[tuple[P, Counters]], bytes]


def slots(
    tr: Transaction, keys: HistoryKeys, length_s: int, begin_s: int, end_s: int, cursor: bytes
) -> Counted[tuple[int, str]]:
    """Counters of some slots of this length that begin in ``begin_s <= t < end_s``, by time and task."""
    return _counters(tr, keys.slots(length_s, begin_s, end_s), keys.split_slot, cursor)


def series(tr: Transaction, keys: HistoryKeys, length_s: int, begin_s: int, end_s: int) -> dict[int, Counters]:
    """The counters of all tasks together, by the beginning of each slot; of one part of the slots."""
    return dict(_counters(tr, keys.all_tasks_in(length_s, begin_s, end_s), keys.split_all_tasks)[0])


def totals(tr: Transaction, keys: HistoryKeys) -> dict[str, Counters]:
    """Counters since the first run, by task; of one part of the tasks."""
    return dict(_counters(tr, keys.totals, keys.split_total)[0])


def _counters(tr: Transaction, whole: Range, split: Callable[[bytes], P], cursor: bytes = b"") -> Counted[P]:
    rows, following = rows_from(tr, [whole], cursor, MOST_COUNTERS)
    found: list[tuple[P, Counters]] = []
    for place, value in readable(rows, split):
        with suppress(FormatError):
            found.append((place, Counters.unpack(value)))
    return found, following


# -- how much there is -------------------------------------------------------------------------------------------------


def settings(tr: Transaction, keys: HistoryKeys) -> dict[str, Any] | None:
    """The bounds that the last worker to start has set; None if none keeps a history."""
    value = tr.get(keys.settings, snapshot=True)
    if value is None:
        return None
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def dropped(tr: Transaction, keys: HistoryKeys) -> int:
    """How many runs could not be kept, ever."""
    return int.from_bytes((tr.get(keys.dropped, snapshot=True) or b"")[:8], "little")


def kept(tr: Transaction, keys: HistoryKeys) -> int:
    """How many runs are in the history."""
    return sum(runs for _, runs in segments(tr, keys).values())
