"""The engine, the only way to the queues: its verbs in groups, which run them in transactions.

One engine serves one namespace of one store in one process. It has no thread and no connection to Celery. Its clock
is its environment's, and every method may be called from any thread.

A method that raises has changed nothing (``store/retry.py``), but for two cases. ``CommitUnknown`` means that the store
stopped answering during the commit, which may take effect even later. The same holds after any exception from a signal
handler. Then:

* ``publish``: the message may be stored. If this process publishes it again, that call first finds out whether it is
  (``publish.py``).
* ``claim``: messages may be leased to the session without the caller's knowledge. ``recover`` releases them, and
  prevents the claim from leasing more; the owner of the session calls it soon (``process/client_session.py``).
* ``ack``, ``release``, ``reject``: call again with the same leases; those that are settled stay settled.
* all others: call again.
"""

from __future__ import annotations

from collections.abc import Sequence

from kombu_fdb.engine import session, topology
from kombu_fdb.engine.dead_letters import DeadLetters
from kombu_fdb.engine.facade.inspection import Inspection
from kombu_fdb.engine.facade.messages import Messages
from kombu_fdb.engine.facade.queues import Queues
from kombu_fdb.engine.facade.upkeep import Upkeep
from kombu_fdb.engine.messages import settle
from kombu_fdb.engine.messages.publish import Publisher
from kombu_fdb.engine.scheduling import wait_queue
from kombu_fdb.engine.transactions import Transactions, Verbs, read, write
from kombu_fdb.engine.transfer import Transfer
from kombu_fdb.engine.upkeep import release
from kombu_fdb.engine.work import Environment, Work
from kombu_fdb.errors import LimitExceeded, StoreFull
from kombu_fdb.model import SessionId
from kombu_fdb.store.protocol import Database, Watch

#: How long a session may be silent before others may end it, in seconds.
SESSION_TTL_S = 30.0


class Sessions(Verbs):
    """The verbs of consumer processes, and of the processes that clean up after them."""

    beats = read(session.beats)
    neighbours = read(session.neighbours)
    describe = read(session.describe)
    skip_lease = read(release.skip)
    hold_role = write(session.hold_role)
    role_record = read(session.role_record)
    leave_role = write(session.leave_role)

    def __init__(self, run: Transactions, queues: Queues) -> None:
        super().__init__(run)
        self._queues = queues

    def open(self, description: dict[str, str | int], *, ttl_s: float = SESSION_TTL_S) -> SessionId:
        """Register a consumer process. Returns the id of its session, which must beat several times per ``ttl_s``."""
        session_id = SessionId(self._run.ids())
        self._run.write(lambda work: session.open_session(work, session_id, description, ttl_s))
        return session_id

    def beat(
        self, session_id: SessionId, *, ttl_s: float = SESSION_TTL_S, consumed: Sequence[str] = (), most: int = 0
    ) -> session.Surroundings | None:
        """Show that the session is alive, and which queues it consumes. None if it was fenced: its leases are lost.

        ``most``: how many other sessions of the ring to read.
        """
        try:
            return self._run.write(lambda work: session.beat(work, session_id, ttl_s, consumed, most))
        except (StoreFull, LimitExceeded):  # the first beat's row, without queues, always has room
            return self._run.write(lambda work: session.beat(work, session_id, ttl_s, (), most))

    def beats_of_a_writer(self) -> list[session.Beat]:
        """:meth:`beats` for a caller without a session: rewrites a beat unchanged. Raises if the store can't write."""

        def body(work: Work) -> list[session.Beat]:
            found = session.beats(work)
            for session_id, _, _ in found[:1]:
                session.seal_beat(work, session_id)
            return found

        return self._run.write(body)

    def recover(self, session_id: SessionId, first: int) -> int:
        """Release, uncounted, what a claim or demand of unknown outcome has leased; it never commits afterwards.

        ``first``: the lease number that was reserved for it. Returns how many messages were released. Raises
        ``SessionLost`` if the session was fenced; may be called again after any other error. Concurrent claims of the
        session run again.
        """

        def body(work: Work) -> int:
            session.seal(work, session_id)
            wait_queue.drop(work, session_id, first)
            held = session.leases_of_claim(work, session_id, first, release.MESSAGES_PER_TRANSACTION)
            return sum(settle.release(work, held, "none"))

        total = 0
        while released := self._run.write(body):
            total += released
        return total

    def close(self, session_id: SessionId) -> int:
        """End the session and release all its messages, uncounted, to their places. Returns how many."""
        self._run.write(lambda work: session.fence(work, session_id))
        return self.release(session_id, counted=False)

    def fence(self, session_id: SessionId, last_beat: bytes) -> bool:
        """End a silent session, unless it has beaten since ``last_beat``. Its leases are lost from then on."""
        return self._run.write(lambda work: session.fence(work, session_id, last_beat=last_beat))

    def release(self, session_id: SessionId, *, counted: bool = True) -> int:
        """Release the messages of a fenced session, in parts; idempotent. Guarantee: BACK-SOON."""
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
        """Release some messages of a fenced session. Returns how many, and where to continue; b"" at the end."""
        return self._run.part(
            release.release_part, release.MESSAGES_PER_TRANSACTION, session_id, cursor, counted=counted
        )

    def forget_part(self, session_id: SessionId) -> bool:
        """Clear some of a fenced session's other rows: consumers, then its beat. True if there are more."""
        if self._queues.drop_consumers_part(session_id):
            return True
        self._run.write(lambda work: release.forget(work, session_id))
        return False

    def watch_alarm(self) -> Watch:
        """A watch that fires when a message is delayed, so that the promoter looks again."""
        return self._run.read(lambda work: work.tr.watch(self._run.keys.alarm))


class Engine:
    """All verbs, by subject.

    Raises ``StoreUnavailable`` from every method when its deadline passes.
    """

    def __init__(self, database: Database, namespace: str, environment: Environment) -> None:
        self.database = database
        self.transactions = run = Transactions(database, namespace, environment)
        self.keys = run.keys
        self.writers_take_turns = run.writers_take_turns
        self.inspect = Inspection(run)
        self.publisher = Publisher(run)
        self.messages = Messages(run, self.inspect)
        self.queues = Queues(run)
        self.sessions = Sessions(run, self.queues)
        self.dead_letters = DeadLetters(run)
        self.upkeep = Upkeep(run, self.inspect)
        self.transfer = Transfer(run)

    def check_format(self) -> None:
        """Raises ``FormatError`` if a newer version wrote this store; marks an empty one."""
        self.transactions.write(topology.check_format)
