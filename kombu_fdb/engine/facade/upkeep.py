"""Upkeep: the steps of the duties, of one bounded transaction each. Who does them in which turn: ``duties.py``.

Each step that moves messages moves as many as its transaction holds: it is halved when it was too much, down to one.
"""

from __future__ import annotations

from collections.abc import Sequence

from kombu_fdb.engine.facade.inspection import Inspection
from kombu_fdb.engine.messages import dedup, overflow
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.engine.scheduling import rates
from kombu_fdb.engine.stored import copies
from kombu_fdb.engine.stored.batches import Budget
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.engine.topology import control
from kombu_fdb.engine.transactions import Transactions
from kombu_fdb.engine.upkeep import delay, expired, orphans, quarantine, regain
from kombu_fdb.engine.upkeep.quarantine import Aside
from kombu_fdb.keyspace.layout import Range
from kombu_fdb.store.protocol import KeyValue

#: Rows of the duties' own bookkeeping read, or cleared, in one transaction.
ROWS_PER_TRANSACTION = 1_000
#: Transactions for one overfull queue in one go, at most: its dead letters may come back to it.
MOST_TRIMS = 100


class Upkeep:
    """The verbs by which the store is kept in order."""

    def __init__(self, run: Transactions, inspect: Inspection) -> None:
        self._run = run
        self._inspect = inspect

    def promote(self) -> tuple[int, int | None]:
        """Make all due messages ready. Returns how many, and when the next one is due. Guarantee: NOT-EARLY."""
        promoted, unpark_ms = 0, self.unpark()
        due, next_ms = self.due_queues()
        for queue in due:
            moved, due_ms = self._promote_queue(queue)
            promoted += moved
            next_ms = earliest(next_ms, due_ms)
        return promoted, earliest(unpark_ms, next_ms)

    def _promote_queue(self, queue: str) -> tuple[int, int | None]:
        total, due_ms = self.promote_part(queue)
        while due_ms is not None and due_ms <= self._run.now():
            moved, due_ms = self.promote_part(queue)
            total += moved
            if not moved:
                break
        return total, due_ms

    def due_queues(self) -> tuple[list[str], int | None]:
        """Queues with something to promote, and when the next of the others is due."""
        due: list[str] = []
        next_ms, begin = None, b""
        while True:
            found, part_ms, begin = self._due_part(begin)
            due += found
            next_ms = earliest(next_ms, part_ms)
            if not begin:
                return due, next_ms

    def _due_part(self, begin: bytes) -> tuple[list[str], int | None, bytes]:
        return self._run.read(lambda work: delay.due_queues(work, begin))

    def promote_part(self, queue: str) -> tuple[int, int | None]:
        """Make some due messages of a queue ready. Returns how many, and when its next one is due."""

        def verb(work: Work, limit: int) -> tuple[int, int | None]:
            return delay.promote(work, queue, limit)

        return self._run.part(verb, delay.MESSAGES_PER_TRANSACTION)

    def unpark(self) -> int | None:
        """Ring for some of the keys whose rate allows a message again. Returns when the next one is due."""
        if not self._run.read(lambda work: work.tr.get_range(*self._run.keys.all_unparks, limit=1, snapshot=True)):
            return None
        return self._run.write(lambda work: delay.unpark(work, self._run.sightings))

    def relimited_queues(self) -> list[str]:
        """Queues whose limits were changed by a process that did not come to its end (``limits.py``)."""
        rows = self._rows(*self._run.keys.all_relimits)
        return [queue for (queue,), _ in self._run.keys.read(rows, str)]

    def regain_part(self) -> int:
        """Bring back some messages that older processes kept for this version. Returns how many."""
        if not self._run.read(regain.is_any):
            return 0

        def verb(work: Work, limit: int) -> int:
            return regain.part(work, limit)

        return self._run.part(verb, regain.MESSAGES_PER_TRANSACTION)

    def trim_full(self) -> int:
        """Let the oldest give way in queues that grew over their maximum by dead letters or due ones. How many."""
        total = 0
        for queue in self.limited_queues():
            budget = Budget(self._run.clock, transactions=MOST_TRIMS)
            while budget.spend() and (dropped := self.trim_full_part(queue)):
                total += dropped
        return total

    def limited_queues(self) -> list[str]:
        """Queues with a maximum of messages or bytes."""
        return self._run.read(lambda work: control.declared_with(work, "x-max-length", "x-max-length-bytes"))

    def trim_full_part(self, queue: str) -> int:
        """Let some of the oldest give way in a queue that is over its maximum. Returns how many."""

        def verb(work: Work, limit: int) -> int:
            return overflow.trim(work, queue, limit)

        return self._run.part(verb, overflow.MOST_LEAVING)

    def ttl_queues(self) -> list[str]:
        """Queues whose messages have a time to live, or go on when the life of each is over."""
        return self._run.read(lambda work: control.declared_with(work, "x-message-ttl", "x-dead-letter-exchange"))

    def expired_heads(self, queues: Sequence[str]) -> tuple[dict[str, list[bytes]], int | None]:
        """Where expired messages stand at the heads of these, as cursors, and when the next of the others expires."""
        return self._run.read(lambda work: expired.at_heads(work, queues))

    def drop_expired_part(self, queue: str, cursor: bytes = b"") -> tuple[int, bytes]:
        """Drop the expired of some ready messages. Returns how many, and where to go on; b"" at the end."""

        def verb(work: Work, limit: int) -> tuple[int, bytes]:
            return expired.drop_part(work, queue, cursor, limit)

        return self._run.part(verb, expired.ROWS_PER_TRANSACTION)

    def clear_dedup(self, *, kept_ms: int = dedup.KEPT_MS) -> int:
        """Clear dedup ids whose window has been over for ``kept_ms`` by this process's clock. Returns how many."""
        total = 0
        while cleared := self.clear_dedup_part(kept_ms=kept_ms):
            total += cleared
        return total

    def clear_dedup_part(self, *, kept_ms: int = dedup.KEPT_MS) -> int:
        """Clear some of them. Returns how many."""
        end_ms = max(0, self._run.now() - kept_ms)

        def verb(work: Work, limit: int) -> int:
            return dedup.clear_ended(work, end_ms, limit)

        return self._run.part(verb, dedup.ENTRIES_PER_TRANSACTION)

    def clear_buckets_part(self, cursor: bytes = b"") -> bytes:
        """Clear those of some token buckets that are full. Returns where to go on; b"" at the end."""
        begin = cursor or self._run.keys.all_buckets[0]
        return self._run.write(lambda work: rates.clear_full(work, begin))

    def rows(self, whole: Range) -> list[KeyValue]:
        """All rows of a range, in parts, for an Observer."""
        begin, end = whole
        found: list[KeyValue] = []
        while part := self._rows(begin, end):
            found += part
            begin = part[-1][0] + b"\x00"
        return found

    def _rows(self, begin: bytes, end: bytes) -> list[KeyValue]:
        return self._run.read(lambda work: work.tr.get_range(begin, end, limit=ROWS_PER_TRANSACTION, snapshot=True))

    def tokens(self) -> list[KeyValue]:
        """All commit tokens, for an Observer."""
        return self.rows(self._run.keys.all_tokens)

    def clear_rows(self, rows: Sequence[KeyValue]) -> int:
        """Clear those of the rows that are still what was observed. Returns how many."""
        return self._run.write(lambda work: control.clear_if(work, rows))

    def clear_copy(self, row: KeyValue) -> bool:
        """Clear a copy of a payload that no burial took, if its row is still what was observed."""
        return self._run.write(lambda work: copies.clear_abandoned(work, *row))

    def ghosts(self) -> dict[tuple[str, str], bytes]:
        """What is left of queues and exchanges that seem to be gone: kind, name and last change, for an Observer."""
        alive, exchanges = self._inspect.queues(), {each.name for each in self._inspect.exchanges()}
        found = {}
        for key, value in self.rows(self._run.keys.all_bells):
            for queue in delay.names_in(self._run.keys, [(key, value)]):
                if not alive.keys() & {queue, queue + DEAD_SUFFIX}:
                    found["queue", queue] = value
        for key, value in self.rows(self._run.keys.all_epochs):
            for exchange in delay.names_in(self._run.keys, [(key, value)]):
                if exchange not in exchanges:
                    found["exchange", exchange] = value
        return found

    def clear_ghost(self, kind: str, name: str, value: bytes) -> bool:
        """Clear it, if it has not changed since and is gone indeed."""
        clear = orphans.clear_queue if kind == "queue" else orphans.clear_exchange
        return self._run.write(lambda work: clear(work, name, value))

    def asides(self) -> list[Aside]:
        """What the duties of all processes could not do, and why; up to :data:`.asides.MOST_SHOWN`."""
        return self._run.read(quarantine.read)

    def set_aside(self, aside: Aside) -> None:
        """Show what a duty could not do."""
        self._run.write(lambda work: quarantine.write(work, aside))

    def forget_aside(self, duty: str, subject: str) -> None:
        """It can be done again."""
        self._run.write(lambda work: work.tr.clear(self._run.keys.aside(duty, subject)))


def earliest(one: int | None, other: int | None) -> int | None:
    """Of two moments, None for never."""
    return min((each for each in (one, other) if each is not None), default=None)
