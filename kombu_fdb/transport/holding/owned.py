"""The exclusive queues of a connection, which end with it: when it is closed or collected, and when its process dies.

For each of them something that stands for the connection is among the queue's consumers, in the name of the process's
session. It leaves with the connection; if the process dies, the session is swept, and the queue is left by its last
consumer as any other is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from kombu_fdb.engine.inspection.inspect import OWNER
from kombu_fdb.errors import InvalidArgument, QueueError, SessionLost
from kombu_fdb.model import SessionId
from kombu_fdb.process.client import Client
from kombu_fdb.process.membership import Membership
from kombu_fdb.routing.tables import QueueDeclaration

#: A session has many connections; no two of its tags are the same.
_numbers = count(1)


class Owned:
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
