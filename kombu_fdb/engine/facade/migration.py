"""Migration: from store to store, an export and an import. See ``migration.py`` and ``migration.py``.

They fail as the engine's verbs do, and each may be called again after any failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kombu_fdb.engine import migration
from kombu_fdb.engine.messages import dedup
from kombu_fdb.engine.messages.publish import BATCH_BYTES
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.engine.topology import control
from kombu_fdb.engine.transactions import Transactions
from kombu_fdb.model import StoredMessage

#: Of one :meth:`Migration.restore`.
MOST_MESSAGES = migration.MESSAGES_PER_TRANSACTION
MOST_BYTES = BATCH_BYTES

DedupEntry = tuple[str, str, str, int]


class Migration:
    """One store as the source or the target."""

    def __init__(self, run: Transactions) -> None:
        self._run = run

    def dump(self, queue: str, *, leased: bool = False) -> Iterator[StoredMessage]:
        """Every message of a queue that rests, in the order in which to store it again.

        ``leased``: those under leases too, as ready ones.
        """
        return migration.messages(self._run.read, self._run.keys, queue, leased=leased)

    def dedups(self) -> Iterator[DedupEntry]:
        """Exchange, routing key, dedup id and end (wall clock, ms) of each window that may still be open."""
        return migration.dedups(self._run.read, self._run.keys)

    def restore(self, import_id: bytes, messages: Sequence[tuple[bytes, StoredMessage]]) -> int:
        """Store messages of another store, each with its mark, in one transaction: those that are not here yet.

        Returns how many were stored. Up to :data:`MOST_MESSAGES` of :data:`MOST_BYTES` together.
        """

        def body(work: Work) -> int:
            return migration.restore(work, import_id, messages)

        return self._run.write(body, self._run.timeouts.publish_s)

    def restore_dedups(self, entries: Sequence[DedupEntry]) -> None:
        """Open these windows here too."""
        self._run.write(lambda work: dedup.restore(work, entries))

    def bind(self, queue: str, exchange: str, routing_key: str) -> None:
        """As it is bound in another store: in an older one, by a key that would be too long today."""
        self._run.write(lambda work: control.bind(work, queue, exchange, routing_key))

    def finished(self, import_id: bytes) -> dict[str, Any] | None:
        """What :meth:`finish` was told; None if the import is new or under way."""
        return self._run.read(lambda work: migration.state(work, import_id))

    def finish(self, import_id: bytes, facts: dict[str, Any]) -> None:
        """Everything is here: forget the marks, which the duties do if this is killed. Idempotent."""
        self._run.write(lambda work: migration.finish(work, import_id, facts))
        cursor, end = self._run.keys.all_imported(import_id)
        while b"" < cursor < end:
            cursor = self.forget_marks_part(cursor)

    def forget_marks_part(self, cursor: bytes = b"") -> bytes:
        """Clear some marks of finished imports. Returns where to go on; b"" at the end."""
        return self._run.write(lambda work: migration.clear_marks(work, cursor))
