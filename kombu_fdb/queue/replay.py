"""Replay: bring dead letters back to the queue they died in.

A message moves from ``<queue>.dead`` to the end of its key's messages in ``queue``, in one transaction (ONE-PLACE). It
keeps its id, payload, key and history of deaths; its redeliveries count from zero again. What it had before and no
dead letter keeps is gone: its priority is the lowest, and its time to live is the queue's ``x-message-ttl``, from now
on, if there is one.

A queue with a dead-letter exchange has no ``<queue>.dead``: where its dead letters are is the exchange's business.
"""

from __future__ import annotations

from kombu_fdb.errors import FormatError, QueueError
from kombu_fdb.keyspace.codec import Record, decode_record, encode_record
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.model import NO_PRIORITY
from kombu_fdb.queue.deadletter import DEAD_SUFFIX, Graves, drop
from kombu_fdb.queue.publish import expires_at, store_ready
from kombu_fdb.queue.tally import READY, Tally
from kombu_fdb.queue.whereabouts import forget
from kombu_fdb.store.protocol import KeyValue, Transaction

__all__ = ["MESSAGES_PER_TRANSACTION", "replay", "replay_row"]

MESSAGES_PER_TRANSACTION = 200


def replay(tr: Transaction, graves: Graves, tally: Tally, queue: str, limit: int, now_ms: int) -> tuple[int, int]:
    """Take up to ``limit`` of the oldest dead letters. Returns how many were taken, and how many of them are back.

    Those that have outlived their time in ``<queue>.dead`` are gone instead. Conflicts with a claim of the same ones.
    """
    dead = queue + DEAD_SUFFIX
    moved = 0
    rows = tr.get_range(*range_of(graves.keys.ready(dead)), limit=limit, snapshot=True)
    records = [(key, _readable(value)) for key, value in rows]
    readable = [(key, record) for key, record in records if record is not None]
    for key, record in readable:
        tr.add_read_conflict_key(key)
        tr.clear(key)
        moved += _bring_back(tr, graves, tally, queue, key, record, now_ms)
    tally.change(dead, READY, -len(readable))
    return len(readable), moved


def replay_row(tr: Transaction, graves: Graves, tally: Tally, dead: str, row: KeyValue, now_ms: int) -> str:
    """Bring one ready message of any queue of dead letters back to where it died last. Returns that queue.

    Raises ``QueueError`` for a message that never died, or has outlived its time.
    """
    key, value = row
    record = decode_record(value)
    if not record.deaths:
        raise QueueError("not a dead letter", queue=dead, message_id=record.message_id.hex())
    target = record.deaths[0].queue
    tr.clear(key)
    tally.change(dead, READY, -1)
    if record.key and key.startswith(graves.keys.keyed(dead)):
        tally.went(dead, record.key)
    if not _bring_back(tr, graves, tally, target, key, record, now_ms):
        raise QueueError("the dead letter has outlived its time", queue=dead, message_id=record.message_id.hex())
    return target


def _readable(value: bytes) -> Record | None:
    """Unreadable bytes stay where they are, for a person to look at."""
    try:
        return decode_record(value)
    except FormatError:
        return None


def _bring_back(
    tr: Transaction, graves: Graves, tally: Tally, queue: str, key: bytes, record: Record, now_ms: int
) -> bool:
    keys = graves.keys
    if record.expires_ms and record.expires_ms <= now_ms:
        drop(tr, keys, record, key)
        return False
    value = encode_record(
        record.message_id,
        record.payload,
        published_ms=record.published_ms,
        expires_ms=expires_at(now_ms, graves.routing.message_ttl_ms(tr, queue), 0),
        deaths=record.deaths,
        key=record.key,
        chunks=record.chunks,
        size=record.size,
        ttr_ms=record.ttr_ms,
        task_id=record.task_id,
    )
    forget(tr, keys, record.task_id, key)
    store_ready(tr, keys, tally, queue, record.key, keys.rank(NO_PRIORITY), value, task_id=record.task_id)
    return True
