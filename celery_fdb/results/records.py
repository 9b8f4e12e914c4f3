"""Records of results: their keys and bytes, and the index by which they expire.

Keys: every key of the result backend, in one table. ``docs/results.md`` has its version for users.

All keys are tuples (``kombu_fdb/keyspace/layout.py``) behind ``("celery-fdb", namespace, "result")``, so results share
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
``("chord", group_id, "large", id)``        "": its result is in the record of the task     a large part's first return
``("expiry", expires_ms, kind, id)``        "": delete the ``kind`` with this id then      store, save of a group, apply_chord; cleared by sweep
``("look", look_ms, group_id)``             "": look then whether the chord was abandoned  apply_chord, the last part, each look
==========================================  =============================================  ==================================================

Everything of one kind and id is deleted by clearing its key and the range behind it. ``place`` is a header task's index
in the chord, so the parts are read in the order of the header. Code that takes a key apart raises ``FormatError`` for
one that no version of ours can have written; the sweep and the looks clear such entries and go on.

Expiry: an index by moment, in step with the records.

A transaction that writes a record that expires writes its entry in the same transaction, and clears the entry of the
record it replaces: an entry in the index is never wrong, so the sweep (``store.py``) need not look at the record. It
reads the entries serializably, so a record that is stored anew at the same time is not lost: one of the two runs again.

Moments go by the wall clock of the process that stores. The sweeper compares them with its own clock or with that of
most workers at the same store, whichever is behind: a worker whose clock is ahead deletes no results.

Values: a record is a fixed head, the state's name and the encoded result; a large result in chunks of its own.

The head says what every write has to know (state, moment of expiry, number of chunks), so that no write decodes what
it replaces. Behind the head stands the versionstamp of the commit: no two versions of a record are equal, which is what
a watch goes by.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.layout import pack, pack_int, range_of, unpack_as
from kombu_fdb.store.protocol import KeyValue, Transaction

# -- keys --------------------------------------------------------------------------------------------------------------


Range = tuple[bytes, bytes]

#: The place of a header task that was given none. It is behind all others.
LAST_PLACE = 2**63
KINDS = frozenset({"task", "group", "chord"})


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

    def large(self, group_id: str, task_id: str) -> bytes:
        return self.chord(group_id) + pack("large", task_id)

    def larges(self, group_id: str) -> Range:
        return range_of(self.chord(group_id) + pack("large"))

    def parts(self, group_id: str) -> Range:
        return range_of(self.chord(group_id) + pack("part"))

    def part(self, group_id: str, place: int, task_id: str) -> bytes:
        return self.chord(group_id) + pack("part", place, task_id)

    def split_part(self, group_id: str, key: bytes) -> tuple[int, str]:
        """The place and the task id of a part."""
        _tag, place, task_id = unpack_as(key[len(self.chord(group_id)) :], str, int, str)
        return place, task_id

    def split_large(self, group_id: str, key: bytes) -> str:
        """The task id of a large part."""
        return str(unpack_as(key[len(self.chord(group_id)) :], str, str)[-1])

    def expiry(self, expires_ms: int, kind: str, id_: str) -> bytes:
        return self.prefix + pack("expiry", expires_ms, kind, id_)

    def expired_until(self, now_ms: int) -> Range:
        prefix = self.prefix + pack("expiry")
        return prefix, prefix + pack_int(now_ms + 1)

    def split_expiry(self, key: bytes) -> tuple[int, str, str]:
        """The moment in milliseconds, the kind and the id of an entry."""
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
        """The group's id of an entry."""
        return str(unpack_as(key[len(self.prefix) :], str, int, str)[-1])


# -- expiry ------------------------------------------------------------------------------------------------------------


def move_expiry(tr: Transaction, keys: ResultKeys, kind: str, id_: str, before_ms: int, after_ms: int) -> None:
    """Move the entry of what expired at ``before_ms`` and now expires at ``after_ms``; 0 for never."""
    if before_ms and before_ms != after_ms:
        tr.clear(keys.expiry(before_ms, kind, id_))
    if after_ms and before_ms != after_ms:
        tr.set(keys.expiry(after_ms, kind, id_), b"")


