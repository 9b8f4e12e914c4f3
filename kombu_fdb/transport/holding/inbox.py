"""What was claimed for a channel and not handed out yet, in order; each message is assigned to one consumer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from kombu_fdb.model import Delivery, Lease


class Assigned(Protocol):
    """A consumer, as the inbox sees it."""

    @property
    def no_ack(self) -> bool:
        """Whether it settles nothing."""


C = TypeVar("C", bound=Assigned)


class Inbox(Generic[C]):
    """Not thread-safe: ``Dispatch`` holds its lock. Moments are seconds of its clock."""

    def __init__(self) -> None:
        self._items: deque[tuple[C, Delivery]] = deque()
        #: Whether it ever had one for a consumer without acks.
        self.is_mixed = False
        #: When a message was last taken, or the first one came.
        self._touched = 0.0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[tuple[C, Delivery]]:
        return iter(self._items)

    @property
    def with_acks(self) -> int:
        """How many of them are to be settled. Counted, not kept: a counter would not survive an interruption."""
        return sum(not consumer.no_ack for consumer, _ in self._items) if self.is_mixed else len(self._items)

    @property
    def head(self) -> tuple[C, Delivery]:
        """Raises ``IndexError``."""
        return self._items[0]

    def put(self, consumer: C, delivery: Delivery, now: float) -> None:
        if not self._items:
            self._touched = now
        self.is_mixed = self.is_mixed or consumer.no_ack
        self._items.append((consumer, delivery))

    def bring_forward(self) -> bool:
        """The first one for a consumer without acks becomes the head. Whether there is one."""
        items = list(self._items) if self.is_mixed else []
        first = next((item for item in items if item[0].no_ack), None)
        if first is not None:
            self._items = deque([first, *(item for item in items if item is not first)])
        return first is not None

    def return_undelivered(self, consumer: C, delivery: Delivery) -> None:
        """To the front, unless it is there: the thread that took it may have been interrupted before it left."""
        if not self._items or self._items[0][1] is not delivery:
            self._items.appendleft((consumer, delivery))

    def take(self, now: float) -> None:
        """The head is handed out."""
        self._touched = now
        self._items.popleft()

    def withdraw(self, chosen: Callable[[C, Delivery], bool], leaving: set[Lease] | None = None) -> list[Lease]:
        """Remove what is chosen. Returns the leases; what was taken out of the store has none.

        ``leaving``: they are put into it before they are removed.
        """
        taken = [item for item in self._items if chosen(*item)]
        if taken:
            if leaving is not None:
                leaving.update([delivery.lease for _, delivery in taken if delivery.leased])
            self._items = deque(item for item in self._items if not chosen(*item))
        return [delivery.lease for _, delivery in taken if delivery.leased]

    def lies_since(self) -> float | None:
        """Since when nothing was taken; None if nothing is here that could go back."""
        return self._touched if any(delivery.leased for _, delivery in self._items) else None
