"""Watch: arm watches on the bells of empty queues, and find the queues that are not empty. One read-only transaction.

Probe and watch read the same version, so the probe sees a message, or the message changes the bell later. If a queue
has another active consumer, a change of that consumer is watched instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kombu_fdb.engine import session
from kombu_fdb.engine.messages import claim
from kombu_fdb.engine.scheduling import single
from kombu_fdb.engine.scheduling.window import QueueState
from kombu_fdb.engine.work import Work
from kombu_fdb.keyspace.layout import range_of, read_or
from kombu_fdb.model import NO_SESSION, SessionId
from kombu_fdb.store.protocol import KeyValue, Watch


def arm(
    work: Work, queues: Sequence[str], session_id: SessionId, consumers: Mapping[str, str]
) -> tuple[set[str], dict[str, Watch]]:
    """Returns the queues with something to claim, and a watch for each of the others, as :func:`arm_all` sets it."""
    hungry, others = _probe(work, queues, session_id, consumers)
    return hungry, {queue: _watch(work, queue, others) for queue in queues if queue not in hungry}


def arm_all(
    work: Work,
    queues: Sequence[str],
    session_id: SessionId = NO_SESSION,
    consumers: Mapping[str, str] | None = None,
) -> list[Watch] | None:
    """Watches that fire when a message becomes ready in one of ``queues``; None if one is ready now.

    For a queue whose active consumer is not among ``consumers``, it fires when that may have changed.
    """
    hungry, others = _probe(work, queues, session_id, consumers or {})
    return None if hungry else [_watch(work, queue, others) for queue in queues]


def glance(
    work: Work, session_id: SessionId, consumers: Sequence[tuple[str, str]], keys: Sequence[bytes]
) -> tuple[list[tuple[str, str]], dict[bytes, bytes | None]]:
    """An idle consumer's periodic look, in case a watch has missed a change. One round trip.

    Returns which of the session's ``consumers``, by queue and tag, have lost their queues, and the values of these
    keys: while none of them changes, there is nothing to do. Raises ``SessionLost``.
    """
    rows = [work.keys.consumer(queue, session_id, tag) for queue, tag in consumers]
    values, _ = session.require(work, session_id, and_read=[*rows, *keys])
    forgotten = [each for each, row in zip(consumers, values, strict=False) if row is None]
    return forgotten, dict(zip(keys, values[len(rows) :], strict=True))


def has_work(work: Work, queues: Sequence[str]) -> bool:
    """Whether a claim from these queues would find something."""
    hungry, _others = _probe(work, queues, NO_SESSION, {})
    return bool(hungry)


def _watch(work: Work, queue: str, others: set[str]) -> Watch:
    return work.tr.watch(work.keys.single(queue) if queue in others else work.keys.bell(queue))


def _probe(
    work: Work, queues: Sequence[str], session_id: SessionId, consumers: Mapping[str, str]
) -> tuple[set[str], set[str]]:
    """Returns the queues with something to claim, and those whose active consumer is another one."""
    keys = work.keys
    heads = work.tr.get_ranges([(*range_of(keys.ready(queue)), 1) for queue in queues], snapshot=True)
    marks = [key for queue in queues for key in (keys.fair(queue), keys.control(queue))]
    states = claim.states_of(queues, work.tr.get_many(marks, snapshot=True))
    others = single.standing_by(work, claim.single_active(states), session_id, consumers)
    open_ = {queue: head for queue, head in zip(queues, heads, strict=True) if queue not in others}
    return {queue for queue, head in open_.items() if _is_hungry(work, queue, states[queue], head)}, others


def _is_hungry(work: Work, queue: str, state: QueueState, head: list[KeyValue]) -> bool:
    if state.control.paused:
        return False
    if not state.fair:
        return bool(head)
    if work.tr.get_range(*work.keys.todo(queue), limit=1, snapshot=True):
        return True
    # Messages without a key wait, but none may be claimed: their sub-queue is parked.
    if not head:
        return False
    rank = read_or(None, work.keys.place_rank, queue, head[0][0])  # None: a claim dead-letters the message
    return rank is None or work.tr.get(work.keys.active(queue, "", rank), snapshot=True) is None
