"""Where each row of the history stands, and its bytes: groups of runs, and counters.

``docs/keyspace.md`` says the same for users. All keys are tuples (``kombu_fdb/keyspace/layout.py``) behind
``("celery-fdb", namespace, "history")``, so the history shares a namespace with the queues and the results and collides
with none of their keys.

===============================================  =============================================  ==================================
key                                              value                                          written by
===============================================  =============================================  ==================================
``("settings",)``                                JSON: the bounds                               a worker, at its start
``("segment", number)``                          moment it was opened, ms                       flush; cleared by trim
``("segment", number, "runs")``                  how many runs are in it, atomic add            flush; cleared by trim
``("in", number, "group", end_ms, nonce)``       runs of one worker that ended by then          flush, lost; cleared by trim
``("in", number, "id", id, end_ms, nonce, at)``  "": a run of this task is in that group        flush, lost; cleared by trim
``("in", number, "root", id, ...)``              "": the same by its root's and group's id, or else its own  flush, lost; cleared by trim
``("in", number, "state", state, ...)``          "": a run with this state is in that group     flush, lost; cleared by trim
``("in", number, "task", name, ...)``            "": a run of this name is in that group        flush, lost; cleared by trim
``("slot", length_s, begin_s, task)``            counters, atomic add                         flush, lost; cleared by trim
``("all", length_s, begin_s)``                   the same of all tasks, with their waits        flush, lost; cleared by trim
``("total", task)``                              the same without sketch, since then           flush, lost
``("active", session, number)``                  a group of one run, which has not ended        flush; cleared by flush, lost
``("dropped",)``                                 runs that could not be kept, atomic add        flush
===============================================  =============================================  ==================================

A *segment* is the unit of trimming, as in Kafka's logs: the oldest is deleted as a whole, by clearing one range,
however many rows it has. The ``split_`` methods raise ``FormatError`` for a key that no version of ours can have
written.

The value of a group holds some runs of one worker, in the order in which they ended: a version byte, then JSON: a list
of the texts that many runs share (names of tasks, queues, workers and states), and a list of runs. A run is a list of
its fields in the order of :class:`~celery_fdb.history.run.Run`, shared texts by their places in the first list, without
the empty fields at its end. So a group of 200 runs is some 30 kB, in one row.

Counters give numbers without a scan: how many runs ended in each state, how long they took, and how long they waited.

A row of counters is one integer that is added to atomically: its fields, the lowest first, are counters that never become negative,
so none carries into the next one. First come 64-bit fields: the states of :data:`~celery_fdb.history.run.ENDED`, then
the sum of the runtimes in microseconds, then how many runs took up to each of :data:`BOUNDS_S`, and longer. They are
all fields of a total's row. The row of a slot has 32-bit fields behind them, a *sketch*: how many runs took up to
:data:`SHORTEST_S`, and then up to each further power of :data:`STEP` times that. So an estimate in the middle of its
bucket is at most :data:`ERROR` off, as in DDSketch (Masson, Rim, Lee, VLDB 2019). A slot of all tasks together has one
more behind it, of the waits: from the moment when a run was published, or due, until it began. Runtimes are counted of
runs that succeeded or failed, waits of first deliveries.

A row may be shorter or longer than this version writes it: missing fields count as 0, and fields of a newer version
are ignored. An older worker cuts a slot that it adds to, so runs counted before have no percentiles. Version 0.2 has no
sketches, and its workers add nothing to the slots of all tasks.
"""

from __future__ import annotations

import json
import math
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Self

from celery import states

from celery_fdb.history.run import ACTIVE, ENDED, STATES, Run
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.layout import pack, pack_int, pack_text, range_of, unpack, unpack_as
from kombu_fdb.primitives.clock import random_id
from kombu_fdb.primitives.ranges import MOST, is_number, is_whole

# -- keys --------------------------------------------------------------------------------------------------------------


Range = tuple[bytes, bytes]

NONCE_BYTES = 12
MOST_SEGMENT_NUMBERS = 2**62


