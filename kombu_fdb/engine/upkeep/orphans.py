"""Ghosts: what queues and exchanges that are gone have left behind.

A queue's deletion clears all it has. But its messages may still be held: what ends there later rings the bell of a
queue that is no more. An exchange's deletion leaves its epoch, by which the caches of other processes notice. A process
that sees such a row unchanged for long enough clears it, in a transaction that conflicts with every use of the name
again.
"""

from __future__ import annotations

from kombu_fdb.engine.stored.work import Work
from kombu_fdb.engine.topology import control
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.routing.tables import PREDECLARED


def clear_queue(work: Work, queue: str, bell: bytes) -> bool:
    """Clear what an undeclared queue has left, if its bell is still what was observed.

    Not if it has messages, or an operator has said how it is to be worked on. A publish to it sets the bell.
    """
    if work.tr.get_many([work.keys.bell(queue), work.keys.queue(queue), work.keys.control(queue)]) != [
        bell,
        None,
        None,
    ]:
        return False
    ranges = [
        work.keys.counts(queue),
        work.keys.all_limits(queue),
        range_of(work.keys.ready(queue)),
        range_of(work.keys.delayed(queue)),
    ]
    if any(work.tr.get_ranges([(*each, 1) for each in ranges])):
        return False
    return control.delete_queue(work, queue, if_unused=True, if_empty=True) is not None


def clear_exchange(work: Work, exchange: str, epoch: bytes) -> bool:
    """Clear the epoch of an exchange that is gone, if it is still what was observed.

    A cache from before the deletion has another epoch, and one from after it knows no binding: neither is wrong then.
    """
    if exchange in PREDECLARED or work.tr.get_many([work.keys.epoch(exchange), work.keys.exchange(exchange)]) != [
        epoch,
        None,
    ]:
        return False
    if work.tr.get_range(*work.keys.bindings(exchange), limit=1):
        return False
    work.tr.clear(work.keys.epoch(exchange))
    return True
