"""Tidying: the steps of the duties, of one bounded transaction each. Who does them in which turn: ``duties.py``.

Each step that moves messages moves as many as its transaction holds: it is halved when it was too much, down to one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

from kombu_fdb.engine.dead_letters import trim
from kombu_fdb.engine.facade.administration import Administration
from kombu_fdb.engine.facade.budget import Budget, Portion
from kombu_fdb.engine.messages import dedup, overflow
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.engine.metrics import keytotals, totals
from kombu_fdb.engine.scheduling import rates
from kombu_fdb.engine.stored import copies
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.engine.topology import control
from kombu_fdb.engine.upkeep import asides, delay, expired, ghosts, regain
from kombu_fdb.engine.upkeep.asides import Aside
from kombu_fdb.errors import KombuFDBError
from kombu_fdb.keyspace.layout import Range
from kombu_fdb.store.protocol import KeyValue

__all__ = ["Tidying"]

T = TypeVar("T")

#: What a message can be in the way of others with: it is too large, or its bytes make no sense.
IN_THE_WAY = (KombuFDBError, ArithmeticError, LookupError, TypeError, ValueError, struct.error)
#: Rows of the duties' own bookkeeping read, or cleared, in one transaction.
ROWS_PER_TRANSACTION = 1_000
#: Transactions for one overfull queue in one go, at most: its dead letters may come back to it.
MOST_TRIMS = 100


class Tidying(Administration):
    """The verbs by which the store is kept in order."""

    def _part(self, verb: Callable[[Work, int], T], most: int) -> T:
        """A step of as many messages as its transaction holds, down to one if some of them are in the way."""
        portion = self._portions.setdefault(verb.__qualname__, Portion(most, halved_by=IN_THE_WAY))
        return portion.run(lambda limit: self._write(lambda work: verb(work, limit)))

    # -- what is due -----------------------------------------------------------------------------------------------

    def promote(self) -> tuple[int, int | None]:
        """Make all due messages ready. Returns how many, and when the next one is due. Guarantee: NOT-EARLY."""
        promoted, thaw_ms = 0, self.thaw()
        due, next_ms = self.due_queues()
        for queue in due:
            moved, due_ms = self._promote_queue(queue)
            promoted += moved
            next_ms = earliest(next_ms, due_ms)
        return promoted, earliest(thaw_ms, next_ms)

    def _promote_queue(self, queue: str) -> tuple[int, int | None]:
        total, due_ms = self.promote_part(queue)
        while due_ms is not None and due_ms <= self._now():
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
        return self._read(lambda work: delay.due_queues(work, begin))

    def promote_part(self, queue: str) -> tuple[int, int | None]:
        """Make some due messages of a queue ready. Returns how many, and when its next one is due."""

        def verb(work: Work, limit: int) -> tuple[int, int | None]:
            return delay.promote(work, queue, limit)

        return self._part(verb, delay.MESSAGES_PER_TRANSACTION)

    def thaw(self) -> int | None:
        """Ring for some of the keys whose rate allows a message again. Returns when the next one is due."""
        if not self._read(lambda work: work.tr.get_range(*self.keys.all_thaws, limit=1, snapshot=True)):
            return None
        return self._write(lambda work: delay.thaw(work, self._sightings))

    def relimited_queues(self) -> list[str]:
        """Queues whose limits were changed by a process that did not come to its end (``relimit.py``)."""
        rows = self._rows(*self.keys.all_relimits)
        return [queue for (queue,), _ in self.keys.read(rows, str)]

    # -- queues ----------------------------------------------------------------------------------------------------

    def expiring_queues(self) -> list[tuple[str, bytes, int]]:
        """Unused queues with ``x-expires``: name, last use, and the milliseconds they may stay unused."""
        return self._read(control.expiring)

    def expire_queue(self, queue: str, last_use: bytes) -> bool:
        """Delete a queue unless it was used since ``last_use``."""
        return self._delete_queue(queue, lambda work: control.expire(work, queue, last_use)) is not None

    def regain_part(self) -> int:
        """Bring back some messages that older processes kept for this version. Returns how many."""
        if not self._read(regain.is_any):
            return 0

        def verb(work: Work, limit: int) -> int:
            return regain.part(work, limit)

        return self._part(verb, regain.MESSAGES_PER_TRANSACTION)

    def trim_dead(self) -> int:
        """Drop what the queues ``<queue>.dead`` keep no longer. Returns how many."""
        total = 0
        for queue in self.dead_queues():
            while dropped := self.trim_dead_part(queue):
                total += dropped
        return total

    def dead_queues(self) -> list[str]:
        """The queues ``<queue>.dead``."""
        return [queue for queue in self.queues() if queue.endswith(DEAD_SUFFIX)]

    def trim_dead_part(self, queue: str) -> int:
        """Drop some of what a queue ``<queue>.dead`` keeps no longer. Returns how many."""

        def verb(work: Work, limit: int) -> int:
            return trim.trim(work, queue, limit)

        return self._part(verb, trim.TRIMMED_PER_TRANSACTION)

    def trim_full(self) -> int:
        """Let the oldest give way in queues that grew over their maximum by dead letters or due ones. How many."""
        total = 0
        for queue in self.limited_queues():
            budget = Budget(self._clock, transactions=MOST_TRIMS)
            while budget.spend() and (dropped := self.trim_full_part(queue)):
                total += dropped
        return total

    def limited_queues(self) -> list[str]:
        """Queues with a maximum of messages or bytes."""
        return self._read(control.limited)

    def trim_full_part(self, queue: str) -> int:
        """Let some of the oldest give way in a queue that is over its maximum. Returns how many."""

        def verb(work: Work, limit: int) -> int:
            return overflow.trim(work, queue, limit)

        return self._part(verb, overflow.MOST_LEAVING)

    def drop_expired_part(self, queue: str, cursor: bytes = b"") -> tuple[int, bytes]:
        """Drop the expired of some ready messages. Returns how many, and where to go on; b"" at the end."""

        def verb(work: Work, limit: int) -> tuple[int, bytes]:
            return expired.drop_part(work, queue, cursor, limit)

        return self._part(verb, expired.ROWS_PER_TRANSACTION)

    # -- rows that somebody left -----------------------------------------------------------------------------------

    def clear_dedup(self, *, kept_ms: int = dedup.KEPT_MS) -> int:
        """Clear dedup ids whose window has been over for ``kept_ms`` by this process's clock. Returns how many."""
        total = 0
        while cleared := self.clear_dedup_part(kept_ms=kept_ms):
            total += cleared
        return total

    def clear_dedup_part(self, *, kept_ms: int = dedup.KEPT_MS) -> int:
        """Clear some of them. Returns how many."""
        end_ms = max(0, self._now() - kept_ms)

        def verb(work: Work, limit: int) -> int:
            return dedup.clear_ended(work, end_ms, limit)

        return self._part(verb, dedup.ENTRIES_PER_TRANSACTION)

    def clear_buckets_part(self, cursor: bytes = b"") -> bytes:
        """Clear those of some token buckets that are full. Returns where to go on; b"" at the end."""
        begin = cursor or self.keys.all_buckets[0]
        return self._write(lambda work: rates.clear_full(work, begin))

    def rows(self, whole: Range) -> list[KeyValue]:
        """All rows of a range, in parts, for an Observer."""
        begin, end = whole
        found: list[KeyValue] = []
        while part := self._rows(begin, end):
            found += part
            begin = part[-1][0] + b"\x00"
        return found

    def _rows(self, begin: bytes, end: bytes) -> list[KeyValue]:
        return self._read(lambda work: work.tr.get_range(begin, end, limit=ROWS_PER_TRANSACTION, snapshot=True))

    def tokens(self) -> list[KeyValue]:
        """All commit tokens, for an Observer."""
        return self.rows(self.keys.all_tokens)

    def clear_rows(self, rows: Sequence[KeyValue]) -> int:
        """Clear those of the rows that are still what was observed. Returns how many."""
        return self._write(lambda work: control.clear_if(work, rows))

    def clear_copy(self, row: KeyValue) -> bool:
        """Clear a copy of a payload that nobody took, if its row is still what was observed."""
        return self._write(lambda work: copies.clear_abandoned(work, *row))

    def ghosts(self) -> dict[tuple[str, str], bytes]:
        """What is left of queues and exchanges that seem to be gone: kind, name and last change, for an Observer."""
        alive, exchanges = self.queues(), {each.name for each in self.exchanges()}
        found = {}
        for key, value in self.rows(self.keys.all_bells):
            for queue in delay.names_in(self.keys, [(key, value)]):
                if not alive.keys() & {queue, queue + DEAD_SUFFIX}:
                    found["queue", queue] = value
        for key, value in self.rows(self.keys.all_epochs):
            for exchange in delay.names_in(self.keys, [(key, value)]):
                if exchange not in exchanges:
                    found["exchange", exchange] = value
        return found

    def clear_ghost(self, kind: str, name: str, value: bytes) -> bool:
        """Clear it, if it has not changed since and is gone indeed."""
        clear = ghosts.clear_queue if kind == "queue" else ghosts.clear_exchange
        return self._write(lambda work: clear(work, name, value))

    # -- numbers ---------------------------------------------------------------------------------------------------

    def add_totals(self, *, timeout_s: float | None = None) -> None:
        """Add what this process has counted so far, now. On an error it is not counted."""
        share = self._totals.share()
        if share.taken:
            timeout_s = self._timeout_s if timeout_s is None else timeout_s
            self._retry(lambda tr: self._totals.write(tr, share.taken), timeout_s=timeout_s)

    def trim_totals(self) -> None:
        """Forget the totals of queues that are gone, and all but the busiest keys. For one thread."""
        for queue in self.totals().keys() - self.queues().keys() - {""}:
            self._forget_totals(queue)
        for queue, names in self._busiest.surplus(self.key_totals()):
            for start in range(0, len(names), keytotals.KEYS_PER_FOLD):
                self._fold_totals(queue, names[start : start + keytotals.KEYS_PER_FOLD])

    def _fold_totals(self, queue: str, names: Sequence[str]) -> None:
        self._write(lambda work: keytotals.fold(work, queue, names))

    def _forget_totals(self, queue: str) -> None:
        self._write(lambda work: totals.forget(work, queue))

    # -- what could not be done ------------------------------------------------------------------------------------

    def asides(self) -> list[Aside]:
        """What the duties of all processes could not do, and why; up to :data:`.asides.MOST_SHOWN`."""
        return self._read(asides.read)

    def set_aside(self, aside: Aside) -> None:
        """Show what a duty could not do."""
        self._write(lambda work: asides.write(work, aside))

    def forget_aside(self, duty: str, subject: str) -> None:
        """It can be done again."""
        self._write(lambda work: work.tr.clear(self.keys.aside(duty, subject)))


def earliest(one: int | None, other: int | None) -> int | None:
    """Of two moments, None for never."""
    return min((each for each in (one, other) if each is not None), default=None)
