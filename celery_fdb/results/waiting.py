"""Waiting for results: one watch each, one bell for all of them, no polling.

Model. A result that is waited for is *new* until it was looked at, then *watched* until its watch fires (then it is
looked at again) or it is *ready* and handed out. At most :data:`MOST_WATCHES` are watched at once, because FoundationDB
limits the watches of a client to 10,000; the others stay new until there is room.

What happens at each failure: the store does not answer, and what was to be looked at is looked at again each
:data:`RETRY_S`, until the caller's deadline. A watch is lost (stores fire them then, for nothing): all of them are
looked at again each :data:`SAFETY_S`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import monotonic

from celery_fdb.results import records
from celery_fdb.results.store import Sighting
from kombu_fdb.errors import StoreError
from kombu_fdb.primitives.wakeup import Bell
from kombu_fdb.store.protocol import Watch

logger = logging.getLogger(__name__)

MOST_WATCHES = 2_000
#: Results looked at in one transaction.
LOOK = 200
#: Pause while the store does not answer, in seconds.
RETRY_S = 0.5
SAFETY_S = 30.0
#: A look is given so many seconds even if the caller's deadline is nearer.
SHORTEST_LOOK_S = 0.5
LONGEST_LOOK_S = 5.0

#: Looks at several results: ``ResultStore.look``.
Look = Callable[[Sequence[str], float], list[Sighting]]


class Waiting:
    """One thread that waits for the results of some tasks."""

    def __init__(self, look: Look, task_ids: Collection[str]) -> None:
        self._look = look
        #: The tasks whose results are not handed out yet.
        self._open = set(task_ids)
        self._new = deque(self._open)
        self._fired: deque[str] = deque()
        self._watches: dict[str, Watch] = {}
        self._stamps: dict[str, bytes] = {}
        self._bell = Bell()
        #: The error of the last look, if the store did not answer.
        self.failure: StoreError | None = None
        self._safety = monotonic() + SAFETY_S

    def close(self) -> None:
        """Idempotent."""
        for watch in self._watches.values():
            watch.cancel()
        self._watches.clear()
        self._bell.close()

    @property
    def left(self) -> bool:
        """Whether there is still something to wait for."""
        return bool(self._open)

    def changes(self, deadline: float | None) -> list[tuple[str, records.StoredResult]]:
        """Some of what has changed; empty if nothing has: then sleep. A ready one is not waited for any longer.

        ``deadline``: by ``time.monotonic``.
        """
        self._bell.clear()
        if monotonic() >= self._safety:
            self._fired.extend(self._watches)
            self._safety = monotonic() + SAFETY_S
        changed: list[tuple[str, records.StoredResult]] = []
        while not changed and (task_ids := self._next()):
            try:
                sightings = self._look(task_ids, _look_s(deadline))
            except StoreError as error:
                self._fail(task_ids, error)
                break
            self.failure = None
            for task_id, sighting in zip(task_ids, sightings, strict=True):
                if self._is_news(task_id, sighting) and sighting[0] is not None:
                    changed.append((task_id, sighting[0]))
        return changed

    def sleep(self, deadline: float | None, longest_s: float | None = None) -> None:
        """Until something may have changed, the deadline has passed or ``longest_s`` seconds."""
        now = monotonic()
        moments = [self._safety - now]
        if deadline is not None:
            moments.append(deadline - now)
        if longest_s is not None:
            moments.append(longest_s)
        if self.failure is not None:
            moments.append(RETRY_S)
        self._bell.wait(max(0.0, min(moments)))

    def _next(self) -> list[str]:
        """The tasks to look at next: as many as there is room to watch."""
        found: dict[str, None] = {}
        while self._fired and len(found) < LOOK:
            task_id = self._fired.popleft()
            watch = self._watches.pop(task_id, None)
            if watch is not None:
                watch.cancel()
            if task_id in self._open:
                found[task_id] = None
        while self._new and len(found) < LOOK and len(self._watches) + len(found) < MOST_WATCHES:
            found[self._new.popleft()] = None
        return list(found)

    def _is_news(self, task_id: str, sighting: Sighting) -> bool:
        record, watch = sighting
        if watch is None:
            self._open.discard(task_id)
            return True
        self._watches[task_id] = watch
        watch.on_fire(partial(self._ring, task_id))
        if record is None or self._stamps.get(task_id) == record.stamp:
            return False
        self._stamps[task_id] = record.stamp
        return True

    def _ring(self, task_id: str) -> None:
        """Wake the waiting thread. Called by a thread of the store."""
        self._fired.append(task_id)
        self._bell.ring()

    def _fail(self, task_ids: list[str], error: StoreError) -> None:
        self._fired.extend(task_ids)
        if self.failure is None:
            logger.warning("the results can't be read, retrying: %s", error)
        self.failure = error


def _look_s(deadline: float | None) -> float:
    left_s = LONGEST_LOOK_S if deadline is None else deadline - monotonic()
    return min(max(left_s, SHORTEST_LOOK_S), LONGEST_LOOK_S)
