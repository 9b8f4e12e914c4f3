"""What one channel has handed out and not settled. No thread, no store: only the table.

Model. A delivery is *held* under the tag it was handed out with, from just before its callback until it is settled. It
is *late* when its time to run has passed: the message went back in the consumer's stead, but its entry stays until the
consumer settles it in vain. Acks come from any thread, and single operations of dictionaries and sets are atomic, so
nothing here takes a lock.
"""

from __future__ import annotations

import weakref
from typing import Any

from kombu_fdb.model import Lease

#: Of a rejection without an explanation.
REJECTED: tuple[str, dict[str, Any]] = ("rejected", {})


class Held:
    """By delivery tag, in the order of the tags."""

    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.late: set[int] = set()
        #: Taken by ``basic_get``.
        self.got: set[int] = set()
        #: Weakly: one without references will never be settled.
        self.messages: dict[int, weakref.ref[Any]] = {}
        self._explanations: dict[int, tuple[str, dict[str, Any]]] = {}

    def __len__(self) -> int:
        return len(self.leases)

    @property
    def consumed(self) -> int:
        """How many fill a channel's prefetch window: what its consumers have, as in RabbitMQ."""
        return len(self.leases) - len(self.got)

    def has(self, lease: Lease) -> bool:
        """Whether it is held under any tag."""
        return lease in list(self.leases.values())

    def withdraw(self, tag: int) -> bool:
        """It was not handed out after all. False if it was not held."""
        held = tag in self.leases
        self.drop(tag)
        return held

    def drop(self, tag: int) -> None:
        """It is settled, or was no message after all."""
        self._explanations.pop(tag, None)
        self.messages.pop(tag, None)
        self.got.discard(tag)  # before: in between, the window may seem too full, not too empty
        self.leases.pop(tag, None)
        self.late.discard(tag)

    def expire(self, lease: Lease) -> None:
        """Its time to run has passed, and it was released without its consumer. From any thread."""
        self.late.update([tag for tag, held in list(self.leases.items()) if held == lease])

    def drop_late(self) -> list[int]:
        """They are not ours any more. Returns their tags."""
        late = list(self.late)
        for tag in late:
            self.drop(tag)
        return late

    def leave(self) -> list[Lease]:
        """All that is unsettled, which the caller settles from now on."""
        held, self.leases = self.leases, {}
        leases = [lease for tag, lease in held.items() if tag not in self.late]
        self.late, self.got = set(), set()
        return leases

    # -- the messages ------------------------------------------------------------------------------------------------

    def remember(self, tag: int, message: Any) -> None:
        self.messages[tag] = weakref.ref(message)

    def message(self, tag: int) -> Any:
        """None if it was collected, or never was a message."""
        reference = self.messages.get(tag)
        return None if reference is None else reference()

    def explain(self, tag: int, reason: str, details: dict[str, Any]) -> None:
        if tag in self.leases:
            self._explanations[tag] = reason, details

    def explanation(self, tag: int) -> tuple[str, dict[str, Any]]:
        """Reason and details, for a dead letter."""
        return self._explanations.get(tag, REJECTED)
