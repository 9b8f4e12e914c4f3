"""The dead letters of one queue."""

from __future__ import annotations

from kombu_fdb.aio.calls import Face, stoppable, stream, verb
from kombu_fdb.api import dead_letters as sync

__all__ = ["DeadLetters"]


class DeadLetters(Face[sync.DeadLetters]):
    """Get it from :attr:`.queue.Queue.dead_letters` or :meth:`.broker.Broker.dead_letters`.

    See ``api/dead_letters.py``.
    """

    @property
    def dead_queue(self) -> str:
        """Where they are."""
        return self._sync.dead_queue

    count = verb(sync.DeadLetters.count)
    list = verb(sync.DeadLetters.list)
    get = verb(sync.DeadLetters.get)
    each = stream(sync.DeadLetters.each)
    replay = stoppable(sync.DeadLetters.replay)
    replay_changed = verb(sync.DeadLetters.replay_changed)
    replay_part = verb(sync.DeadLetters.replay_part)
    discard = stoppable(sync.DeadLetters.discard)
    discard_part = verb(sync.DeadLetters.discard_part)
