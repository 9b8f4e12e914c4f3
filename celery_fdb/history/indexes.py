"""Indexes of the history: the runs of a group, and segments by which old runs are found and trimmed.

The value of a group holds some runs of one worker, in the order in which they ended: a version byte, then JSON: a list
of the texts that many runs share (names of tasks, queues, workers and states), and a list of runs. A run is a list of
its fields in the order of :class:`~celery_fdb.history.run.Run`, shared texts by their places in the first list, without
the empty fields at its end. So a group of 200 runs is some 30 kB, in one row.

Model. A segment is *open* while it is the newest, then *closed*, until *trim* clears it. A flush writes into the newest
one, or opens the next if that is full or has been open for long enough (``options.py``). Two workers may open the same
one at the same time: both write the same key, and one moment stands. Trim clears closed segments, the oldest first:
while there are more runs than the bound leaves room for, and those that were opened longer ago than the bound says,
which includes an open one that no worker writes to any more. So there are never more runs than the bound, but for what
several workers flush at the same moment, and none is older.

A flush conflicts with a trim of the segment that it writes to, and then writes into another one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from celery_fdb.history.layout import NONCE_BYTES, SLOTS, GroupId, HistoryKeys
from celery_fdb.history.options import LARGEST_SEGMENT, History
from celery_fdb.history.run import ACTIVE, STATES, Follower, Run
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.layout import readable
from kombu_fdb.primitives.clock import random_id
from kombu_fdb.primitives.ranges import MOST, is_number, is_whole
from kombu_fdb.store.protocol import KeyValue, Transaction

# -- groups ------------------------------------------------------------------------------------------------------------


#: What one group holds at most. FoundationDB's limit of a value is 100,000 B.
GROUP_RUNS, GROUP_BYTES = 250, 90_000
#: A run that is larger keeps no texts but its names and the beginning of its error.
RUN_BYTES = 60_000
#: Runs of one group ended within this time, so that a page of a period knows where to begin.
GROUP_SPAN_MS = 60_000
VERSION = 2
#: By version, the fields of a run in their order. The first one knew nothing of publications.
_FIELDS = {1: tuple(name for name in Run._fields if name not in {"published_ms", "due_ms"}), VERSION: Run._fields}

_SHARED = ("task", "queue", "worker", "state")
_SHARED_AT = tuple(Run._fields.index(name) for name in _SHARED)
#: Fields that every row has.
_LEAST = max(_SHARED_AT) + 1
_NUMBERS = ("start_ms", "end_ms", "published_ms", "due_ms", "retries", "redeliveries")
#: Index of the first field that most runs don't have, and what they have from there on.
_RARE = Run._fields.index("key")
_NOTHING = tuple(Run("", ""))[_RARE:]


def _encoder() -> Callable[[Any], str]:
    """``JSONEncoder.encode``, whose C part is made once, not for each run: that is half of its time."""
    plain = json.JSONEncoder(separators=(",", ":"), check_circular=False)
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:  # a Python without it
        return plain.encode
    encode = make(None, plain.default, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, True)
    return lambda value: "".join(encode(value, 0))


_dumps = _encoder()


class Group:
    """Runs that stand in one row, under the same key however often it is written."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        #: It may have been written.
        self.tried = False
        self._texts: dict[str, int] = {}
        self._rows: list[str] = []
        self._room = GROUP_BYTES

    def add(self, run: Run) -> bool:
        """False if it does not fit. An empty group takes any run."""
        if self.runs and (len(self.runs) == GROUP_RUNS or run.end_ms - self.runs[0].end_ms > GROUP_SPAN_MS):
            return False
        row = self._row(run)
        if len(row) > RUN_BYTES:
            run = run._replace(args="", kwargs="", traceback="", error=run.error[:200], followers=())
            row = self._row(run)
        if len(row) >= self._room and self.runs:
            return False
        self._room -= len(row) + 1
        self._rows.append(row)
        self.runs.append(run)
        return True

    def _row(self, run: Run) -> str:
        row: list[Any] = list(run[:_RARE] if run[_RARE:] == _NOTHING else run)
        for at in _SHARED_AT:
            place = self._texts.get(row[at])
            if place is None:
                place = self._texts[row[at]] = len(self._texts)
                self._room -= len(_dumps(row[at])) + 1
            row[at] = place
        while not row[-1] and len(row) > _LEAST and not isinstance(row[-1], float):
            row.pop()
        return _dumps(row)

    @cached_property
    def id(self) -> GroupId:
        """Where it stands in its segment, once all its runs are added."""
        return GroupId(self.runs[-1].end_ms, random_id()[:NONCE_BYTES])

    @property
    def value(self) -> bytes:
        return bytes((VERSION,)) + f"[{_dumps(list(self._texts))},[{','.join(self._rows)}]]".encode()


def pack_groups(runs: Iterable[Run]) -> list[Group]:
    """Sorted by their ends, in as few groups as hold them."""
    groups: list[Group] = []
    for run in sorted(runs, key=lambda run: run.end_ms):
        if not groups or not groups[-1].add(run):
            groups.append(Group())
            groups[-1].add(run)
    return groups


# -- reading -----------------------------------------------------------------------------------------------------------