class HistoryKeys:
    """Makes the keys of one namespace."""

    def __init__(self, namespace: str) -> None:
        self.prefix = pack("celery-fdb", namespace, "history")
        self.settings = self.prefix + pack("settings")
        self.dropped = self.prefix + pack("dropped")
        self.segments = range_of(self.prefix + pack("segment"))
        self.totals = range_of(self.prefix + pack("total"))
        self.all_active = range_of(self.prefix + pack("active"))

    # -- segments ----------------------------------------------------------------------------------------------------

    def segment(self, number: int) -> bytes:
        return self.prefix + pack("segment", number)

    def segment_runs(self, number: int) -> bytes:
        return self.segment(number) + pack("runs")

    def split_segment(self, key: bytes) -> tuple[int, bool]:
        """The segment's number, and whether this is the key of its number of runs."""
        packed = key[len(self.prefix) :]
        found = unpack(packed)
        if len(found) == 3 and found[2] == "runs":
            return _segment_number(found[1], packed), True
        return _segment_number(unpack_as(packed, str, int)[1], packed), False

    def inside(self, number: int) -> Range:
        """Everything in a segment."""
        return range_of(self._inside(number))

    def _inside(self, number: int) -> bytes:
        return self.prefix + pack("in", number)

    # -- groups and their indexes ------------------------------------------------------------------------------------

    def groups(self, number: int) -> bytes:
        """Prefix of a segment's groups."""
        return self._inside(number) + pack("group")

    def group(self, number: int, group: bytes) -> bytes:
        return self.groups(number) + group

    def index_by(self, number: int, kind: str) -> bytes:
        """Prefix of an index: "task", "state", "id" or "root"."""
        return self._inside(number) + pack_text(kind)

    def index(self, number: int, kind: str, name: str) -> bytes:
        """Prefix of an index's rows for one task's name, state or id."""
        return self.index_by(number, kind) + pack_text(name)

    @staticmethod
    def split_group(begin: int, key: bytes) -> bytes:
        """The group in a key of the groups, or of an index by group. ``begin``: length of the key's prefix."""
        return group_id(*unpack_as(key[begin:], int, bytes))

    @staticmethod
    def split_run(begin: int, key: bytes) -> tuple[bytes, int]:
        """The group in a key of an index by run, and the run's place in the group."""
        end_ms, nonce, at = unpack_as(key[begin:], int, bytes, int)
        return group_id(end_ms, nonce), at

    @staticmethod
    def split_root(begin: int, key: bytes) -> tuple[str, int, bytes]:
        """The id in a key of the index by root, when the newest run of the group ended, and the group."""
        id_, end_ms, nonce, _at = unpack_as(key[begin:], str, int, bytes, int)
        return id_, end_ms, group_id(end_ms, nonce)

    @staticmethod
    def ended_in(prefix: bytes, since_ms: int, until_ms: int) -> Range:
        """The rows behind the prefix of the groups, or of an index, whose groups may have runs of a period.

        ``since_ms``, ``until_ms``: when the runs ended; 0 for no bound.
        """
        begin, end = range_of(prefix)
        if since_ms:
            begin = prefix + pack_int(since_ms)
        if until_ms:
            end = prefix + pack_int(until_ms + GROUP_SPAN_MS + 1)
        return begin, end

    # -- counters ----------------------------------------------------------------------------------------------------

    def slot(self, length_s: int, begin_s: int, task: str) -> bytes:
        return self.prefix + pack("slot", length_s, begin_s, task)

    def slots(self, length_s: int, begin_s: int, end_s: int) -> Range:
        """The range of the slots that begin in ``begin_s <= t < end_s``."""
        prefix = self.prefix + pack("slot", length_s)
        return prefix + pack_int(begin_s), prefix + pack_int(end_s)

    def split_slot(self, key: bytes) -> tuple[int, str]:
        """When the slot begins, and its task."""
        _tag, _length, begin_s, task = unpack_as(key[len(self.prefix) :], str, int, int, str)
        return begin_s, task

    def all_tasks(self, length_s: int, begin_s: int) -> bytes:
        return self.prefix + pack("all", length_s, begin_s)

    def all_tasks_in(self, length_s: int, begin_s: int, end_s: int) -> Range:
        """The range of the slots that begin in ``begin_s <= t < end_s``."""
        return self.all_tasks(length_s, begin_s), self.all_tasks(length_s, end_s)

    def split_all_tasks(self, key: bytes) -> int:
        """When the slot begins."""
        return int(unpack_as(key[len(self.prefix) :], str, int, int)[2])

    def total(self, task: str) -> bytes:
        return self.prefix + pack("total", task)

    def split_total(self, key: bytes) -> str:
        return str(unpack_as(key[len(self.prefix) :], str, str)[1])

    # -- active runs -------------------------------------------------------------------------------------------------

    def active(self, session: bytes, number: int) -> bytes:
        return self.prefix + pack("active", session, number)

    def active_of(self, session: bytes) -> Range:
        return range_of(self.prefix + pack("active", session))

    def split_active(self, key: bytes) -> bytes:
        """The session of an active run."""
        return bytes(unpack_as(key[len(self.prefix) :], str, bytes, int)[1])


def _segment_number(number: object, packed: bytes) -> int:
    """Counted up from 1, so that the next one is always a number that a key can hold."""
    if not isinstance(number, int) or number > MOST_SEGMENT_NUMBERS:
        raise FormatError("unreadable key", key=packed[:200])
    return number


