"""Copies: further copies of a large payload's chunks, for a message that is dead-lettered to several queues.

The chunks of a payload belong to one message id, so each further queue that a dead letter reaches gets chunks of its
own. A few are copied by the burial itself. More than :data:`COPIED_BYTES` would not fit into its transaction: they are
copied in advance, in parts, while the message stays where it is; the burial then only writes records. So a burial of
any size fits.

A message from outside may become a dead letter directly: a full queue refuses it, or its task has failed after it was
acknowledged. Its payload is not stored, so its copies are written from the caller's payload, and it has no place until
the burial commits: all its dead letters appear, or none. Its id must be the same in each run of the burial.

Model. ``("copy", message_id, target)`` holds the id of the copy and how many chunks of it are there.

* none -> *copying*: a burial that finds no complete copy raises :exc:`CopiesMissing` and changes nothing; its process
  makes the copy (``Transactions.write``) and runs the burial again.
* copying -> *complete*: each part reads the row serializably and increases its number. Two processes that copy the same
  message conflict there, and so share the work. If the source is acknowledged during the copying, the copy ends
  complete but too short: if that message comes again, its copy is restarted.
* complete -> gone: the burial clears the row in the transaction that stores the copy's record.

If the copier dies, the next process that tries to bury the message continues. If none does, because the message was
acknowledged or came from outside, the duties clear the row and the chunks after a while; a concurrent burial conflicts
with that.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kombu_fdb.engine.work import Work
from kombu_fdb.keyspace.codec import Record, chunks_of
from kombu_fdb.store.protocol import KeyValue

#: How much a burial copies by itself, for all further queues together.
COPIED_BYTES = 1_000_000
CHUNKS_PER_TRANSACTION = 16

_HEAD = struct.Struct(">16sIB")


class CopiesMissing(Exception):
    """Not an error: the chunks of the message have to be copied for ``targets`` before it can be buried.

    ``payload``: that of a message from outside; b"" for a stored one.
    """

    def __init__(self, message_id: bytes, targets: Sequence[str], payload: bytes = b"", chunks: int = 0) -> None:
        super().__init__(message_id, targets)
        self.message_id = message_id
        self.targets = targets
        self.payload = payload
        #: How many chunks the message has; 0 for as many as there are.
        self.chunks = chunks


def take(work: Work, record: Record, targets: Sequence[str], payload: bytes) -> list[bytes]:
    """Hand over the complete copies for these queues. Returns their ids. Raises ``CopiesMissing``.

    ``payload``: that of a message from outside, else b"".
    """
    rows = [work.keys.copy(record.message_id, target) for target in targets]
    heads = [_decode(value) for value in work.tr.get_many(rows)]
    missing = [
        target
        for target, head in zip(targets, heads, strict=True)
        if not head[2] or _is_stale(work, record, head[1], payload)
    ]
    if missing:
        raise CopiesMissing(record.message_id, missing, payload, record.chunks)
    for row in rows:
        work.tr.clear(row)
    return [copy_id for copy_id, _chunks, _complete in heads]


def _is_stale(work: Work, record: Record, chunks: int, payload: bytes) -> bool:
    """Whether a complete copy is shorter than its message, because its source was acknowledged too early.

    If the message itself has lost chunks, a short copy is the best possible.
    """
    if chunks >= record.chunks:
        return False
    return bool(payload) or work.tr.get(work.keys.body(record.message_id, chunks)) is not None


def copy_part(work: Work, missing: CopiesMissing, target: str, new_id: bytes, most: int) -> bool:
    """Copy up to ``most`` more chunks. Returns whether the copy is complete. ``new_id``: for a new copy."""
    row = work.keys.copy(missing.message_id, target)
    copy_id, begun, complete = _decode(work.tr.get(row))
    if complete and begun >= missing.chunks:
        return True
    if complete:  # too short: copied again
        work.tr.clear_range(*work.keys.bodies(copy_id))
        begun = 0
    copy_id = copy_id if begun else new_id
    if missing.payload:
        chunks = list(enumerate(chunks_of(missing.payload)))[begun : begun + most]
    else:
        chunks = _stored(work, missing.message_id, begun, most)
    work.tr.fill(moving=True)
    for number, chunk in chunks:
        work.tr.set(work.keys.body(copy_id, number), chunk)
        begun = number + 1
    complete = len(chunks) < most
    work.tr.set(row, _HEAD.pack(copy_id, begun, complete))
    return complete


def _stored(work: Work, message_id: bytes, first: int, most: int) -> list[tuple[int, bytes]]:
    _begin, end = work.keys.bodies(message_id)
    rows = work.tr.get_range(work.keys.body(message_id, first), end, limit=most, snapshot=True)
    return [(work.keys.chunk_of(key), chunk) for key, chunk in rows]


def clear_abandoned(work: Work, row: KeyValue) -> bool:
    """Clear a copy that no burial has taken, if its row is unchanged since it was observed."""
    key, value = row
    if work.tr.get(key) != value:
        return False
    work.tr.clear(key)
    work.tr.clear_range(*work.keys.bodies(_decode(value)[0]))
    return True


def _decode(value: bytes | None) -> tuple[bytes, int, bool]:
    """Id, number of chunks, and whether these are all; an empty copy for unreadable bytes."""
    if value is None or len(value) != _HEAD.size:
        return b"", 0, False
    copy_id, chunks, complete = _HEAD.unpack(value)
    return copy_id, chunks, bool(complete)
