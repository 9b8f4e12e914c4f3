"""Every key of the result backend, in one table. ``docs/results.md`` is this page for readers.

All keys are tuples (``kombu_fdb/keyspace/tuples.py``) behind ``("celery-fdb", namespace, "result")``, so results share
a namespace with the queues and collide with none of their keys.

==========================================  =============================================  ==================================================
key                                         value                                          written by
==========================================  =============================================  ==================================================
``("task", task_id)``                       record, with a versionstamp; watched           store, forget, sweep
``("task", task_id, chunk)``                a piece of a large result                      with its record
``("group", group_id)``                     record: the ids of a saved group               save and delete of a group, sweep
``("group", group_id, chunk)``              a piece of a large group                       with its record
``("chord", group_id)``                     JSON: size, who publishes                      apply_chord, set_chord_size, the last part
``("chord", group_id, "body")``             record: the signature to publish               apply_chord
``("chord", group_id, "returned")``         number of parts, atomic add                    a part's first return
``("chord", group_id, "part", place, id)``  record: what a header task returned            a part's first return
``("chord", group_id, "join", id)``            "": one of very many that joined              add_to_chord
``("chord", group_id, "joins")``               number of those, atomic add                   add_to_chord
``("expiry", expires_ms, kind, id)``        "": delete the ``kind`` with this id then      store, save of a group, apply_chord; cleared by sweep
``("look", look_ms, group_id)``             "": look then whether the chord was abandoned  apply_chord, the last part, each look
==========================================  =============================================  ==================================================

Everything of one kind and id is deleted by clearing its key and the range behind it. ``place`` is a header task's index
in the chord, so the parts are read in the order of the header. What takes a key apart raises ``FormatError`` for one that
no version of ours can have written; the sweep and the looks clear such entries and go on.
"""

from __future__ import annotations

from typing import NamedTuple

from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.tuples import pack, pack_int, range_of, unpack_as

Range = tuple[bytes, bytes]

#: Of a header task that was given no place: behind all others.
LAST_PLACE = 2**63
KINDS = frozenset({"task", "group", "chord"})


class Part(NamedTuple):
    """One header task of a chord. Two of them may share a task id, if a frozen signature stands there twice."""

    group_id: str
    place: int
    task_id: str


class ResultKeys:
    """Makes the keys of one namespace."""

    def __init__(self, namespace: str) -> None:
        self.prefix = pack("celery-fdb", namespace, "result")

    def record(self, kind: str, id_: str) -> bytes:
        """``kind`` is "task", "group" or "chord"."""
        return self.prefix + pack(kind, id_)

    def task(self, task_id: str) -> bytes:
        return self.record("task", task_id)

    def group(self, group_id: str) -> bytes:
        return self.record("group", group_id)

    def chord(self, group_id: str) -> bytes:
        return self.record("chord", group_id)

    def body(self, group_id: str) -> bytes:
        return self.chord(group_id) + pack("body")

    def returned(self, group_id: str) -> bytes:
        return self.chord(group_id) + pack("returned")

    def join(self, group_id: str, task_id: str) -> bytes:
        return self.chord(group_id) + pack("join", task_id)

    def joins(self, group_id: str) -> bytes:
        return self.chord(group_id) + pack("joins")

    def parts(self, group_id: str) -> Range:
        return range_of(self.chord(group_id) + pack("part"))

    def part(self, part: Part) -> bytes:
        return self.chord(part.group_id) + pack("part", part.place, part.task_id)

    def split_part(self, group_id: str, key: bytes) -> tuple[int, str]:
        """Place and task id."""
        _tag, place, task_id = unpack_as(key[len(self.chord(group_id)) :], str, int, str)
        return place, task_id

    def expiry(self, expires_ms: int, kind: str, id_: str) -> bytes:
        return self.prefix + pack("expiry", expires_ms, kind, id_)

    def expired_until(self, now_ms: int) -> Range:
        prefix = self.prefix + pack("expiry")
        return prefix, prefix + pack_int(now_ms + 1)

    def split_expiry(self, key: bytes) -> tuple[int, str, str]:
        """Moment in milliseconds, kind, id."""
        _tag, expires_ms, kind, id_ = unpack_as(key[len(self.prefix) :], str, int, str, str)
        if kind not in KINDS:
            raise FormatError("unreadable key", key=key[:200])
        return expires_ms, kind, id_

    def look(self, look_ms: int, group_id: str) -> bytes:
        return self.prefix + pack("look", look_ms, group_id)

    def looks_until(self, now_ms: int) -> Range:
        prefix = self.prefix + pack("look")
        return prefix, prefix + pack_int(now_ms + 1)

    def split_look(self, key: bytes) -> str:
        """The group's id."""
        return str(unpack_as(key[len(self.prefix) :], str, int, str)[-1])

    @property
    def everything(self) -> Range:
        return range_of(self.prefix)