def group_id(end_ms: int, nonce: bytes) -> bytes:
    """A group's place in its segment: ``end_ms`` of its newest run, and bytes that tell groups of one moment apart."""
    if len(nonce) != NONCE_BYTES:
        raise FormatError("unreadable key", nonce=nonce[:40])
    return pack(end_ms, nonce)


# -- groups ------------------------------------------------------------------------------------------------------------


#: What one group holds at most. FoundationDB's limit of a value is 100,000 B.
GROUP_RUNS, GROUP_BYTES = 250, 90_000
#: A larger run loses all texts except its names and the beginning of its error.
RUN_BYTES = 60_000
#: Runs of one group ended within this time: a page of a period begins to read that much later than the period ends.
GROUP_SPAN_MS = 60_000
GROUP_VERSION = 2
#: By version, the fields of a run in their order. The first version stored no moments of publishing.
_BY_VERSION = {
    1: tuple(name for name in Run._fields if name not in {"published_ms", "due_ms"}),
    GROUP_VERSION: Run._fields,
}

_SHARED = ("task", "queue", "worker", "state")
_SHARED_AT = tuple(Run._fields.index(name) for name in _SHARED)
#: Fields that every row has.
_LEAST = max(_SHARED_AT) + 1
_NUMBERS = ("start_ms", "end_ms", "published_ms", "due_ms", "retries", "redeliveries")
#: Index of the first field that is empty in most runs, and the empty values from there on.
_RARE = Run._fields.index("key")
_NOTHING = tuple(Run("", ""))[_RARE:]


def _encoder() -> Callable[[Any], str]:
    """``JSONEncoder.encode`` with its C encoder made once: making it for each run would double the time."""
    plain = json.JSONEncoder(separators=(",", ":"), check_circular=False)
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:  # a Python without it
        return plain.encode
    encode = make(None, plain.default, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, True)
    return lambda value: "".join(encode(value, 0))


_dumps = _encoder()


