"""Join: wait in the line of those who consume the same queues, and settle what was done meanwhile.

Conflicts with what ends the session, with who settles the same leases, and with a change of the queues' limits
(``allowance.py``); with no other join, and with no service.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kombu_fdb.engine.messages import settle
from kombu_fdb.engine.messages.claim import FEW_QUEUES
from kombu_fdb.engine.scheduling import line
from kombu_fdb.engine.scheduling.allowance import control_keys, note_unlimited
from kombu_fdb.engine.stored import session
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.keyspace.codec import control_of
from kombu_fdb.model import Demand, Lease


def join(work: Work, demand: Demand, acks: Sequence[Lease], queues: Sequence[str], over: Collection[int]) -> None:
    """``queues``: of the line; those of many are not looked at. ``over``: as in :func:`.line.join`.

    Raises ``SessionLost``.
    """
    leases = settle.lease_rows(work, acks)
    few = queues if acks and len(queues) <= FEW_QUEUES else ()
    keys = [*leases.keys, *control_keys(work, few)]
    values, runs = session.require(work, demand.session, and_read=keys, ranges=leases.ranges)
    note_unlimited(work, zip(few, map(control_of, values[len(leases.keys) :]), strict=True))
    if acks:
        settle.ack(work, acks, leases.found(values[: len(leases.keys)], runs))
    line.join(work, demand, over)
