"""After a flush: delete what is beyond the bounds, and end the active runs of workers that have died.

Every worker that keeps a history does it, and none is elected: who first clears a segment, or ends a lost run, wins
by a conflict. Trim is due when the flush has opened a segment, and as the lost are, now and then, with jitter.

A worker's active runs stand under its session. A session that has ended (its process died, or was silent for longer
than ``session_ttl``) has none: they become :data:`~celery_fdb.history.run.LOST`, and are in the history as such. If the
process was only silent, what its runs come to is written later, as runs of their own.

How old a segment is, the clocks of most workers say: one that is ahead deletes no history.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from celery_fdb.brokers.lazy import common_ms
from celery_fdb.history.options import History
from celery_fdb.history.store import HistoryStore
from kombu_fdb.model import SessionFacts
from kombu_fdb.primitives.clock import Clock

#: Seconds between two looks that no new segment makes necessary.
INTERVAL_S = 30.0
#: Transactions of one trim.
TRIM_PARTS = 5
#: Active runs of which one look sees the sessions; the next one goes on behind them.
MOST_ACTIVE = 1_000


class Upkeep:
    """Of one recorder. Not thread-safe."""

    def __init__(
        self, store: HistoryStore, bounds: History, sessions: Callable[[], Sequence[SessionFacts]], *, clock: Clock
    ) -> None:
        """``sessions``: of the broker; raises a ``StoreError``."""
        self._store = store
        self._bounds = bounds
        self._sessions = sessions
        self._clock = clock
        self._random = random.Random()
        self._next = clock.monotonic()
        self._cursor = b""

    def __call__(self, *, opened: bool) -> None:
        """Do what is due. Raises a ``StoreError``."""
        due = self._clock.monotonic() >= self._next
        if opened or due:
            now_ms = common_ms(self._sessions(), self._clock.wall_ms())
            self._store.trim(self._bounds, parts=TRIM_PARTS, now_ms=now_ms)
        if due:
            self.find_lost()
            self._next = self._clock.monotonic() + INTERVAL_S * self._random.uniform(0.8, 1.2)

    def find_lost(self) -> int:
        """End active runs whose session has ended, of the next :data:`MOST_ACTIVE`. Returns how many."""
        holders, self._cursor = self._store.holders(limit=MOST_ACTIVE, cursor=self._cursor)
        if not holders:
            return 0
        # Asked after the rows were read: a session opens before it has one.
        ended = holders - {bytes(each.session_id) for each in self._sessions() if each.open}
        return sum(self._store.lose(session, self._bounds) for session in sorted(ended))
