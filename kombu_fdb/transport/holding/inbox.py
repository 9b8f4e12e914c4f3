"""What was claimed for a channel and not handed out yet, in order; each message is assigned to one consumer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from kombu_fdb.model import Delivery, Lease

__all__ = ["Assigned", "Inbox"]


class Assigned(Protocol):
    """A consumer, as the inbox sees it."""

    @property
    def leaseless(self) -> bool:
        """Whether its messages were taken out of the store when they were claimed."""


C = TypeVar("C", bound=Assigned)


class Inbox(Generic[C]):
    """Not thread-safe: ``Dispatch`` holds its lock. Moments are seconds of its clock."""

    def __init__(self) -> None:
        self._items: deque[tuple[C, Delivery]] = deque()
        #: When a message was last taken, or the first one came.
        self._touched = 0.0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[tuple[C, Delivery]]:
        return iter(self._items)

    @property
    def head(self) -> tuple[C, Delivery]:
        """Raises ``IndexError``."""
        return self._items[0]

    def put(self, consumer: C, delivery: Delivery, now: float) -> None:
        if not self._items:
            self._touched = now
        self._items.append((consumer, delivery))

    def return_undelivered(self, consumer: C, delivery: Delivery) -> None:
        """To the front, unless it is there: whoever took it may have been interrupted before it left."""
        if not self._items or self._items[0][1] is not delivery:
            self._items.appendleft((consumer, delivery))

    def take(self, now: float) -> None:
        """The head is handed out."""
        self._touched = now
        self._items.popleft()

    def withdraw(self, chosen: Callable[[C, Delivery], bool]) -> list[Lease]:
        """Remove what is chosen. Returns the leases; what was taken out of the store has none."""
        taken = [item for item in self._items if chosen(*item)]
        if taken:
            self._items = deque(item for item in self._items if not chosen(*item))
        return [delivery.lease for consumer, delivery in taken if not consumer.leaseless]

    def lies_since(self) -> float | None:
        """Since when nothing was taken; None if nothing is here that could go back."""
        return self._touched if any(not consumer.leaseless for consumer, _ in self._items) else None
