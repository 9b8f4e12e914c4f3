"""Reschedule: a message that waits gets another moment at which it is due, or none: then it is ready at once.

It leaves its row and enters another in one transaction (ONE-PLACE), behind what has its key and rank there. It keeps
id, key, priority, end of life, redeliveries and history; a moment behind the end of its life is refused. The payload
may be another from then on: a task's says in a header when it is due, and a worker would wait for that.

A message that was delayed counts as waiting from the moment it was due, so one that is made ready waits from now on.

States: the message is *delayed* or *ready*, and is one of the two in its queue afterwards; if anything fails, it is
where it was. A transaction that takes, promotes or deletes it meanwhile conflicts with this: one of the two has it, and
the other finds that it has moved. If the answer to the commit is lost, it is found to have happened or is done again
(``store/retry.py``).
"""

from __future__ import annotations

from kombu_fdb.engine.inspection.pages import row_at
from kombu_fdb.engine.messages.message import Message, Subqueue, forget, put_delayed, put_ready, take_out, with_payload
from kombu_fdb.engine.stored.effects import LEASED
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import QueueError
from kombu_fdb.keyspace.codec import decode_record
from kombu_fdb.keyspace.layout import split_place
from kombu_fdb.model import Rank, Spot
from kombu_fdb.store.protocol import KeyValue


def reschedule(work: Work, queue: str, spot: Spot, due_ms: int, payload: bytes | None = None) -> bool:
    """The message at a page's position, ready or delayed. False if it has moved.

    ``due_ms``: now or earlier makes it ready. ``payload``: None for the one it has. Raises ``QueueError`` for a moment
    at which it has expired and for a message that a session holds, and ``FormatError`` if the record can't be read, or
    is a newer version's.
    """
    if spot.state == LEASED:
        raise QueueError("a worker holds this message", queue=queue, fix="Wait until it is back, or cancel it.")
    row = row_at(work, queue, *spot)
    if row is not None:
        _put(work, queue, row, due_ms, payload)
    return row is not None


def _put(work: Work, queue: str, row: KeyValue, due_ms: int, payload: bytes | None) -> None:
    key, value = row
    record = decode_record(value)
    if record.expires_ms and record.expires_ms <= max(due_ms, work.now_ms):
        raise QueueError(
            "the message expires before it is due",
            queue=queue,
            expires_ms=record.expires_ms,
            due_ms=due_ms,
            fix="Choose an earlier moment.",
        )
    rank = _rank(work, queue, key)
    take_out(work, queue, [row])
    forget(work, Message(queue, key, value))
    if payload is not None:
        record = with_payload(work, record, payload)
    if due_ms > work.now_ms:
        put_delayed(work, Subqueue(queue, "", rank), due_ms, record)
    else:
        put_ready(work, Subqueue(queue, record.key, rank), record._replace(published_ms=work.now_ms))


def _rank(work: Work, queue: str, key: bytes) -> Rank:
    if key.startswith(work.keys.delayed(queue)):
        return work.keys.split_delayed(queue, key)[1]
    return split_place(work.keys.place(queue, key))[1]
