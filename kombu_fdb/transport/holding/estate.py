"""What a connection leaves behind when it can't be closed any more: plain values, which keep nothing alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from kombu_fdb.model import Lease, SessionId
from kombu_fdb.process.client import Client


class Holder(Protocol):
    """A channel, as its heirs see it."""

    @property
    def consumers(self) -> Sequence[tuple[SessionId, str, str]]:
        """As the store knows them: session, queue, tag."""

    def bequeath(self) -> list[Lease]:
        """The leases of all it holds. Takes no lock."""


class Estate(NamedTuple):
    """To be settled by another thread; may be settled again after an error."""

    leases: Sequence[Lease] = ()
    #: Session, queue, tag.
    consumers: Sequence[tuple[SessionId, str, str]] = ()

    @classmethod
    def of(cls, channels: Iterable[Holder], owned: Iterable[tuple[SessionId, str, str]]) -> Estate:
        """Takes no lock, as a finalizer must not: no other thread has these channels any more."""
        channels = list(channels)
        return cls(
            [lease for channel in channels for lease in channel.bequeath()],
            [*(consumer for channel in channels for consumer in channel.consumers), *owned],
        )

    def settler(self, client: Client) -> Callable[[], None]:
        return partial(self.settle, client)

    def settle(self, client: Client) -> None:
        """Raises a ``StoreError``: try again."""
        client.release(self.leases)
        # Only now: where one consumer is active at a time, the next one must find what this one held.
        for session_id, queue, tag in self.consumers:
            client.remove_consumer(session_id, queue, tag)
