"""One active consumer per queue: ``x-single-active-consumer``.

Model. A consumer is a tag inside a session. Of all consumers of such a queue at most one is *active*: the one that
``("single", queue)`` names. The others *stand by*. (https://www.rabbitmq.com/docs/consumers#single-active-consumer)

* vacant -> active: by the first claim, whether the queue is empty or not. Each claim reads the record serializably, so
  if two find it vacant, one of them conflicts, and then finds the other.
* active -> vacant: the consumer is cancelled or closed, or its session has ended and *everything* that the session held
  has been released. So the next consumer begins with the messages that the last one did not finish, in order. Setting
  the record wakes the consumers that stand by.

What happens at each failure. If the active process dies, the end of its session frees the record, within the session's
time to live and one sweep. If it was only frozen, it wakes up without a session, and its claims fail. If the sweeper
dies in between, the next one continues, as the session's beat is cleared only after the record is free
(``release.py``). If the consumer ends while one of its claims is under way, or has an unknown outcome, the claim's
messages are released before the record becomes free. No such claim commits afterwards (``process/client_session.py``).
If the consumer ends in a session that was fenced, that session's end frees the record. No clock is involved. Guarantee
ONE-ACTIVE.

A declaration may add or remove the argument while there are consumers. It vacates the record, and each claim reports
which of its queues have the argument. A claim that was planned on another assumption is given up before its commit, and
planned again, with or without the consumer's tag (``transport/consuming/dispatch.py``).

A claim without a consumer (``basic_get``) gets messages only while no consumer is active.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kombu_fdb.engine.work import Work
from kombu_fdb.model import SessionId
from kombu_fdb.store.protocol import KeyValue

#: The length of a session's id; a shorter record names no consumer.
SESSION_BYTES = 16


def admitted(work: Work, queues: Sequence[str], session_id: SessionId, consumers: Mapping[str, str]) -> set[str]:
    """The ``queues`` from which the session's ``consumers`` may claim now; in a vacant queue, they become active."""
    found = set()
    records = work.tr.get_many([work.keys.single(queue) for queue in queues]) if queues else []
    for queue, record in zip(queues, records, strict=True):
        tag = consumers.get(queue)
        if _is_vacant(record):
            found.add(queue)
            if tag is not None:
                work.tr.set(work.keys.single(queue), _record(session_id, tag))
        elif tag is not None and record == _record(session_id, tag):
            found.add(queue)
    return found


def standing_by(work: Work, queues: Sequence[str], session_id: SessionId, consumers: Mapping[str, str]) -> set[str]:
    """Those of ``queues`` on which another consumer is active."""
    records = work.tr.get_many([work.keys.single(queue) for queue in queues], snapshot=True) if queues else []
    return {
        queue
        for queue, record in zip(queues, records, strict=True)
        if not _is_vacant(record) and record != _record(session_id, consumers.get(queue, ""))
    }


def leave(work: Work, queue: str, session_id: SessionId, tag: str) -> None:
    """End the consumer; if it was the active one, the queue becomes vacant."""
    if work.tr.get(work.keys.single(queue)) == _record(session_id, tag):
        vacate(work, queue)


def leave_each(
    work: Work, session_id: SessionId, records: Sequence[KeyValue], tags: Collection[str] | None = None
) -> None:
    """:func:`leave` for these consumers of a session, or all; their queues' records may be read at snapshot."""
    for (queue,), record in work.keys.read(records, str):
        if record.startswith(session_id) and (tags is None or record[SESSION_BYTES:].decode(errors="replace") in tags):
            work.tr.add_read_conflict_key(work.keys.single(queue))
            vacate(work, queue)


def vacate(work: Work, queue: str) -> None:
    """Make no consumer active. The record is set instead of cleared, because it is also a bell."""
    work.tr.set_versionstamped_value(work.keys.single(queue))


def _is_vacant(record: bytes | None) -> bool:
    return record is None or len(record) < SESSION_BYTES


def _record(session_id: SessionId, tag: str) -> bytes:
    return session_id + tag.encode()
