"""Everything out of a broker, and into another one: the verbs of an export and an import.

``celery fdb export`` and ``import`` are made of these. Each may be called again after any failure: a message is stored
by the transaction that marks it as stored (``engine/migration/restore.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kombu_fdb.api.connection import Connection
from kombu_fdb.engine.facade import migration
from kombu_fdb.engine.facade.migration import MOST_BYTES, MOST_MESSAGES, DedupEntry
from kombu_fdb.model import KeyLimits, QueueControl, StoredMessage
from kombu_fdb.routing.tables import QueueDeclaration

__all__ = ["MOST_BYTES", "MOST_MESSAGES", "Migration"]


class Migration:
    """Get it from :attr:`.broker.Broker.migration`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def _verbs(self) -> migration.Migration:
        return self._connection.engine.migrate

    # -- out -------------------------------------------------------------------------------------------------------

    def dump(self, queue: str, *, leased: bool = False) -> Iterator[StoredMessage]:
        """Every message of a queue that rests, in the order in which to store it again.

        ``leased``: those under leases too, as ready ones.
        """
        return self._verbs.dump(queue, leased=leased)

    def dedups(self) -> Iterator[DedupEntry]:
        """Exchange, routing key, dedup id and end (wall clock, ms) of each window that may still be open."""
        return self._verbs.dedups()

    # -- in --------------------------------------------------------------------------------------------------------

    def restore(self, import_id: bytes, messages: Sequence[tuple[bytes, StoredMessage]]) -> int:
        """Store messages of another store, each with its mark, in one transaction: those that are not here yet.

        Returns how many were stored. Up to :data:`MOST_MESSAGES` of :data:`MOST_BYTES` together.
        """
        return self._verbs.restore(import_id, messages)

    def restore_dedups(self, entries: Sequence[DedupEntry]) -> None:
        """Open these windows here too."""
        self._verbs.restore_dedups(entries)

    def restore_queue(self, declaration: QueueDeclaration) -> None:
        """As it was declared there."""
        self._connection.engine.queues.declare(declaration)

    def restore_control(self, queue: str, control: QueueControl) -> None:
        """All of it, in place of what is set here."""
        self._connection.engine.queues.set_control(queue, control)

    def restore_limits(self, queue: str, key: str, limits: KeyLimits) -> None:
        """All of a key's limits, in place of those it has here."""
        self._connection.engine.queues.limit(queue, key, limits)

    def restore_binding(self, queue: str, exchange: str, routing_key: str) -> None:
        """As it is bound in another store: in an older one, by a key that would be too long today."""
        self._verbs.bind(queue, exchange, routing_key)

    def finished(self, import_id: bytes) -> dict[str, Any] | None:
        """What :meth:`finish` was told; None if the import is new or under way."""
        return self._verbs.finished(import_id)

    def finish(self, import_id: bytes, facts: dict[str, Any]) -> None:
        """Everything is here: forget the marks. Idempotent."""
        self._verbs.finish(import_id, facts)
