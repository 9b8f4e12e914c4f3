"""Every key of the history, in one table. ``docs/keyspace.md`` is this page for readers.

All keys are tuples (``kombu_fdb/keyspace/tuples.py``) behind ``("celery-fdb", namespace, "history")``, so the history
shares a namespace with the queues and the results and collides with none of their keys.

===============================================  =============================================  ==================================
key                                              value                                          written by
===============================================  =============================================  ==================================
``("settings",)``                                JSON: the bounds                               a worker, at its start
``("segment", number)``                          moment it was opened, ms                       flush; cleared by trim
``("segment", number, "runs")``                  how many runs are in it, atomic add            flush; cleared by trim
``("in", number, "group", end_ms, nonce)``       runs of one worker that ended by then          flush, lost; cleared by trim
``("in", number, "id", id, end_ms, nonce, at)``  "": a run of this task is in that group        flush, lost; cleared by trim
``("in", number, "root", id, ...)``              "": the same by its root's and its group's id   flush, lost; cleared by trim
``("in", number, "state", state, ...)``          "": a run with this state is in that group     flush, lost; cleared by trim
``("in", number, "task", name, ...)``            "": a run of this name is in that group        flush, lost; cleared by trim
``("slot", length_s, begin_s, task)``            counters, atomic add (``counters.py``)         flush, lost; cleared by trim
``("total", task)``                              the same without sketch, since then           flush, lost
``("active", session, number)``                  a group of one run, which has not ended        flush; cleared by flush, lost
``("dropped",)``                                 runs that could not be kept, atomic add        flush
===============================================  =============================================  ==================================

A *segment* is the unit of trimming, as in Kafka's logs: the oldest is deleted as a whole, by clearing one range,
however many rows it has. What takes a key apart raises ``FormatError`` for one that no version of ours can have written.
"""

from __future__ import annotations

from typing import NamedTuple

from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.tuples import pack, pack_int, pack_text, range_of, unpack, unpack_as

Range = tuple[bytes, bytes]

NONCE_BYTES = 12
MOST_SEGMENT_NUMBERS = 2**62
#: Indexes by group; those by run are "id" and "root".
INDEXES = ("task", "state")


class GroupId(NamedTuple):
    """Where a group stands in its segment: ``end_ms`` of its newest run, and what tells it from others of then."""

    end_ms: int
    nonce: bytes

    @property
    def packed(self) -> bytes:
        return pack(self.end_ms, self.nonce)


class Spot(NamedTuple):
    """Where a run stands."""

    segment: int
    group: GroupId
    at: int


class HistoryKeys:
    """Makes the keys of one namespace."""

    def __init__(self, namespace: str) -> None:
        self.prefix = pack("celery-fdb", namespace, "history")
        self.settings = self.prefix + pack("settings")
        self.dropped = self.prefix + pack("dropped")

    # -- segments ----------------------------------------------------------------------------------------------------

    def segment(self, number: int) -> bytes:
        return self.prefix + pack("segment", number)

    def segment_runs(self, number: int) -> bytes:
        return self.segment(number) + pack("runs")

    @property
    def segments(self) -> Range:
        return range_of(self.prefix + pack("segment"))

    def split_segment(self, key: bytes) -> tuple[int, bool]:
        """Its number, and whether this is the key of its number of runs."""
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

    def group(self, number: int, group: GroupId) -> bytes:
        return self.groups(number) + group.packed

    def index_by(self, number: int, kind: str) -> bytes:
        """Prefix of an index: "task", "state", "id" or "root"."""
        return self._inside(number) + pack_text(kind)

    def index(self, number: int, kind: str, name: str) -> bytes:
        """Prefix of what stands in it under a task's name, a state or an id."""
        return self.index_by(number, kind) + pack_text(name)

    @staticmethod
    def split_group(packed: bytes) -> GroupId:
        """What stands behind the prefix of the groups, or of an index by group."""
        return _checked(*unpack_as(packed, int, bytes))

    @staticmethod
    def split_run(packed: bytes) -> tuple[GroupId, int]:
        """What stands behind the prefix of an index by run."""
        end_ms, nonce, at = unpack_as(packed, int, bytes, int)
        return _checked(end_ms, nonce), at

    # -- counters ----------------------------------------------------------------------------------------------------

    def slot(self, length_s: int, begin_s: int, task: str) -> bytes:
        return self.prefix + pack("slot", length_s, begin_s, task)

    def slots(self, length_s: int, begin_s: int, end_s: int) -> Range:
        """Those that begin in ``begin_s <= t < end_s``."""
        prefix = self.prefix + pack("slot", length_s)
        return prefix + pack_int(begin_s), prefix + pack_int(end_s)

    def split_slot(self, key: bytes) -> tuple[int, str]:
        """When it begins, and the task."""
        _tag, _length, begin_s, task = unpack_as(key[len(self.prefix) :], str, int, int, str)
        return begin_s, task

    def total(self, task: str) -> bytes:
        return self.prefix + pack("total", task)

    @property
    def totals(self) -> Range:
        return range_of(self.prefix + pack("total"))

    def split_total(self, key: bytes) -> str:
        return str(unpack_as(key[len(self.prefix) :], str, str)[1])

    # -- active runs -------------------------------------------------------------------------------------------------

    def active(self, session: bytes, number: int) -> bytes:
        return self.prefix + pack("active", session, number)

    def active_of(self, session: bytes) -> Range:
        return range_of(self.prefix + pack("active", session))

    @property
    def all_active(self) -> Range:
        return range_of(self.prefix + pack("active"))

    def split_active(self, key: bytes) -> bytes:
        """The session."""
        return bytes(unpack_as(key[len(self.prefix) :], str, bytes, int)[1])

    @property
    def everything(self) -> Range:
        return range_of(self.prefix)


def _segment_number(number: object, packed: bytes) -> int:
    """Counted up from 1, so that the next one is always a number that a key can hold."""
    if not isinstance(number, int) or number > MOST_SEGMENT_NUMBERS:
        raise FormatError("unreadable key", key=packed[:200])
    return number


def _checked(end_ms: int, nonce: bytes) -> GroupId:
    if len(nonce) != NONCE_BYTES:
        raise FormatError("unreadable key", nonce=nonce[:40])
    return GroupId(end_ms, nonce)
