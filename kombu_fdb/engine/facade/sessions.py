"""Sessions: their life, their roles, and what is left of one that died."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kombu_fdb.engine.facade.queues import Queues
from kombu_fdb.engine.messages import settle
from kombu_fdb.engine.scheduling import line, single
from kombu_fdb.engine.stored import session
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.engine.transactions import Group, Transactions, read, write
from kombu_fdb.engine.upkeep import sweep
from kombu_fdb.errors import LimitExceeded, StoreFull
from kombu_fdb.model import SessionId
from kombu_fdb.store.protocol import Watch

#: How long a session may be silent, in seconds.
SESSION_TTL_S = 30.0


class Sessions(Group):
    """The verbs of consumer processes, and of those that clean up after them."""

    beats = read(session.beats)
    neighbours = read(session.neighbours)
    describe = read(session.describe)
    skip_lease = read(sweep.skip)
    hold_role = write(session.hold_role)
    role_record = read(session.role_record)
    leave_role = write(session.leave_role)

    def __init__(self, run: Transactions, queues: Queues) -> None:
        super().__init__(run)
        self._queues = queues

    def open(self, description: dict[str, str | int], *, ttl_s: float = SESSION_TTL_S) -> SessionId:
        """Begin to be a consumer; returns the session's id, which must be beaten several times in ``ttl_s`` seconds."""
        session_id = SessionId(self._run.ids())
        self._run.write(lambda work: session.open_session(work, session_id, description, ttl_s))
        return session_id

    def beat(self, session_id: SessionId, *, ttl_s: float = SESSION_TTL_S, consumed: Sequence[str] = ()) -> bool:
        """Show that the session is alive, and which queues it consumes. False if it was fenced: its leases are lost."""
        try:
            return self._run.write(lambda work: session.beat(work, session_id, ttl_s, consumed))
        except (StoreFull, LimitExceeded):  # there is room for as much as there was at first
            return self._run.write(lambda work: session.beat(work, session_id, ttl_s, ()))

    def beats_of_a_writer(self) -> list[tuple[SessionId, bytes, float]]:
        """As ``beats``, for who has no session: one of them is written as it is. Raises if the store takes none."""

        def body(work: Work) -> list[tuple[SessionId, bytes, float]]:
            found = session.beats(work)
            for session_id, _, _ in found[:1]:
                session.seal_beat(work, session_id)
            return found

        return self._run.write(body)

    def recover(self, session_id: SessionId, first: int, left: Collection[str] = ()) -> int:
        """Release, uncounted, what a claim or demand of unknown outcome has leased, or would: it never lands any more.

        ``first``: the number that was reserved for it. ``left``: those of the consumers for which it claimed that have
        ended since; none of them is the active one of a queue any more. Returns how many messages came back. Raises
        ``SessionLost`` if the session was fenced; may be called again after any other error. The claims that this
        session makes meanwhile start again.
        """

        def body(work: Work) -> int:
            session.seal(work, session_id)
            line.drop(work, session_id, first)
            held = session.leases_of_claim(work, session_id, first, sweep.LEASES_PER_TRANSACTION)
            if left:
                single.leave_all(work, session_id, left)
            return sum(settle.release(work, held, settle.Release(counted=False)))

        total = 0
        while released := self._run.write(body):
            total += released
        return total

    def close(self, session_id: SessionId) -> int:
        """End the session and hand all its messages back, uncounted, at their positions. Returns how many."""
        self._run.write(lambda work: session.fence(work, session_id))
        return self.release(session_id, counted=False)

    def fence(self, session_id: SessionId, last_beat: bytes) -> bool:
        """End a silent session, unless it has beaten since ``last_beat``. Its leases are lost from here on."""
        return self._run.write(lambda work: session.fence(work, session_id, last_beat=last_beat))

    def release(self, session_id: SessionId, *, counted: bool = True) -> int:
        """Bring the messages of a fenced session back, in parts; idempotent. Guarantee: BACK-SOON."""
        total, cursor = 0, b""
        while True:
            released, cursor = self.release_part(session_id, cursor, counted=counted)
            total += released
            if not cursor:
                break
        while self.forget_part(session_id):
            pass
        return total

    def release_part(self, session_id: SessionId, cursor: bytes = b"", *, counted: bool = True) -> tuple[int, bytes]:
        """Bring some messages of a fenced session back. Returns how many, and where to go on; b"" at the end."""
        return self._run.part(sweep.release_part, sweep.LEASES_PER_TRANSACTION, session_id, cursor, counted=counted)

    def forget_part(self, session_id: SessionId) -> bool:
        """Clear some of what a fenced session leaves besides messages: consumers, at last its beat.

        True if there is more.
        """
        if self._queues.drop_consumers_part(session_id):
            return True
        self._run.write(lambda work: sweep.forget(work, session_id))
        return False

    def watch_alarm(self) -> Watch:
        """Fires when a message was delayed, so that the promoter looks again."""
        return self._run.read(lambda work: work.tr.watch(self._run.keys.alarm))
