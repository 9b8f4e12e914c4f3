"""Edit: delete, reschedule or cancel messages in their places, for people and programs.

Reschedule: a waiting message gets another due time, or none: then it is ready at once. It leaves its row and enters
another, behind the messages of its key and rank there, in one transaction (ONE-PLACE). It keeps id, key, priority,
expiry, redeliveries and history; a due time after its expiry is refused. Its payload may be replaced: a header in a
task's payload says when the task is due, and a worker would wait for that time. A delayed message counts as waiting
since its due time, so one that is made ready counts from now.

The message is *delayed* or *ready* before and afterwards, in the same queue; if anything fails, it has not moved. A
concurrent transaction that claims, promotes or deletes it conflicts: one of the two succeeds, and the other finds that
the message has moved. If the answer to the commit is lost, the retry finds that it committed, or runs again
(``store/retry.py``).

Cancel: delete a task's messages by its id, except those that a worker has. A leased message belongs to its consumer and
stays: only the worker can stop what it runs.
"""

from __future__ import annotations

from kombu_fdb.engine.inspection import browse
from kombu_fdb.engine.messages import message
from kombu_fdb.engine.messages.message import end_lease, forget, put_delayed, put_ready, take_out, with_payload
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import QueueError
from kombu_fdb.keyspace.codec import OVER_MS, Message, Record
from kombu_fdb.keyspace.layout import split_place
from kombu_fdb.model import Peeked, Rank, Spot, State
from kombu_fdb.store.protocol import KeyValue


def delete_at(work: Work, queue: str, state: State, position: bytes, message_id: bytes) -> bool:
    """Delete the message, with any lease on it, if it is still at its position; False if it has moved."""
    row = browse.row_at(work, queue, state, position, message_id)
    return row is not None and delete(work, queue, row)


def delete(work: Work, queue: str, row: KeyValue) -> bool:
    """Delete a message if its row is unchanged. False if it has moved."""
    if work.tr.get(row[0]) != row[1]:
        return False
    remove(work, queue, row)
    return True


def remove(work: Work, queue: str, row: KeyValue) -> None:
    """Delete a message that this transaction has read serializably."""
    key, value = row
    if browse.is_lease(work.keys, key):
        work.tr.clear(key)
        held = Message.of_lease(value)
        end_lease(work, queue, held.place)
        message.delete(work, held)
    else:
        take_out(work, queue, [row])
        message.delete(work, Message(queue, key, value))


def reschedule(work: Work, queue: str, spot: Spot, due_ms: int, payload: bytes | None = None) -> bool:
    """Reschedule the ready or delayed message at a page's position. False if it has moved.

    ``due_ms``: now or earlier makes it ready. ``payload``: None leaves it as it is. Raises ``QueueError`` for a due
    time after its expiry and for a leased message, and ``FormatError`` if the record can't be read, or is a newer
    version's.
    """
    if spot.state == "leased":
        raise QueueError("a worker holds this message", queue=queue, fix="Wait until it is back, or cancel it.")
    row = browse.row_at(work, queue, *spot)
    if row is None:
        return False
    key, value = row
    record = Record.decode(value)
    begins_when_due = record.expires_ms == OVER_MS and key.startswith(work.keys.delayed(queue))
    if record.has_expired(max(due_ms, work.now_ms)) and not begins_when_due:
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
        put_delayed(work, queue, rank, due_ms, record)
    else:
        put_ready(work, queue, record.key, rank, record._replace(published_ms=work.now_ms))
    return True


def _rank(work: Work, queue: str, key: bytes) -> Rank:
    if key.startswith(work.keys.delayed(queue)):
        return work.keys.split_delayed(queue, key)[1]
    return split_place(work.keys.place(queue, key))[1]


def cancel(work: Work, task_id: str, after: bytes) -> tuple[list[Peeked], bytes]:
    """Delete some of the task's ready, delayed and dead messages. Returns them, and where to continue.

    Serializable: a message that is moved or published concurrently makes the transaction start again.
    """
    wanted, following = browse.places(work, task_id, after)
    rows = browse.rows_at(work, wanted)
    found = [(work.keys.queue_of(row[0]), row) for row in rows if Record.known(row[1]).task_id == task_id]
    taken = browse.look_all(work, found)
    for each in found:
        remove(work, *each)
    return taken, following
