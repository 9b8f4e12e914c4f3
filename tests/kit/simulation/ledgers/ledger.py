"""What must hold at every version of the store, checked after each commit from the keys it changed.

The ledger keeps books of its own from the rows of messages and compares them with what the engine keeps: where each
message is (ONE-PLACE), how many there are (COUNTS), and who may move it how: ``rights.py``. Turns and limits of keys
are in ``keys.py``, the index by task id in ``tasks.py``, active consumers in ``single.py``, demands in
``wait_queues.py``. Nothing is looked at but what the commit touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kit.simulation.ledgers.keys import KeyLedger
from kit.simulation.ledgers.rights import Judge
from kit.simulation.ledgers.rows import STATES, Row, label_of, read_row
from kit.simulation.ledgers.single import SingleLedger
from kit.simulation.ledgers.tasks import TaskLedger
from kit.simulation.ledgers.wait_queues import WaitQueueLedger
from kit.simulation.process import Frame
from kit.simulation.violation import Violation
from kombu_fdb.engine.parts import VERSION_BYTES
from kombu_fdb.keyspace.codec import decode_amount, size_of
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.model import SessionId

Changes = Sequence[tuple[bytes, bytes | None, bytes | None]]

#: Rows that say nothing about messages.
_SKIPPED = frozenset(
    {"token", "alarm", "waiting", "role", "exchange", "binding", "bound", "epoch", "pace", "round", "format", "bucket"}
    | {"dedup", "dedup_end", "import", "imported", "total", "key_total", "sample", "expiring", "served"}
)


class Ledger:
    """The books of one run."""

    def __init__(
        self,
        namespace: str,
        queues: Mapping[str, Mapping[str, Any]],
        delivery_limit: int,
        graves: Sequence[str],
        *,
        session_ttl_s: float,
        exact: bool = False,
    ) -> None:
        self.keys = Keyspace(namespace)
        self.turns = KeyLedger(self.keys, exact=exact)
        self.tasks = TaskLedger(self.keys)
        self.lines = WaitQueueLedger(self.keys)
        self.single = SingleLedger(
            self.keys, frozenset(queue for queue, given in queues.items() if "x-single-active-consumer" in given)
        )
        self.judge = Judge(queues, delivery_limit, [grave for grave in graves if grave in queues])
        self.rows: dict[bytes, Row] = {}
        #: By message id: the keys of its rows, while there are any.
        self.places: dict[bytes, set[bytes]] = {}
        self.gone: set[bytes] = set()
        #: Names of messages by their ids.
        self.labels: dict[bytes, str] = {}
        self.sessions: set[SessionId] = set()
        #: When a session last beat, in observable seconds.
        self.beats: dict[SessionId, float] = {}
        self.consumers: Counter[str] = Counter()
        self._ttl_s = session_ttl_s
        self._bodies: Counter[bytes] = Counter()
        self._expected: Counter[tuple[str, str]] = Counter()
        self._stored: Counter[tuple[str, str]] = Counter()
        #: Sizes as they are counted, and by queue what is counted too much.
        self._sizes: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[str] = Counter()
        self._prefix = len(self.keys.prefix)

    def note(self, author: Frame | None, changes: Changes, observable_s: float) -> None:
        """Enter one commit. Raises ``Violation``."""
        tagged = [(self._tag(key), key, old, new) for key, old, new in changes]
        bodies = {self._body(key, old, new) for tag, key, old, new in tagged if tag == "body"}
        for tag, key, old, new in tagged:
            if tag == "queue" and new is None:
                self._queue_deleted(author, str(self.keys.unpack(key)[1]))
            elif tag == "deleting" and (new or b"")[:VERSION_BYTES] > (old or b"")[:VERSION_BYTES]:
                queue = str(self.keys.unpack(key)[1])
                self.judge.doomed |= {row.record.message_id for row in self.rows.values() if row.queue == queue}
        self.turns.begin()
        touched: set[tuple[str, str]] = set()
        moves: dict[bytes, tuple[list[Row], list[Row]]] = {}
        for tag, key, old, new in tagged:
            if tag in STATES:
                if STATES[tag] == "ready":
                    queue = str(self.keys.unpack(key)[1])
                    self._bytes[queue] += sum(map(size_of, filter(None, [old]))) - sum(
                        map(size_of, filter(None, [new]))
                    )
                self._message(tag, key, new, moves, touched)
            elif tag == "count":
                touched.add(self._counter(key, new))
            elif tag in ("line", "demand"):
                self.lines.note(tag, key, old, new)
            elif tag in ("task", "single"):
                (self.tasks if tag == "task" else self.single).note(key, new)
            elif tag in ("session", "beat", "consumer"):
                self._record(author, tag, key, old, new, observable_s)
            elif tag not in _SKIPPED:
                self.turns.note(tag, key, new)
        self._check_moves(author, moves)
        self._check_counts(touched)
        self._check_bodies(bodies | moves.keys())
        self.turns.check(author)
        self.tasks.check()
        self.single.check(author, self.sessions)
        self.lines.check(author, self.sessions)

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """Messages by queue and state."""
        return self._expected

    def label(self, row: Row) -> str:
        return self.labels.get(row.record.message_id) or label_of(row.record.payload)

    def _tag(self, key: bytes) -> str:
        start = self._prefix + 1
        return key[start : key.index(0, start)].decode()

    # -- messages ----------------------------------------------------------------------------------------------------

    def _message(
        self,
        tag: str,
        key: bytes,
        value: bytes | None,
        moves: dict[bytes, tuple[list[Row], list[Row]]],
        touched: set[tuple[str, str]],
    ) -> None:
        old = self.rows.pop(key, None)
        if old is not None:
            message_id = old.record.message_id
            moves.setdefault(message_id, ([], []))[0].append(old)
            self.places[message_id].discard(key)
            self._count(old, -1, touched)
        if value is not None:
            new = self.rows[key] = read_row(self.keys, tag, key, value)
            message_id = new.record.message_id
            moves.setdefault(message_id, ([], []))[1].append(new)
            self.places.setdefault(message_id, set()).add(key)
            self._count(new, 1, touched)

    def _count(self, row: Row, by: int, touched: set[tuple[str, str]]) -> None:
        self._expected[row.queue, row.state] += by
        touched.add((row.queue, row.state))
        for books in (self.turns, self.tasks, self.single, self.lines):
            books.message(row, by)

    def _check_moves(self, author: Frame | None, moves: Mapping[bytes, tuple[list[Row], list[Row]]]) -> None:
        appeared = [row for _, new in moves.values() for row in new]
        for message_id, (old, new) in moves.items():
            places = self.places[message_id]
            if len(places) > 1:
                where = " and ".join(str(self.rows[key]) for key in sorted(places))
                raise Violation("ONE-PLACE", f"{self.label(self.rows[min(places)])} is {where}")
            if not places:
                del self.places[message_id]
                self.gone.add(message_id)
            elif message_id in self.gone:
                raise Violation("ONE-PLACE", f"{self.label(new[0])} is {new[0]} although it was gone")
            elif new[0].state == "leased" and new[0].session not in self.sessions | {row.session for row in old}:
                # A lease that its session has left behind may be written anew: a change of limits counts it.
                raise Violation("ONE-OWNER", f"{self.label(new[0])} is {new[0]}, whose session has ended")
            before, after = (old[0] if old else None), (new[0] if new else None)
            name = self.label((old or new)[0])
            self.judge.moved(author, name, before, after, appeared, self.sessions)

    # -- the rest ----------------------------------------------------------------------------------------------------

    def _body(self, key: bytes, old: bytes | None, new: bytes | None) -> bytes:
        _tag, message_id, chunk = self.keys.unpack(key)
        assert isinstance(message_id, bytes)
        self._bodies[message_id] += (new is not None) - (old is not None)
        if new is not None and chunk == 0:
            self.labels[message_id] = label_of(new)
        return message_id

    def _check_bodies(self, message_ids: set[bytes]) -> None:
        for message_id in message_ids:
            rows = [self.rows[key] for key in self.places.get(message_id, ())]
            wanted = rows[0].record.chunks if rows else 0
            if self._bodies[message_id] != wanted:
                name = self.labels.get(message_id)
                raise Violation("ONE-PLACE", f"{self._bodies[message_id]} pieces of {name}, not {wanted}")

    def _counter(self, key: bytes, value: bytes | None) -> tuple[str, str]:
        _tag, queue, state = self.keys.unpack(key)
        counter = str(queue), str(state)
        number, size = decode_amount(value or b"")
        self._bytes[counter[0]] += size - self._sizes[counter]
        self._stored[counter], self._sizes[counter] = number, size
        return counter

    def _check_counts(self, touched: set[tuple[str, str]]) -> None:
        for queue in {queue for queue, _ in touched}:
            if self._bytes[queue]:
                raise Violation("COUNTS", f"{self._bytes[queue]} bytes too many are counted in {queue}")
        for counter in touched:
            stored, expected = self._stored[counter], self._expected[counter]
            if stored != expected:
                raise Violation("COUNTS", f"{' '.join(counter)}: counted {stored}, there are {expected}")

    def _queue_deleted(self, author: Frame | None, queue: str) -> None:
        if author is not None and author.verb == "duties" and self.consumers[queue]:
            raise Violation("DURABLE", f"{queue} expired although it has a consumer")

    def _record(
        self, author: Frame | None, tag: str, key: bytes, old: bytes | None, new: bytes | None, observable_s: float
    ) -> None:
        name = self.keys.unpack(key)[1]
        if tag == "consumer":
            self.consumers[str(name)] += (new is not None) - (old is not None)
            return
        assert isinstance(name, bytes)
        session = SessionId(name)
        if tag == "beat":
            if new is not None:
                self.beats[session] = observable_s
        elif new is not None:
            self.sessions.add(session)
        else:
            self.sessions.discard(session)
            silent_s = observable_s - self.beats.get(session, 0.0)
            if author is not None and author.verb == "duties" and silent_s < self._ttl_s - 0.001:
                raise Violation("NOT-TWICE", f"a session that beat {silent_s:.1f} s ago was ended")
