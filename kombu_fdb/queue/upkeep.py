"""Upkeep: sessions, and what their processes do for the whole store (``keeper.py``): sweep, promote, expire, trim."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kombu_fdb.model import (
    Lease,
)
from kombu_fdb.queue import (
    control,
    deadletter,
    dedup,
    delay,
    keytotals,
    overflow,
    session,
    single,
    sweep,
    totals,
)
from kombu_fdb.queue.administration import Administration
from kombu_fdb.queue.tally import Tally
from kombu_fdb.store.protocol import Transaction, Watch

__all__ = ["Upkeep"]

#: How long a session may be silent, in seconds.
SESSION_TTL_S = 30.0
#: Transactions for one overfull queue in one go, at most.
MOST_TRIMS = 100


class Upkeep(Administration):
    """The verbs of sessions and of the duties."""

    def open_session(self, description: dict[str, str | int], *, ttl_s: float = SESSION_TTL_S) -> bytes:
        """Begin to be a consumer; returns the session's id, which must be beaten several times in ``ttl_s`` seconds."""
        session_id = self._ids()
        self._write(lambda tr, _: session.open_session(tr, self.keys, session_id, description, ttl_s, self._now()))
        return session_id

    def beat(self, session_id: bytes, *, ttl_s: float = SESSION_TTL_S, consumed: Sequence[str] = ()) -> bool:
        """Show that the session is alive, and which queues it consumes. False if it was fenced: its leases are lost."""
        return self._write(lambda tr, _: session.beat(tr, self.keys, session_id, ttl_s, consumed, self._now()))

    def recover(self, session_id: bytes, known: Collection[Lease]) -> int:
        """Release, uncounted, what the session holds besides ``known`` (after a claim of unknown outcome)."""
        held = self._read(lambda tr: session.leases(tr, self.keys, session_id))
        unknown = [lease for lease in held if lease not in known]
        return sum(sum(self.release(part, counted=False)) for part in _parts(unknown, sweep.LEASES_PER_TRANSACTION))

    def close_session(self, session_id: bytes) -> int:
        """End the session and hand all its messages back, uncounted, at their positions. Returns how many."""
        self._write(lambda tr, _: session.fence(tr, self.keys, session_id))
        return self.release_session(session_id, counted=False)

    def fence(self, session_id: bytes, last_beat: bytes) -> bool:
        """End a silent session, unless it has beaten since ``last_beat``. Its leases are lost from here on."""
        return self._write(lambda tr, _: session.fence(tr, self.keys, session_id, last_beat=last_beat))

    def release_session(self, session_id: bytes, *, counted: bool = True) -> int:
        """Bring the messages of a fenced session back, in parts; idempotent. Guarantee: BACK-SOON."""
        total = 0

        def body(tr: Transaction, tally: Tally) -> int:
            return sweep.release_part(tr, self._graves, tally, session_id, self._now(), counted=counted)

        while released := self._write(body):
            total += released
        for queue in self._write(lambda tr, _: control.drop_consumers(tr, self.keys, session_id)):
            self.delete_queue(queue, if_unused=True)
        self._write(lambda tr, _: sweep.forget(tr, self.keys, session_id))
        return total

    def hold_role(self, role: str, session_id: bytes, observed: bytes | None) -> bool:
        """Take or keep a role; ``observed`` is a holder's record the caller saw unchanged for too long."""
        return self._write(lambda tr, _: session.hold_role(tr, self.keys, role, session_id, observed))

    def role_record(self, role: str) -> bytes | None:
        return self._read(lambda tr: tr.get(self.keys.role(role)))

    def leave_role(self, role: str, session_id: bytes) -> None:
        self._write(lambda tr, _: session.leave_role(tr, self.keys, role, session_id))

    def promote(self) -> tuple[int, int | None]:
        """Make due messages ready. Returns how many, and when the next one is due. Guarantee: NOT-EARLY."""
        promoted, next_due = 0, self._thaw()
        for queue in self._read(lambda tr: delay.waiting(tr, self.keys)):
            moved, due_ms = self._promote_queue(queue)
            promoted += moved
            next_due = due_ms if next_due is None else min(next_due, due_ms or next_due)
        return promoted, next_due

    def _thaw(self) -> int | None:
        if not self._read(lambda tr: tr.get_range(*self.keys.all_thaws, limit=1, snapshot=True)):
            return None
        return self._write(lambda tr, _: delay.thaw(tr, self.keys, self._now()))

    def _promote_queue(self, queue: str) -> tuple[int, int | None]:
        total = 0
        while True:
            moved, due_ms = self._write(lambda tr, tally: delay.promote(tr, self.keys, tally, queue, self._now()))
            total += moved
            if moved < delay.MESSAGES_PER_TRANSACTION:
                return total, due_ms

    def watch_alarm(self) -> Watch:
        """Fires when a message was delayed, so that the promoter looks again."""
        return self._read(lambda tr: tr.watch(self.keys.alarm))

    def expiring_queues(self) -> list[tuple[str, bytes, int]]:
        """Unused queues with ``x-expires``: name, last use, and the milliseconds they may stay unused."""
        return self._read(lambda tr: control.expiring(tr, self.keys))

    def expire_queue(self, queue: str, last_use: bytes) -> bool:
        """Delete a queue unless it was used since ``last_use``."""
        return self._delete_queue(queue, lambda tr: control.expire(tr, self.keys, queue, last_use)) is not None

    def trim_dead(self) -> int:
        """Drop what the queues ``<queue>.dead`` keep no longer. Returns how many."""
        total = 0
        for queue in self.queues():
            while queue.endswith(deadletter.DEAD_SUFFIX) and (dropped := self._trim(queue)):
                total += dropped
        return total

    def _trim(self, queue: str) -> int:
        return self._write(lambda tr, tally: deadletter.trim(tr, self._graves, tally, queue, self._now()))

    def clear_dedup(self) -> int:
        """Clear dedup ids whose window is over. Returns how many."""
        total = 0
        while cleared := self._write(lambda tr, _: dedup.clear_ended(tr, self.keys, self._now())):
            total += cleared
        return total

    def trim_full(self) -> int:
        """Let the oldest give way in queues that grew over their maximum by dead letters or due ones. How many."""
        return sum(self._trim_full(queue) for queue in self._read(lambda tr: control.limited(tr, self.keys)))

    def _trim_full(self, queue: str) -> int:
        total = 0
        for _ in range(MOST_TRIMS):  # its dead letters may come back to it
            dropped = self._write(lambda tr, tally: overflow.trim(tr, self._graves, tally, queue, self._now()))
            if not dropped:
                break
            total += dropped
        return total

    def tokens(self) -> list[tuple[bytes, bytes]]:
        """All commit tokens, for an Observer."""
        return self._read(lambda tr: tr.get_range(*self.keys.all_tokens, snapshot=True))

    def clear_token(self, key: bytes, value: bytes) -> bool:
        """Clear a token that is still what was observed."""
        return self._write(lambda tr, _: control.clear_if(tr, key, value))

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
        self._write(lambda tr, _: keytotals.fold(tr, self.keys, queue, names))

    def _forget_totals(self, queue: str) -> None:
        self._write(lambda tr, _: totals.forget(tr, self.keys, queue))

    def add_consumer(self, session_id: bytes, queue: str, tag: str) -> None:
        """Keep a queue that can vanish (``x-expires``, auto-delete) alive while this session consumes it."""
        self._write(lambda tr, _: control.add_consumer(tr, self.keys, session_id, queue, tag))

    def remove_consumer(self, session_id: bytes, queue: str, tag: str) -> None:
        """Deletes an auto-delete queue with its last consumer."""
        if self._write(lambda tr, _: control.remove_consumer(tr, self.keys, session_id, queue, tag)):
            self.delete_queue(queue, if_unused=True)

    def leave(self, session_id: bytes, tags: Collection[str]) -> None:
        """These consumers of the session are active nowhere any more: others take over."""
        self._write(lambda tr, _: single.leave_all(tr, self.keys, session_id, tags))

    def touch(self, queue: str) -> None:
        """Note that a queue with ``x-expires`` was used."""
        self._write(lambda tr, _: control.touch(tr, self.keys, queue))


def _parts(items: list[Lease], size: int) -> list[list[Lease]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