def decode(value: bytes, at: Iterable[int] | None = None) -> list[Run]:
    """``at``: only these. Raises ``FormatError``, and nothing else, for what no version of ours can have written."""
    try:
        if value[0] not in _FIELDS:
            raise FormatError("unreadable group of runs", version=value[0])
        texts, rows = json.loads(value[1:])
        wanted = rows if at is None else [rows[each] for each in at if each < len(rows)]
        return [_run(row, texts, _FIELDS[value[0]]) for row in wanted]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise FormatError("unreadable group of runs", length=len(value), reason=str(error)[:200]) from error


def _run(row: Any, texts: Any, names: Sequence[str]) -> Run:
    if not _LEAST <= len(row) <= len(names):
        raise ValueError("not a run")
    fields = dict(zip(names, row, strict=False))
    for name in _SHARED:
        fields[name] = texts[_whole(fields[name])]
    fields["followers"] = tuple(Follower(each, task) for each, task in fields.get("followers", ()))
    run = Run(**fields)
    _check(run)
    return run


def _check(run: Run) -> None:
    value: Any
    for name, value in zip(Run._fields, run, strict=True):
        if name in _NUMBERS:
            _whole(value)
        elif name == "runtime_s":
            if value is not None and not is_number(value, 0, math.inf):
                raise ValueError("not a duration")
        elif name == "followers":
            for each in value:
                _text(each.id)
                _text(each.task)
        else:
            _text(value)
    if run.state not in STATES or (run.state == ACTIVE) != (run.end_ms == 0):
        raise ValueError("not a state")


def _whole(value: Any) -> int:
    if not is_whole(value, 0, MOST):
        raise ValueError("not a number of ours")
    return int(value)


def _text(value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError("not a text")
    value.encode()  # a lone half of a surrogate pair is nothing of ours


# -- segments ----------------------------------------------------------------------------------------------------------


#: Deleted in one transaction.
TRIM_SEGMENTS = 4
#: So many runs are never flushed into one: a damaged counter must not have all the others cleared.
MOST_COUNTED = 10 * LARGEST_SEGMENT
#: Read at once: more than any bounds leave.
MOST_SEGMENTS = 2_000


class Segment(NamedTuple):
    number: int
    opened_ms: int
    runs: int = 0


def read(tr: Transaction, keys: HistoryKeys, *, limit: int = MOST_SEGMENTS) -> list[Segment]:
    """The newest ones, the oldest of them first."""
    return _segments(keys, reversed(tr.get_range(*keys.segments, limit=2 * limit, reverse=True, snapshot=True)))


def newest_first(tr: Transaction, keys: HistoryKeys) -> list[int]:
    """Their numbers."""
    return [each.number for each in reversed(read(tr, keys))]


def _segments(keys: HistoryKeys, rows: Iterable[KeyValue]) -> list[Segment]:
    found: dict[int, Segment] = {}
    for (number, is_runs), value in readable(rows, keys.split_segment):
        amount = _number(value)
        if not is_runs:
            found[number] = Segment(number, amount)
        elif number in found:
            found[number] = found[number]._replace(runs=min(amount, MOST_COUNTED))
    return list(found.values())


def _number(value: bytes) -> int:
    """One that can't be read is the largest: a segment with it is full, and no worker writes into it."""
    return int.from_bytes(value, "little") if len(value) == 8 else 2**64 - 1


def choose(tr: Transaction, keys: HistoryKeys, bounds: History, now_ms: int) -> tuple[int, bool]:
    """Where a flush writes to, and whether it was opened for that."""
    found = read(tr, keys, limit=1)
    if found:
        last = found[-1]
        if last.runs < bounds.segment_runs and now_ms - last.opened_ms < bounds.segment_ms:
            tr.add_read_conflict_key(keys.segment(last.number))
            return last.number, False
    number = found[-1].number + 1 if found else 1
    tr.set(keys.segment(number), now_ms.to_bytes(8, "little"))
    return number, True


def trim(tr: Transaction, keys: HistoryKeys, bounds: History, now_ms: int) -> int:
    """Clear up to :data:`TRIM_SEGMENTS` of those that the bounds leave no room for. Returns how many."""
    found = read(tr, keys)
    too_many = sum(each.runs for each in found) - (bounds.runs - bounds.segment_runs)
    cleared = 0
    # Each was opened before the next one, whatever the clock of who opened it said.
    opened_ms = [*accumulate((each.opened_ms for each in reversed(found)), min)][::-1]
    for each, opened in zip(found[:TRIM_SEGMENTS], opened_ms, strict=False):
        is_closed = each is not found[-1]
        if not (is_closed and too_many > 0) and now_ms - opened < bounds.max_age * 1000:
            break
        too_many -= each.runs
        tr.clear_range(*keys.inside(each.number))
        tr.clear(keys.segment(each.number))
        tr.clear(keys.segment_runs(each.number))
        cleared += 1
    for length_s, kept_s in SLOTS.items():
        end_s = max(now_ms // 1000 - kept_s, 0)
        tr.clear_range(*keys.slots(length_s, 0, end_s))
        tr.clear_range(*keys.all_tasks_in(length_s, 0, end_s))
    return cleared
