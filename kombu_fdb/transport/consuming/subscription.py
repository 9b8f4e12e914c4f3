"""A consumer of a queue, and a message on its way to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from kombu_fdb.model import Delivery, SessionId
from kombu_fdb.transport.holding.settling import Settling
from kombu_fdb.transport.holding.unacked import Credit

_numbers = count(1)


#: A delivery tag: rising, unique in the process.
next_tag: Callable[[], int] = partial(next, count(1))


@dataclass(eq=False, slots=True)
class Subscription:
    """One consumer of one queue."""

    #: The caller's, which is its name in its channel only.
    consumer_tag: str
    queue: str
    #: Of its channel, as are the next two.
    credit: Credit[Subscription]
    settler: Settling
    #: Makes the message of a delivery, tag and consumer tag; None if it can't be one.
    open: Callable[[Delivery, int, str], Any]
    no_ack: bool
    callback: Callable[[Any], Any]
    #: Called by a drain when the queue was deleted.
    on_cancel: Callable[[Subscription], Any]
    #: The queue vanishes with its consumers.
    transient: bool
    #: The queue serves one consumer at a time.
    single: bool = False
    #: The session in whose name the store knows of this consumer.
    session_id: SessionId | None = None
    #: Its name in the store: no two of a process, and so of a session, are the same.
    tag: str = field(init=False)
    #: Whether claiming takes messages out of the store: without acks, from a queue that vanishes anyway. Others are
    #: claimed under a lease even without acks, and settled when they are handed out: what was claimed ahead is not lost
    #: with the consumer.
    leaseless: bool = field(init=False)

    def __post_init__(self) -> None:
        self.tag = f"{next(_numbers)}-{self.consumer_tag}"
        self.leaseless = self.no_ack and self.transient


class Arrival(NamedTuple):
    """A message for a worker loop."""

    subscription: Subscription
    delivery: Delivery
    tag: int
