"""Dead letters: found, replayed, discarded, trimmed."""

from __future__ import annotations

from kombu_fdb.engine import dead_letters
from kombu_fdb.engine.dead_letters import Moved
from kombu_fdb.engine.facade.inspection import Inspection
from kombu_fdb.engine.inspection import browse, pages
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.engine.stored.work import READY, Work
from kombu_fdb.engine.transactions import Transactions
from kombu_fdb.model import Peeked


class DeadLetters:
    """The verbs on messages that died."""

    def __init__(self, run: Transactions, inspect: Inspection) -> None:
        self._run = run
        self._inspect = inspect

    def replay(self, queue: str, limit: int) -> int:
        """Bring up to ``limit`` of the oldest messages of ``<queue>.dead`` back to ``queue``. Returns how many."""
        walk, cursor, total = self.walk(queue + DEAD_SUFFIX), b"", 0
        while total < limit:
            moved, cursor = self.replay_part(walk, cursor, limit - total)
            total += moved
            if not cursor:
                break
        return total

    def walk(self, dead: str, wanted: dead_letters.Wanted | None = None) -> dead_letters.Walk:
        """A walk through a queue of dead letters that begins now: what comes later is behind its end."""
        last = self._run.read(lambda work: work.tr.get(self._run.keys.bell(dead), snapshot=True))
        return dead_letters.Walk(dead, wanted or dead_letters.Wanted(), dead_letters.NO_LAST if last is None else last)

    def look(self, walk: dead_letters.Walk, cursor: bytes, limit: int) -> tuple[list[Peeked], bytes]:
        """Up to ``limit`` dead letters, without changing them, and the cursor to go on with; b"" at both ends."""

        def body(work: Work) -> tuple[list[Peeked], bytes]:
            part = dead_letters.look_through(work, walk, cursor, limit)
            return browse.look_all(work, [(walk.dead, letter[:2]) for letter in part.letters]), part.cursor

        return self._run.read(body)

    def replay_part(self, walk: dead_letters.Walk, cursor: bytes, limit: int, *, to: str | None = None) -> Moved:
        """Bring up to ``limit`` dead letters back, in one transaction. Raises ``QueueNotFound``; nothing moved then."""

        def body(work: Work) -> Moved:
            return dead_letters.replay_part(work, walk, cursor, limit, to=to)

        return self._run.write(body)

    def discard_part(self, walk: dead_letters.Walk, cursor: bytes, limit: int) -> Moved:
        """Delete up to ``limit`` dead letters, in one transaction."""
        return self._run.write(lambda work: dead_letters.discard_part(work, walk, cursor, limit))

    def replay_at(self, dead: str, position: bytes, message_id: bytes, *, payload: bytes | None = None) -> str | None:
        """Bring a dead letter at a page's position back to the queue it died in; None if it has moved.

        Returns that queue. ``payload``: another than it had. Raises ``QueueError`` for a message that is no dead
        letter, or has outlived its time, and ``MessageTooLarge``.
        """
        self._run.check_size(payload or b"")

        def body(work: Work) -> str | None:
            row = pages.row_at(work, dead, READY, position, message_id)
            return None if row is None else dead_letters.replay_row(work, dead, row, payload=payload)

        return self._run.write(body)

    def trim(self) -> int:
        """Drop what the queues ``<queue>.dead`` keep no longer. Returns how many."""
        total = 0
        for queue in self.queues():
            while dropped := self.trim_part(queue):
                total += dropped
        return total

    def queues(self) -> list[str]:
        """The queues ``<queue>.dead``."""
        return [queue for queue in self._inspect.queues() if queue.endswith(DEAD_SUFFIX)]

    def trim_part(self, queue: str) -> int:
        """Drop some of what a queue ``<queue>.dead`` keeps no longer. Returns how many."""

        def verb(work: Work, limit: int) -> int:
            return dead_letters.trim(work, queue, limit)

        return self._run.part(verb, dead_letters.TRIMMED_PER_TRANSACTION)
