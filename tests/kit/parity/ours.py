"""Our transport, as a program sees it."""

from __future__ import annotations

import contextlib
import os

from kit.parity.broker import Broker, Opened
from kit.parity.program import CHANNELS, QUEUES, Step
from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX

DRAIN_S = 0.005
#: How often it is looked whether a consumer's queue was deleted.
LOOK_S = 0.05
#: How long a consumer without acks may have a message that is counted nowhere any more.
LAST_S = 0.03


class Ours(Broker):
    """Over one store, in a namespace of its own. Its duties are done whenever a program waits for what they do."""

    def __init__(self, url: str, *, name: str, patience_s: float) -> None:
        super().__init__(url, {"namespace": os.urandom(6).hex(), "poll_interval": LOOK_S}, patience_s=patience_s)
        self.name = name

    def has_closed(self, channel: str, error: Exception) -> bool:
        opened = self.opened.get(channel)
        return opened is None or bool(opened.channel.closed)

    @property
    def engine(self) -> Engine:
        engine: Engine = self.observer().engine
        return engine

    def settle(self) -> None:
        """What is claimed has been delivered, and nothing is ready that a consumer has room for."""
        self.until(self._is_calm)
        for name, opened in self.opened.items():
            if any(consumer.no_ack for consumer in opened.consumers.values()):
                self._drain(CHANNELS[name], LAST_S)
        self.counts = self.look()

    def _is_calm(self) -> bool:
        for connection in {CHANNELS[name] for name, opened in self.opened.items() if _tags_of(opened)}:
            self._drain(connection, DRAIN_S)
        is_ending = any(_tags_of(opened) != opened.consumers.keys() for opened in self.opened.values())
        counts = {queue: self.engine.inspect.counts(queue) for queue in QUEUES}
        is_moving = any(
            self.is_moving(queue, found.ready) or found.leased > self.held_of(queue) for queue, found in counts.items()
        )
        # At last: what expires on its own may make a queue too long.
        return not self._do_duties() and not is_moving and not is_ending

    def _do_duties(self) -> int:
        """What a consumer process does within ten seconds. Returns for how many queues and messages."""
        upkeep = self.engine.upkeep
        expired, _next_ms = upkeep.expired_heads([*QUEUES])
        for queue in expired:
            upkeep.drop_expired_part(queue)
        return len(expired) + sum(map(upkeep.trim_full_part, upkeep.limited_queues()))

    def _drain(self, connection: str, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                self.connections[connection].drain_events(timeout=timeout_s)

    def look_at(self, queue: str) -> tuple[int, int] | None:
        self.queues.add(queue)  # a look costs nothing, and a queue may come by itself
        return super().look_at(queue)

    def publish_expiring(self, step: Step, queue: str, behind: bool = False) -> bool:
        """The duties' walk through all messages comes by."""
        done = super().publish_expiring(step, queue, behind)
        if behind:
            self.engine.upkeep.drop_expired_part(queue)
        return done

    def is_empty(self, queue: str) -> bool:
        self._do_duties()
        return super().is_empty(queue)

    def look(self) -> dict[str, tuple[int, int] | None]:
        return super().look() | {queue + DEAD_SUFFIX: self.look_at(queue + DEAD_SUFFIX) for queue in QUEUES}

    def is_gone(self, queue: str) -> bool:
        for name, last_use, _unused_ms in self.engine.queues.expiring():
            if name == queue:
                self.engine.queues.expire(name, last_use)
        return self.engine.inspect.queue(queue) is None


def _tags_of(opened: Opened) -> set[str]:
    """Of the consumers that the channel has; those of a deleted queue stay until a drain tells of it."""
    tags: set[str] = opened.channel._consumers
    return tags
