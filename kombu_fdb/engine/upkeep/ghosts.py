"""Ghosts: what queues and exchanges that are gone have left behind.

A queue's deletion clears all it has. But its messages may still be held: what ends there later rings the bell of a
queue that is no more. An exchange's deletion leaves its epoch, by which the caches of other processes notice. A process
that sees such a row unchanged for long enough clears it, in a transaction that conflicts with whoever uses the name
again.
"""

from __future__ import annotations

from kombu_fdb.engine.topology import control
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.routing.tables import PREDECLARED
from kombu_fdb.store.protocol import Transaction

__all__ = ["clear_exchange", "clear_queue"]


def clear_queue(tr: Transaction, keys: Keyspace, queue: str, bell: bytes) -> bool:
    """Clear what an undeclared queue has left, if its bell is still what was observed.

    Not if it has messages, or somebody has said how it is to be worked on. Whoever publishes to it sets the bell.
    """
    if tr.get_many([keys.bell(queue), keys.queue(queue), keys.control(queue)]) != [bell, None, None]:
        return False
    ranges = [keys.counts(queue), keys.all_limits(queue), range_of(keys.ready(queue)), range_of(keys.delayed(queue))]
    if any(tr.get_ranges([(*each, 1) for each in ranges])):
        return False
    return control.delete_queue(tr, keys, queue, if_unused=True, if_empty=True)


def clear_exchange(tr: Transaction, keys: Keyspace, exchange: str, epoch: bytes) -> bool:
    """Clear the epoch of an exchange that is gone, if it is still what was observed.

    A cache from before the deletion has another epoch, and one from after it knows no binding: neither is wrong then.
    """
    if exchange in PREDECLARED or tr.get_many([keys.epoch(exchange), keys.exchange(exchange)]) != [epoch, None]:
        return False
    if tr.get_range(*keys.bindings(exchange), limit=1):
        return False
    tr.clear(keys.epoch(exchange))
    return True
