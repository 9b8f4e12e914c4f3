"""Which consumers wait, and that only those are granted anything: the rows of ``engine/scheduling/wait_queue.py``."""

from __future__ import annotations

from kit.simulation.ledgers.rows import Row
from kit.simulation.process import Frame
from kit.simulation.violation import Violation
from kombu_fdb.engine.scheduling.wait_queue import WAITING
from kombu_fdb.engine.session import LEASES_PER_CLAIM
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.model import SessionId

#: Session, and the number of the first lease.
_Name = tuple[SessionId, int]


class WaitQueueLedger:
    """Of all wait queues."""

    def __init__(self, keys: Keyspace) -> None:
        self._keys = keys
        #: Those that wait, by how they stand; and those that have a row in a wait queue.
        self._waiting: set[_Name] = set()
        self._standing: set[_Name] = set()
        #: Who waited before the commit that is looked at.
        self._before: set[_Name] = set()
        self._leased: list[Row] = []

    @property
    def waiting(self) -> set[SessionId]:
        """Sessions that wait."""
        return {session for session, _ in self._waiting}

    def message(self, row: Row, by: int) -> None:
        """A message row came or went."""
        if row.state == "leased" and by > 0:
            self._leased.append(row)

    def note(self, tag: str, key: bytes, old: bytes | None, new: bytes | None) -> None:
        """A row of a wait queue, or of a demand, has changed."""
        if tag == "demand":
            _tag, session, first = self._keys.unpack(key)
            assert isinstance(session, bytes)
            assert isinstance(first, int)
            self._waiting = _with(self._waiting, (SessionId(session), first), here=(new or b"")[:1] == WAITING)
            return
        value = new or old or b""
        name = SessionId(value[:16]), int.from_bytes(value[16:24], "big")
        self._standing = _with(self._standing, name, here=new is not None)

    def check(self, author: Frame | None, sessions: set[SessionId]) -> None:
        """Raises ``Violation``."""
        if self._waiting != self._standing:
            who = self._waiting ^ self._standing
            raise Violation("BOUNDED", f"{_shown(who)} waits in no wait queue, or stands in one and does not wait")
        granted = [row for row in self._leased if author is not None and author.verb == "serve"]
        for row in granted:
            if not any(row.session == session and first <= row.number < _end(first) for session, first in self._before):
                raise Violation("ONE-OWNER", f"{row} was granted, and no demand in the wait queue waited for it")
        for session, first in self._before - self._waiting:
            got = any(row.session == session and first <= row.number < _end(first) for row in granted)
            if author is not None and author.verb == "serve" and not got and session in sessions:
                raise Violation("BOUNDED", f"{_shown({(session, first)})} was granted nothing, and waits no longer")
        self._before, self._leased = self._waiting, []


def _with(names: set[_Name], name: _Name, *, here: bool) -> set[_Name]:
    return names | {name} if here else names - {name}


def _end(first: int) -> int:
    return first + LEASES_PER_CLAIM


def _shown(names: set[_Name]) -> str:
    return ", ".join(f"{session.hex()[:4]} from {first} on" for session, first in sorted(names))
