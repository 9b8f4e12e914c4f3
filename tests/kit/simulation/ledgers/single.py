"""Who is the active consumer of a queue that serves one at a time (ONE-ACTIVE).

Model: ``kombu_fdb/engine/scheduling/single.py``.
"""

from __future__ import annotations

from kit.simulation.ledgers.rights import SWEEPERS
from kit.simulation.ledgers.rows import Row
from kit.simulation.process import Frame
from kit.simulation.violation import Violation
from kombu_fdb.engine.scheduling.single import SESSION_BYTES
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.model import NO_SESSION, Lease, SessionId


class SingleLedger:
    """Books of the active consumers. ``queues``: those that serve one at a time."""

    def __init__(self, keys: Keyspace, queues: frozenset[str]) -> None:
        self._keys = keys
        self._queues = queues
        #: Session of the active consumer; b"" for none.
        self._active: dict[str, SessionId] = {}
        #: Leases by queue and session.
        self._held: dict[tuple[str, SessionId], set[Lease]] = {}
        self._claimed: list[Row] = []
        self._changed: list[tuple[str, SessionId]] = []

    def message(self, row: Row, by: int) -> None:
        """A message row came or went."""
        if row.state == "leased" and row.queue in self._queues:
            held = self._held.setdefault((row.queue, row.session), set())
            if by > 0:
                held.add(Lease(row.session, row.number))
                self._claimed.append(row)
            else:
                held.discard(Lease(row.session, row.number))

    def note(self, key: bytes, value: bytes | None) -> None:
        """The record of a queue was set."""
        named = SessionId(value[:SESSION_BYTES]) if value is not None and len(value) >= SESSION_BYTES else NO_SESSION
        self._changed.append((str(self._keys.unpack(key)[1]), named))

    def check(self, author: Frame | None, sessions: set[SessionId]) -> None:
        """Raises ``Violation``."""
        for queue, named in self._changed:
            before = self._active.get(queue, NO_SESSION)
            if before and before != named and author is not None and author.verb != "drop":
                self._handed_over(author, queue, before, named, sessions)
            self._active[queue] = named
        for row in self._claimed:
            if self._active.get(row.queue, NO_SESSION) != row.session:
                raise Violation("ONE-ACTIVE", f"{row} was claimed by one that stands by")
        self._claimed, self._changed = [], []

    def _handed_over(
        self, author: Frame, queue: str, before: SessionId, named: SessionId, sessions: set[SessionId]
    ) -> None:
        whose, held = f"of {before.hex()[:4]} in {queue}", self._held.get((queue, before), set())
        if named:
            raise Violation("ONE-ACTIVE", f"{named.hex()[:4]} took the place {whose}")
        if author.process is not None and before in author.process.sessions:
            # Its own, now or when the link was cut and it could not be told. What it works on, it may keep.
            if before == author.process.session and not held <= author.process.client_session.known:
                raise Violation("ONE-ACTIVE", f"the place {whose} was left before all that it had claimed was back")
            return
        if author.verb in SWEEPERS:
            if before in sessions:
                raise Violation("ONE-ACTIVE", f"the place {whose} was vacated, and its session lives")
            if held:
                raise Violation("ONE-ACTIVE", f"the place {whose} was vacated before its messages were back")
        else:
            raise Violation("ONE-ACTIVE", f"the place {whose} was vacated by another")
