"""The duties of a process, and of an engine without one, some of which can be done by themselves, each to its end."""

from __future__ import annotations

from kombu_fdb import Broker
from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.engine.parts import Budget
from kombu_fdb.engine.scheduling.single import SESSION_BYTES
from kombu_fdb.model import SessionId
from kombu_fdb.process.duty_cycle import DutyCycle


def promote_all(engine: Engine) -> tuple[int, int | None]:
    """Make all due messages ready. Returns how many, and when the next one is due."""
    promoted, unpark_ms = 0, engine.upkeep.unpark()
    due, next_ms, _ = engine.upkeep.due_queues()
    for queue in due:
        moved, due_ms = engine.upkeep.promote_part(queue)
        promoted += moved
        while due_ms is not None and due_ms <= engine.transactions.now():
            moved, due_ms = engine.upkeep.promote_part(queue)
            promoted += moved
            if not moved:
                break
        next_ms = earliest(next_ms, due_ms)
    return promoted, earliest(unpark_ms, next_ms)


def earliest(one: int | None, other: int | None) -> int | None:
    """The earlier of two moments; None stands for never."""
    return min((each for each in (one, other) if each is not None), default=None)


def replay(engine: Engine, queue: str, limit: int) -> int:
    """Bring up to ``limit`` of the oldest messages of ``<queue>.dead`` back to ``queue``. Returns how many."""
    walk, cursor, total = engine.dead_letters.walk(queue + DEAD_SUFFIX), b"", 0
    while total < limit:
        moved, cursor = engine.dead_letters.replay_part(walk, cursor, limit - total)
        total += moved
        if not cursor:
            break
    return total


def active_consumer(engine: Engine, queue: str) -> tuple[SessionId, str] | None:
    """Session and tag of the active consumer of a queue that serves one at a time."""
    record = engine.transactions.read(lambda work: work.tr.get(work.keys.single(queue))) or b""
    found = SessionId(record[:SESSION_BYTES]), record[SESSION_BYTES:].decode()
    return found if len(record) >= SESSION_BYTES else None


def trim_all(engine: Engine) -> int:
    """Drop what the queues ``<queue>.dead`` no longer keep. Returns how many."""
    total = 0
    for queue in engine.dead_letters.queues():
        while dropped := engine.dead_letters.trim_part(queue):
            total += dropped
    return total


class SingleDuties(DutyCycle):
    """The real ones."""

    def sweep(self) -> int:
        """Look at the neighbours; end those that are dead. Returns how many messages came back."""
        before = self.sweep_duty.released
        self._complete("sweep")
        return self.sweep_duty.released - before

    def expire_queues(self) -> None:
        """Delete queues with ``x-expires`` that were unused for as long."""
        self._complete("expire queues")

    def clear_leftovers(self) -> None:
        """Clear rows of processes that are gone."""
        self._complete("clear leftovers")

    def _complete(self, name: str) -> None:
        next(each for each in self._duties if each.name == name).run(self._guard, Budget(self._clock))


def sweep(observer: Broker, silent: Broker) -> None:
    """What the sweep of ``observer`` does to ``silent`` when it was silent for ``session_ttl``."""
    session_id = silent._client.session().session_id
    last_beat = {each: beat for each, beat, _ in observer._engine.sessions.beats()}[session_id]
    assert observer._engine.sessions.fence(session_id, last_beat)
    observer._engine.sessions.release(session_id)
    observer._engine.upkeep.flush_totals()
