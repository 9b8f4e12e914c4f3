"""What ends with a connection: its exclusive queues, its consumers, and the messages it holds.

The exclusive queues of a connection, which end with it: when it is closed or collected, and when its process dies.

For each of them something that stands for the connection is among the queue's consumers, in the name of the process's
session. It leaves with the connection; if the process dies, the session is swept, and the queue is left by its last
consumer as any other is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple, Protocol

from kombu_fdb.engine.inspection.inspect import OWNER
from kombu_fdb.errors import InvalidArgument, QueueError, SessionLost
from kombu_fdb.model import Lease, SessionId
from kombu_fdb.process.client import Client
from kombu_fdb.process.membership import Membership
from kombu_fdb.routing.tables import QueueDeclaration

# -- exclusive queues --------------------------------------------------------------------------------------------------


#: A session has many connections; no two of its tags are the same.
_numbers = count(1)


class ExclusiveQueues:
    """Of one connection."""

    def __init__(self) -> None:
        self._owners: dict[str, tuple[SessionId, str, str]] = {}

    def __iter__(self) -> Iterator[tuple[SessionId, str, str]]:
        """What stands for it: session, queue, tag."""
        return iter(list(self._owners.values()))

    def declare(self, client: Client, declaration: QueueDeclaration) -> None:
        """Raises as the engine's verb. A session that was fenced, and did not know it, is followed by another one."""
        membership = client.membership()
        try:
            self._declare(client, declaration, membership)
        except SessionLost:
            membership.lose()
            self._declare(client, declaration, client.membership())

    def _declare(self, client: Client, declaration: QueueDeclaration, membership: Membership) -> None:
        queue, session_id = declaration.name, membership.session_id
        owner = self._owners.get(queue)
        if owner is None or owner[0] != session_id:
            owner = self._owners[queue] = session_id, queue, f"{OWNER}{next(_numbers)}"
        try:
            client.engine.queues.declare(declaration, owner=(session_id, owner[2]))
        except (QueueError, InvalidArgument):  # after other errors it may have been declared
            self._owners.pop(queue, None)
            raise

    def leave(self, client: Client) -> None:
        """The connection ends. Raises a ``StoreError``."""
        for owner in self:
            client.engine.queues.remove_consumer(*owner)
        self._owners.clear()

    def forget(self) -> None:
        """In a forked child: they are the parent's."""
        self._owners.clear()


# -- what is left behind -----------------------------------------------------------------------------------------------


class Holder(Protocol):
    """A channel, as its heirs see it."""

    @property
    def consumers(self) -> Sequence[tuple[SessionId, str, str]]:
        """As the store knows them: session, queue, tag."""

    def bequeath(self) -> list[Lease]:
        """The leases of all it holds. Takes no lock."""


class Orphaned(NamedTuple):
    """To be settled by another thread; may be settled again after an error."""

    leases: Sequence[Lease] = ()
    #: Session, queue, tag.
    consumers: Sequence[tuple[SessionId, str, str]] = ()

    @classmethod
    def of(cls, channels: Iterable[Holder], owned: Iterable[tuple[SessionId, str, str]]) -> Orphaned:
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
