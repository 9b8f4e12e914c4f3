"""Replay: bring dead letters back to the queue they died in, or discard them.

A message moves from a queue of dead letters to the end of its key's messages in the queue of its last death (or in the
one it is sent to), in one transaction (ONE-PLACE). It keeps its id, payload, key, priority and history of deaths; its
redeliveries count from zero again. A single letter may be given another payload on its way (:func:`replay_row`). What
it had before and no dead letter keeps is gone: its time to live is the queue's ``x-message-ttl``, from now on, if there
is one.

States of a letter: *dead*, then *back* or *gone*. Each part of a replay or a discard is one transaction, so a letter is
never both and never neither, and the counts are those of the letters moved. What happens at each failure:

* the caller dies between two parts: what was moved is moved, the rest is dead; the next call begins at the front.
* the commit's answer is lost: the transaction is found to have happened or is done again (``store/retry.py``).
* another consumer or operator takes, replays or discards the same letter: one of the two has it, the other starts its
  part again.
* the queue it should come back to has been deleted: ``QueueNotFound``, and nothing of the part was moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kombu_fdb.engine.dead_letters.scan import Letter, Walk, look_through
from kombu_fdb.engine.inspection import inspect
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX, drop_expired
from kombu_fdb.engine.messages.message import (
    Message,
    delete,
    forget,
    put_ready,
    subqueue,
    take_out,
    with_payload,
)
from kombu_fdb.engine.messages.publish import expires_at
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import QueueError, QueueNotFound
from kombu_fdb.keyspace.codec import Record, decode_record
from kombu_fdb.keyspace.layout import priority_of
from kombu_fdb.model import NO_PRIORITY, Way
from kombu_fdb.store.protocol import KeyValue


class Moved(NamedTuple):
    """How many letters one part replayed or discarded, and the cursor to go on with; b"" at the end.

    A letter that had outlived its time is gone instead of back, and not counted.
    """

    moved: int
    cursor: bytes


def replay_part(work: Work, walk: Walk, cursor: bytes, limit: int, *, to: str | None) -> Moved:
    """Up to ``limit`` letters of one part of a walk. Raises ``QueueNotFound``.

    Left where they are: unreadable bytes, a newer version's too, and messages that never died, unless ``to`` says where
    they should go.
    """
    part = look_through(work, walk, cursor, limit)
    destinations = [(letter, _destination(walk.dead, letter.record, to)) for letter in part.letters]
    going = [(letter, queue) for letter, queue in destinations if letter.record is not None and queue is not None]
    for queue in {queue for _, queue in going}:
        _require(work, queue, walk.dead)
    _take(work, walk.dead, [letter for letter, _ in going])
    back = [_replay(work, walk.dead, queue, letter) for letter, queue in going]
    return Moved(sum(back), part.cursor)


def replay_row(work: Work, dead: str, row: KeyValue, *, payload: bytes | None = None) -> str:
    """Bring the letter of this row back, as :func:`replay_part` does. Returns its queue.

    ``payload``: another than it had, stored in the transaction that takes it out. Raises ``QueueNotFound``, and
    ``QueueError`` for a message that never died or has outlived its time.
    """
    letter = Letter(*row, decode_record(row[1]))
    queue = _destination(dead, letter.record, None)
    if queue is None:
        raise QueueError("not a dead letter", queue=dead)
    _require(work, queue, dead)
    _take(work, dead, [letter])
    if not _replay(work, dead, queue, letter, payload):
        raise QueueError("the dead letter has expired", queue=dead)
    return queue


def discard_part(work: Work, walk: Walk, cursor: bytes, limit: int) -> Moved:
    """Delete up to ``limit`` letters of one part of a walk."""
    part = look_through(work, walk, cursor, limit)
    _take(work, walk.dead, part.letters)
    for letter in part.letters:
        delete(work, Message(walk.dead, letter.key, letter.value))
    return Moved(len(part.letters), part.cursor)


def _destination(dead: str, record: Record | None, to: str | None) -> str | None:
    """Where a letter goes; None if it stays."""
    if record is None or to is not None:
        return to
    if record.deaths:
        return record.deaths[0].queue
    return dead.removesuffix(DEAD_SUFFIX) if dead.endswith(DEAD_SUFFIX) else None


def _require(work: Work, queue: str, dead: str) -> None:
    if not inspect.exists(work, queue):
        raise QueueNotFound(
            "the queue to replay to does not exist",
            queue=queue,
            dead_queue=dead,
            fix="Declare it, or replay to another queue with to=. The dead letters stay where they are.",
        )


def _take(work: Work, dead: str, letters: Sequence[Letter]) -> None:
    take_out(work, dead, [(letter.key, letter.value) for letter in letters])


def _replay(work: Work, dead: str, queue: str, letter: Letter, payload: bytes | None = None) -> bool:
    message, record = Message(dead, letter.key, letter.value), letter.record
    assert record is not None
    if record.expires_ms and record.expires_ms <= work.now_ms:
        drop_expired(work, message, record)
        return False
    forget(work, message)
    priority = record.priority or priority_of(letter.key)
    to = subqueue(work, queue, record.key, priority)
    expires_ms = expires_at(work.now_ms, work.routing.queue(work.tr, queue).message_ttl_ms, 0)
    if payload is not None:
        record = with_payload(work, record, payload)
    kept = NO_PRIORITY if to.rank == work.keys.rank(priority) else priority
    alive = record._replace(expires_ms=expires_ms, redeliveries=0, seen=False, priority=kept, way=Way("", queue))
    put_ready(work, to, alive)
    return True
