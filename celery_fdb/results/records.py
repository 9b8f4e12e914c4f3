"""Records of results: their bytes, and the index by which they expire.

What expires: an index by moment, in step with the records.

A transaction that writes a record that expires writes its entry in the same transaction, and clears the entry of the
record it replaces: an entry in the index is never wrong, so the sweep (``store.py``) need not look at the record. It
reads the entries serializably, so a record that is stored anew at the same time is not lost: one of the two runs again.

Moments are by the wall clock of who stores. They are compared with that of who sweeps or, if it is behind, with that of
most workers at the same store: one whose clock is ahead deletes no results.

The values: a record of a fixed head, the state's name and the encoded result; a large result in chunks of its own.

The head says what every write has to know (state, moment of expiry, number of chunks), so that no write decodes what
it replaces. Behind the head stands the versionstamp of the commit: no two versions of a record are equal, which is what
a watch goes by.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from celery_fdb.results.layout import ResultKeys
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.tuples import pack_int, range_of
from kombu_fdb.store.protocol import KeyValue, Transaction

# -- expiry ------------------------------------------------------------------------------------------------------------


def move_expiry(tr: Transaction, keys: ResultKeys, kind: str, id_: str, before_ms: int, after_ms: int) -> None:
    """It expired at ``before_ms`` and now does at ``after_ms``; 0 for never."""
    if before_ms and before_ms != after_ms:
        tr.clear(keys.expiry(before_ms, kind, id_))
    if after_ms and before_ms != after_ms:
        tr.set(keys.expiry(after_ms, kind, id_), b"")


def delete_record(tr: Transaction, keys: ResultKeys, kind: str, id_: str, value: bytes | None) -> None:
    """The record, which was read as ``value``, with its entry."""
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


class Record(NamedTuple):
    """``expires_ms`` is 0 for never. ``payload`` is empty as long as it stands in ``chunks``."""

    state: str
    payload: bytes
    expires_ms: int
    chunks: int
    size: int
    stamp: bytes


def write(tr: Transaction, key: bytes, state: str, payload: bytes, *, expires_ms: int, ring: bool = False) -> None:
    """Set a record that is not there, or was cleared. ``ring``: wake those who watch it."""
    pieces = [] if len(payload) <= INLINE_BYTES else _pieces(payload)
    name = state.encode()
    head = _HEAD.pack(RECORD_VERSION, len(pieces), len(name), expires_ms, len(payload))
    tail = name + (b"" if pieces else payload)
    if ring:
        tr.set_versionstamped_value(key, prefix=head, suffix=tail)
    else:
        tr.set(key, head + bytes(_STAMP_BYTES) + tail)
    for number, piece in enumerate(pieces):
        tr.set(key + pack_int(number), piece)


def _pieces(payload: bytes) -> list[bytes]:
    return [payload[start : start + INLINE_BYTES] for start in range(0, len(payload), INLINE_BYTES)]


def decode(value: bytes) -> Record:
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
        return Record(state.decode(), payload, expires_ms, chunks, size, value[_HEAD.size : begin])
    except UnicodeDecodeError as error:
        raise FormatError("unreadable result", state=state[:80]) from error


def readable(value: bytes) -> Record | None:
    """None for bytes that can't be read: they are replaced or deleted all the same."""
    try:
        return decode(value)
    except FormatError:
        return None


def read(tr: Transaction, key: bytes) -> Record | None:
    """The record with its whole payload."""
    value = tr.get(key)
    if value is None:
        return None
    record = decode(value)
    return join(record, tr.get_range(*range_of(key), limit=record.chunks)) if record.chunks else record


def join(record: Record, rows: list[KeyValue]) -> Record:
    """A record with its chunks."""
    payload = b"".join([piece for _, piece in rows])
    if len(rows) != record.chunks or len(payload) != record.size:
        raise FormatError("a large result is incomplete", chunks=record.chunks, found=len(rows), size=record.size)
    return record._replace(payload=payload)


def prolong(tr: Transaction, key: bytes, expires_ms: int) -> int:
    """Let a record expire at another moment. Returns that of before; 0 if it never expires, or there is none."""
    value = tr.get(key)
    if value is None or len(value) < _HEAD.size:
        return 0
    version, chunks, name, before_ms, size = _HEAD.unpack_from(value)
    if version == RECORD_VERSION and before_ms:
        tr.set(key, _HEAD.pack(version, chunks, name, expires_ms, size) + value[_HEAD.size :])
        return int(before_ms)
    return 0


def clear(tr: Transaction, key: bytes) -> None:
    """The record and all that stands behind it."""
    tr.clear(key)
    tr.clear_range(*range_of(key))