class RunGroup:
    """Runs that are stored in one row. Every try to write the group uses the same key."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        #: Whether the group may have been written.
        self.tried = False
        self._texts: dict[str, int] = {}
        self._rows: list[str] = []
        self._room = GROUP_BYTES

    def add(self, run: Run) -> bool:
        """Add a run. False if it does not fit. An empty group takes any run."""
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
    def id(self) -> bytes:
        """Where the group stands in its segment, once all its runs are added."""
        return group_id(self.runs[-1].end_ms, random_id()[:NONCE_BYTES])

    @property
    def value(self) -> bytes:
        return bytes((GROUP_VERSION,)) + f"[{_dumps(list(self._texts))},[{','.join(self._rows)}]]".encode()

    @staticmethod
    def decode(value: bytes, at: Iterable[int] | None = None) -> list[Run]:
        """The runs of a stored group. ``at``: only the runs at these places.

        Raises ``FormatError`` for a value that no version of ours can have written.
        """
        try:
            if value[0] not in _BY_VERSION:
                raise FormatError("unreadable group of runs", version=value[0])
            texts, rows = json.loads(value[1:])
            wanted = rows if at is None else [rows[each] for each in at if each < len(rows)]
            return [_run(row, texts, _BY_VERSION[value[0]]) for row in wanted]
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise FormatError("unreadable group of runs", length=len(value), reason=str(error)[:200]) from error


def pack_groups(runs: Iterable[Run]) -> list[RunGroup]:
    """Sort the runs by their ends, and pack them into as few groups as can hold them."""
    groups: list[RunGroup] = []
    for run in sorted(runs, key=lambda run: run.end_ms):
        if not groups or not groups[-1].add(run):
            groups.append(RunGroup())
            groups[-1].add(run)
    return groups


def _run(row: Any, texts: Any, names: Sequence[str]) -> Run:
    if not _LEAST <= len(row) <= len(names):
        raise ValueError("not a run")
    fields = dict(zip(names, row, strict=False))
    for name in _SHARED:
        fields[name] = texts[_whole(fields[name])]
    fields["followers"] = tuple((each, task) for each, task in fields.get("followers", ()))
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
            for id_, task in value:
                _text(id_)
                _text(task)
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
    value.encode()  # no version of ours writes a lone half of a surrogate pair


# -- counters ----------------------------------------------------------------------------------------------------------


#: Upper bounds of the buckets that Prometheus scrapes, in seconds; one more bucket has no bound.
BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0),
)

#: Of the sketch: the relative error of a percentile between the shortest and the longest runtime, and what follows.
ERROR, SHORTEST_S, LONGEST_S = 0.05, 0.0001, 100_000.0
STEP = (1 + ERROR) / (1 - ERROR)
_SKETCHED = 2 + math.ceil(math.log(LONGEST_S / SHORTEST_S) / math.log(STEP))

#: Length of a slot in seconds, and for how long it is kept: one to show an hour by, and one for days.
SLOTS = {300: 2 * 3600, 3600: 8 * 86_400}

_SUM = len(ENDED)
_BUCKETS = _SUM + 1
_FIELDS = _BUCKETS + len(BOUNDS_S) + 1
_ALL = struct.Struct(f"<{_FIELDS}Q{2 * _SKETCHED}I")
#: Bytes of a row: of a total, of a slot, and of a slot of all tasks.
TOTAL_WIDTH, SLOT_WIDTH, ALL_WIDTH = 8 * _FIELDS, 8 * _FIELDS + 4 * _SKETCHED, _ALL.size
_TIMED = (states.SUCCESS, states.FAILURE)
_AT = {state: at for at, state in enumerate(ENDED)}
#: A year: more is a clock that jumped.
_LONGEST_S = 366 * 86_400


class Counters(NamedTuple):
    """The counters of some runs. ``states``: in the order of ``ENDED``; ``buckets`` and ``sketch``: by runtime, not cumulative.

    ``waits``: a sketch as well.
    """

    states: tuple[int, ...] = (0,) * len(ENDED)
    runtime_us: int = 0
    buckets: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    sketch: tuple[int, ...] = (0,) * _SKETCHED
    waits: tuple[int, ...] = (0,) * _SKETCHED

    @classmethod
    def unpack(cls, value: bytes) -> Self:
        """The counters of a stored row. Raises ``FormatError``."""
        if len(value) < TOTAL_WIDTH:
            raise FormatError("unreadable counters", length=len(value))
        fields = _ALL.unpack(value[:ALL_WIDTH].ljust(ALL_WIDTH, b"\0"))
        sketches = fields[_FIELDS:]
        return cls(fields[:_SUM], fields[_SUM], fields[_BUCKETS:_FIELDS], sketches[:_SKETCHED], sketches[_SKETCHED:])

    def of(self, state: str) -> int:
        """How many runs ended in this state."""
        return self.states[_AT[state]]

    def plus(self, other: Self) -> Self:
        return type(self)(
            tuple(map(sum, zip(self.states, other.states, strict=True))),
            self.runtime_us + other.runtime_us,
            tuple(map(sum, zip(self.buckets, other.buckets, strict=True))),
            tuple(map(sum, zip(self.sketch, other.sketch, strict=True))),
            tuple(map(sum, zip(self.waits, other.waits, strict=True))),
        )

    def up_to(self) -> list[tuple[float, int]]:
        """Each bound of :data:`BOUNDS_S` and how many runs took that long or less; at last infinity, and all runs."""
        return list(zip((*BOUNDS_S, math.inf), accumulate(self.buckets), strict=True))

    @property
    def runs(self) -> int:
        return sum(self.states)

    @property
    def failed(self) -> int:
        return self.of(states.FAILURE)

    def quantile_s(self, share: float, of: Literal["sketch", "waits"] = "sketch") -> float | None:
        """What ``share`` of the runtimes, or of the waits, stayed below, at most :data:`ERROR` off; None without runs.

        Durations below :data:`SHORTEST_S` or above :data:`LONGEST_S` count as these.
        """
        sketch = self.sketch if of == "sketch" else self.waits
        rank = max(share * sum(sketch), 1)
        for at, number in enumerate(sketch):
            rank -= number
            if number and rank <= 0:
                return SHORTEST_S * STEP**at * (1 - ERROR)
        return None


def delta_of(runs: Iterable[Run]) -> bytes:
    """What these runs add to a slot of all tasks. A slot of one task, and a total, add a prefix of it."""
    fields, sketch, waits = [0] * _FIELDS, [0] * _SKETCHED, [0] * _SKETCHED
    for run in runs:
        fields[_AT[run.state]] += 1
        if run.runtime_s is not None and run.state in _TIMED:
            fields[_SUM] += int(min(max(run.runtime_s, 0.0), _LONGEST_S) * 1e6)
            fields[_BUCKETS + bisect_left(BOUNDS_S, run.runtime_s)] += 1
            sketch[_place(run.runtime_s)] += 1
        if run.wait_s is not None:
            waits[_place(run.wait_s)] += 1
    return _ALL.pack(*fields, *sketch, *waits)


def _place(seconds: float) -> int:
    """The place of a duration in a sketch."""
    if seconds <= SHORTEST_S:
        return 0
    return math.ceil(math.log(min(seconds, LONGEST_S) / SHORTEST_S) / math.log(STEP))
