"""What settles a channel's messages, as those see it who know no store."""

from __future__ import annotations

from typing import Any, Protocol

from kombu_fdb.model import Delivery, Lease


class Settler(Protocol):
    """``settling.py`` does it through the process's client."""

    def note_ack(self, lease: Lease) -> None:
        """It will be settled; :meth:`acknowledged` must follow. The note is the last step, in one call into C."""

    def is_noted(self, lease: Lease) -> bool:
        """Whether an interrupted :meth:`note_ack` came that far."""

    def acknowledged(self) -> None:
        """Settle what was noted soon: with others if a receiver runs, else at once."""

    def settle(self, lease: Lease, *, requeue: bool, pause_ms: int, reason: str, details: dict[str, Any]) -> None:
        """Now. Raises a ``StoreError``; may be repeated. ``details`` go to the dead letter, if it becomes one."""

    def refuse(self, delivery: Delivery, error: str, **details: str) -> None:
        """Dead-letter what no consumer can handle."""

    def note_attempt(self, lease: Lease) -> None:
        """Whenever it is released, an attempt at it counts."""

    def release(self, leases: list[Lease], *, counted: bool) -> None:
        """At once; if the store does not answer, as soon as it does. Raises a ``StoreError``, once in an outage."""

    def release_later(self, leases: list[Lease]) -> None:
        """By another thread. For a finalizer: never blocks, takes no lock."""

    def on_room(self) -> None:
        """Room was made, or taken away."""
