"""Replay: bring dead letters back to the queue they died in, or discard them.

A message moves from a queue of dead letters to the end of its key's messages in the queue of its last death (or in the
one it is sent to), in one transaction (ONE-PLACE). It keeps its id, payload, key, priority and history of deaths; its
redeliveries count from zero again. What it had before and no dead letter keeps is gone: its time to live is the
queue's ``x-message-ttl``, from now on, if there is one.

States of a letter: *dead*, then *back* or *gone*. Each part of a replay or a discard is one transaction, so a letter is
never both and never neither, and the counts are those of the letters moved. What happens at each failure:

* the caller dies between two parts: what was moved is moved, the rest is dead; the next call begins at the front.
* the commit's answer is lost: the transaction is found to have happened or is done again (``store/retry.py``).
* somebody else takes, replays or discards the same letter: one of the two has it, the other starts its part again.
* the queue it should come back to has been deleted: ``QueueNotFound``, and nothing of the part was moved.

A queue is there if it is declared or messages have come to it since it was deleted last: then its bell is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from kombu_fdb.engine.dead_letters.letters import Letter, Walk, look_through
from kombu_fdb.engine.messages.deadletter import DEAD_SUFFIX, Graves, drop, drop_expired
from kombu_fdb.engine.messages.publish import expires_at, store_ready
from kombu_fdb.engine.scheduling import turns
from kombu_fdb.engine.stored.tally import Tally
from kombu_fdb.engine.stored.whereabouts import forget
from kombu_fdb.errors import FormatError, QueueError, QueueNotFound
from kombu_fdb.keyspace.codec import Record, decode_record, encode_record, outline_of, size_of
from kombu_fdb.keyspace.layout import priority_of
from kombu_fdb.store.protocol import KeyValue, Transaction

__all__ = ["Moved", "discard_part", "replay_part", "replay_row"]


class Moved(NamedTuple):
    """How many letters one part replayed or discarded, and the cursor to go on with; b"" at the end.

    A letter that had outlived its time is gone instead of back, and not counted.
    """

    moved: int
    cursor: bytes


def replay_part(
    tr: Transaction,
    graves: Graves,
    tally: Tally,
    walk: Walk,
    cursor: bytes,
    limit: int,
    *,
    now_ms: int,
    to: str | None,
) -> Moved:
    """Up to ``limit`` letters of one part of a walk. Raises ``QueueNotFound``.

    Left where they are: unreadable bytes, a newer version's too, and messages that never died, unless ``to`` says where
    they should go.
    """
    part = look_through(tr, graves.keys, walk, cursor, limit)
    destinations = [(letter, _destination(walk.dead, letter.record, to)) for letter in part.letters]
    going = [(letter, queue) for letter, queue in destinations if letter.record is not None and queue is not None]
    for queue in {queue for _, queue in going}:
        _require(tr, graves, queue, walk.dead)
    _take(tr, graves, tally, walk.dead, [letter for letter, _ in going])
    back = [_bring_back(tr, graves, tally, walk.dead, queue, letter, now_ms=now_ms) for letter, queue in going]
    return Moved(sum(back), part.cursor)


def replay_row(tr: Transaction, graves: Graves, tally: Tally, dead: str, row: KeyValue, now_ms: int) -> str:
    """Bring the letter of this row back, as :func:`replay_part` does. Returns its queue.

    Raises ``QueueNotFound``, and ``QueueError`` for a message that never died or has outlived its time.
    """
    letter = Letter(*row, decode_record(row[1]))
    queue = _destination(dead, letter.record, None)
    if queue is None:
        raise QueueError("not a dead letter", queue=dead)
    _require(tr, graves, queue, dead)
    _take(tr, graves, tally, dead, [letter])
    if not _bring_back(tr, graves, tally, dead, queue, letter, now_ms=now_ms):
        raise QueueError("the dead letter has outlived its time", queue=dead)
    return queue


def discard_part(tr: Transaction, graves: Graves, tally: Tally, walk: Walk, cursor: bytes, limit: int) -> Moved:
    """Delete up to ``limit`` letters of one part of a walk."""
    part = look_through(tr, graves.keys, walk, cursor, limit)
    _take(tr, graves, tally, walk.dead, part.letters)
    for letter in part.letters:
        with suppress(FormatError):  # then there is nothing else of it
            drop(tr, graves.keys, outline_of(letter.value), letter.key)
    return Moved(len(part.letters), part.cursor)


def _destination(dead: str, record: Record | None, to: str | None) -> str | None:
    """Where a letter goes; None if it stays."""
    if record is None or to is not None:
        return to
    if record.deaths:
        return record.deaths[0].queue
    return dead.removesuffix(DEAD_SUFFIX) if dead.endswith(DEAD_SUFFIX) else None


def _require(tr: Transaction, graves: Graves, queue: str, dead: str) -> None:
    declared, bell = tr.get_many([graves.keys.queue(queue), graves.keys.bell(queue)], snapshot=True)
    if declared is None and bell is None:
        raise QueueNotFound(
            "the queue to replay to does not exist",
            queue=queue,
            dead_queue=dead,
            fix="Declare it, or replay to another queue with to=. The dead letters stay where they are.",
        )


def _take(tr: Transaction, graves: Graves, tally: Tally, dead: str, letters: Sequence[Letter]) -> None:
    """Out of the queue of dead letters. Conflicts with whoever takes the same ones."""
    for letter in letters:
        tr.add_read_conflict_key(letter.key)
        tr.clear(letter.key)
        tally.unready(dead, size_of(letter.value))
        if letter.key.startswith(graves.keys.keyed(dead)):
            tally.went(dead, graves.keys.key_at(dead, letter.key))
    turns.leave_places(tr, graves.keys, dead, [letter.key for letter in letters])  # before any is stored: it reads


def _bring_back(
    tr: Transaction, graves: Graves, tally: Tally, dead: str, queue: str, letter: Letter, *, now_ms: int
) -> bool:
    keys, record = graves.keys, letter.record
    assert record is not None
    if record.expires_ms and record.expires_ms <= now_ms:
        drop_expired(tr, graves, tally, dead, record, letter.value, now_ms, place=letter.key)
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
    forget(tr, keys, record.task_id, letter.key)
    rank = keys.rank(record.priority or priority_of(letter.key))
    store_ready(tr, keys, tally, queue, record.key, rank, value, task_id=record.task_id)
    return True