def delete_record(tr: Transaction, keys: ResultKeys, kind: str, id_: str, value: bytes | None) -> None:
    """Delete the record, which was read as ``value``, and its entry."""
    if value is None:
        return
    old = readable(value)
    move_expiry(tr, keys, kind, id_, old.expires_ms if old else 0, 0)
    clear(tr, keys.record(kind, id_))


# -- values ------------------------------------------------------------------------------------------------------------


#: Up to this size a result stands in its record, above it in chunks of this size. FoundationDB's limit is 100,000 B.
INLINE_BYTES = 90_000

RECORD_VERSION = 1
#: version, chunks, length of the state, expires_ms, size
_HEAD = struct.Struct(">BHHQI")
_STAMP_BYTES = 10


class StoredResult(NamedTuple):
    """``expires_ms`` is 0 for never. ``payload`` is empty as long as it stands in ``chunks``."""

    state: str
    payload: bytes
    expires_ms: int
    chunks: int
    size: int
    stamp: bytes


def write(tr: Transaction, key: bytes, state: str, payload: bytes, *, expires_ms: int, ring: bool = False) -> None:
    """Set a record that is not there, or was cleared. ``ring``: wake those who watch it."""
    starts = range(0, len(payload), INLINE_BYTES) if len(payload) > INLINE_BYTES else ()
    pieces = [payload[start : start + INLINE_BYTES] for start in starts]
    name = state.encode()
    head = _HEAD.pack(RECORD_VERSION, len(pieces), len(name), expires_ms, len(payload))
    tail = name + (b"" if pieces else payload)
    if ring:
        tr.set_versionstamped_value(key, prefix=head, suffix=tail)
    else:
        tr.set(key, head + bytes(_STAMP_BYTES) + tail)
    for number, piece in enumerate(pieces):
        tr.set(key + pack_int(number), piece)


def decode(value: bytes) -> StoredResult:
    """Raises ``FormatError``."""
    try:
        version, chunks, name, expires_ms, size = _HEAD.unpack_from(value)
    except struct.error as error:
        raise FormatError("unreadable result", length=len(value)) from error
    begin = _HEAD.size + _STAMP_BYTES
    state, payload = value[begin : begin + name], value[begin + name :]
    if version != RECORD_VERSION or len(payload) != (0 if chunks else size):
        raise FormatError("unreadable result", version=version, length=len(value))
    try:
        return StoredResult(state.decode(), payload, expires_ms, chunks, size, value[_HEAD.size : begin])
    except UnicodeDecodeError as error:
        raise FormatError("unreadable result", state=state[:80]) from error


def readable(value: bytes) -> StoredResult | None:
    """The record; None for bytes that can't be read, which are replaced or deleted all the same."""
    try:
        return decode(value)
    except FormatError:
        return None


def read(tr: Transaction, key: bytes) -> StoredResult | None:
    """The record with its whole payload."""
    value = tr.get(key)
    if value is None:
        return None
    record = decode(value)
    return join(record, tr.get_range(*range_of(key), limit=record.chunks)) if record.chunks else record


def join(record: StoredResult, rows: list[KeyValue]) -> StoredResult:
    """A record with its chunks."""
    payload = b"".join([piece for _, piece in rows])
    if len(rows) != record.chunks or len(payload) != record.size:
        raise FormatError("a large result is incomplete", chunks=record.chunks, found=len(rows), size=record.size)
    return record._replace(payload=payload)


def prolong(tr: Transaction, keys: ResultKeys, kind: str, id_: str, value: bytes, expires_ms: int) -> None:
    """Let a record that expires, and was read as ``value``, expire at this moment or later."""
    if len(value) < _HEAD.size:
        return
    version, chunks, name, before_ms, size = _HEAD.unpack_from(value)
    if version == RECORD_VERSION and 0 < before_ms < expires_ms:
        tr.set(keys.record(kind, id_), _HEAD.pack(version, chunks, name, expires_ms, size) + value[_HEAD.size :])
        move_expiry(tr, keys, kind, id_, before_ms, expires_ms)


def clear(tr: Transaction, key: bytes) -> None:
    """Clear the record and all rows behind it."""
    tr.clear(key)
    tr.clear_range(*range_of(key))
