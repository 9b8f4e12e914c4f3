"""Turns and limits of keys, as they must be at every version. Model: ``kombu_fdb/engine/scheduling/fair.py``.

For each sub-queue (key and rank) a commit touched: it has one turn if it is marked active and none if not; the turn
stands at the rank of the key's priority, or it is noted that some don't; if it has
messages it is active, or an arrival says that a claim must look, or it is parked for a reason that will ring. So no
message is ever forgotten (FAIR). A claim never goes over a key's limit (KEY-LIMIT). A transaction that makes a message
ready rings the queue's bell (BOUNDED: no consumer sleeps beside work).
"""

from __future__ import annotations

from collections import Counter, defaultdict

from kit.simulation.ledgers.rights import CLAIMS
from kit.simulation.ledgers.rows import Row
from kit.simulation.process import Frame
from kit.simulation.violation import Violation
from kombu_fdb.engine.scheduling.fair import ACTIVE, PARKED, rank_of
from kombu_fdb.keyspace.codec import decode_control, decode_limits
from kombu_fdb.keyspace.layout import Keyspace, pack_int
from kombu_fdb.model import KeyLimits, QueueControl, Rank

#: Queue, key, packed rank.
SubQueue = tuple[str, str, Rank]
Key = tuple[str, str]


class KeyLedger:
    """Books of every queue's keys. ``exact``: turns are counted, of any number of consumers."""

    def __init__(self, keys: Keyspace, *, exact: bool) -> None:
        self.keys = keys
        self.exact = exact
        self.fair: set[str] = set()
        self.items: Counter[SubQueue] = Counter()
        self.marks: dict[SubQueue, bytes] = {}
        self.turns: Counter[SubQueue] = Counter()
        self.arrivals: set[SubQueue] = set()
        self.freed: set[Key] = set()
        self.unparks: Counter[Key] = Counter()
        self.limits: dict[Key, KeyLimits] = {}
        #: Queues whose limits have changed, and whose parked keys will hear of it.
        self.relimits: set[str] = set()
        self.controls: dict[str, QueueControl] = {}
        self.leased: Counter[Key] = Counter()
        self.ranks: defaultdict[Key, set[Rank]] = defaultdict(set)
        #: Counters of the store.
        self.flights: Counter[Key] = Counter()
        self.backlogs: Counter[Key] = Counter()
        self.ready: Counter[Key] = Counter()
        self._entries: dict[bytes, SubQueue] = {}
        #: At which rank the turn of a sub-queue stands.
        self._stands: dict[SubQueue, bytes] = {}
        #: For each key that waits, since its last service: whose messages were served.
        self._waits: dict[Key, list[Key]] = {}
        self.begin()

    def begin(self) -> None:
        """A new commit."""
        self._touched: set[Key] = set()
        self._counted: set[Key] = set()
        self._claimed: list[tuple[int, Key]] = []
        #: Leases that went: one that comes back is written anew, as it counts for its key from now on.
        self._went: set[tuple[bytes, int]] = set()
        self._paused: dict[Key, bool] = {}
        self._came: set[str] = set()
        self._rung: set[str] = set()

    # -- changes -----------------------------------------------------------------------------------------------------

    def message(self, row: Row, by: int) -> None:
        """A message row came or went."""
        key = row.queue, row.key
        if row.state == "ready":
            self.items[row.queue, row.key, row.rank] += by
            self.ranks[key].add(row.rank)
            if row.key:
                self.ready[key] += by
                self._counted.add(key)
            if by > 0:
                self._came.add(row.queue)
        elif row.state == "leased":
            if row.keyed:
                self.leased[key] += by
                self._counted.add(key)
            if by < 0:
                self._went.add((row.session, row.number))
            elif (row.session, row.number) not in self._went:
                self._claimed.append((row.number, key))
        self._touched.add(key)

    def note(self, tag: str, store_key: bytes, value: bytes | None) -> None:
        """Any other row came, changed or went."""
        parts = self.keys.unpack(store_key)
        queue = str(parts[1])
        if tag == "todo":
            self._todo(queue, store_key, parts, value)
        elif tag == "bell":
            self._rung.add(queue)
        elif tag == "fair":
            (self.fair.add if value is not None else self.fair.discard)(queue)
        elif tag == "control":
            self.controls[queue] = decode_control(value)
            self._touched |= {key for key in self.ranks if key[0] == queue}
        elif tag == "relimit":
            (self.relimits.add if value is not None else self.relimits.discard)(queue)
            self._touched |= {key for key in self.ranks if key[0] == queue}
        elif tag == "thaw":
            key = str(parts[2]), str(parts[3])
            self.unparks[key] += 1 if value is not None else -1
            self._touched.add(key)
        else:
            self._of_key(tag, queue, str(parts[2]) if len(parts) > 2 else "", parts, value)

    def _of_key(
        self, tag: str, queue: str, name: str, parts: tuple[str | bytes | int, ...], value: bytes | None
    ) -> None:
        key = queue, name
        if tag == "active":
            mark = queue, name, _rank(parts[3])
            self.ranks[key].add(mark[2])
            if value is None:
                self.marks.pop(mark, None)
            else:
                self.marks[mark] = value
        elif tag == "limits":
            if value is None:
                self.limits.pop(key, None)
            else:
                self.limits[key] = decode_limits(value)
        elif tag in ("flight", "backlog"):
            counters = self.flights if tag == "flight" else self.backlogs
            counters[key] = int.from_bytes(value or b"", "little", signed=True)
            self._counted.add(key)
        self._touched.add(key)

    def _todo(self, queue: str, store_key: bytes, parts: tuple[str | bytes | int, ...], value: bytes | None) -> None:
        kind = parts[2]
        if kind == "freed":
            key = queue, str(parts[3])
            (self.freed.add if value is not None else self.freed.discard)(key)
            if value is not None:
                self._came.add(queue)
        elif kind == "door":
            name, rank = self.keys.split_arrival(store_key)
            key = queue, name
            self.ranks[key].add(rank)
            (self.arrivals.add if value is not None else self.arrivals.discard)((queue, name, rank))
        else:
            stands, _, _, name = self.keys.split_ring(queue, store_key)
            key = queue, name
            old = self._entries.pop(store_key, None)
            if old is not None:
                self.turns[old] -= 1
            if value is not None:
                subqueue = queue, name, Rank(value)
                self._entries[store_key] = subqueue
                self.turns[subqueue] += 1
                self._stands[subqueue] = stands
        self._touched.add(key)

    # -- checks ------------------------------------------------------------------------------------------------------

    def check(self, author: Frame | None) -> None:
        """Raises ``Violation``."""
        for key in self._counted:
            if (self.flights[key], self.backlogs[key]) != (self.leased[key], self.ready[key]):
                counted = f"counted {self.flights[key]} leased, {self.backlogs[key]} ready"
                raise Violation("COUNTS", f"{key}: {counted}; there are {self.leased[key]}, {self.ready[key]}")
        if unheard := self._came - self._rung:
            raise Violation("BOUNDED", f"there is work in {sorted(unheard)}, and no waiting consumer was told")
        for key in self._touched:
            if key[0] in self.fair:
                for rank in self.ranks[key]:
                    self._check_subqueue(*key, rank)
        if author is not None and author.verb in CLAIMS:
            self._check_limits()
            if self.exact:
                self._count_turns()
        if self.exact:
            self._forget_idle()

    def _check_subqueue(self, queue: str, name: str, rank: Rank) -> None:
        subqueue = queue, name, rank
        mark, turns = self.marks.get(subqueue), self.turns[subqueue]
        if turns != (mark is not None and mark.startswith(ACTIVE)):
            raise Violation("FAIR", f"{name!r} has {turns} turns in {queue} and the mark {mark!r}")
        if turns and queue not in self.relimits:
            priority = self.limits_of(queue, name).priority
            if self._stands[subqueue] != rank_of(rank, priority):
                raise Violation("FAIR", f"the turn of {name!r} in {queue} is not where priority {priority} is served")
        if not self.items[subqueue]:
            return
        if mark is None and name and subqueue not in self.arrivals:
            raise Violation("FAIR", f"{name!r} is forgotten: it has messages in {queue}, and no claim will look at it")
        if mark == PARKED and not self._has_reason(queue, name):
            raise Violation("FAIR", f"{name!r} is parked in {queue} without a reason")

    @property
    def claimed(self) -> list[Key]:
        """Of each message that was leased in the last commit."""
        return [key for _, key in self._claimed]

    def limits_of(self, queue: str, name: str) -> KeyLimits:
        """The key's own, or the queue's for every key."""
        control = self.controls.get(queue, QueueControl())
        return self.limits.get((queue, name), control.every_key)

    def _has_reason(self, queue: str, name: str) -> bool:
        key, limits = (queue, name), self.limits_of(queue, name)
        full = limits.max_in_flight is not None and self.leased[key] >= limits.max_in_flight
        return limits.paused or full or queue in self.relimits or key in self.freed or self.unparks[key] > 0

    def _check_limits(self) -> None:
        for key in {key for _, key in self._claimed}:
            limits = self.limits_of(*key)
            if key[0] in self.controls and self.controls[key[0]].paused:
                raise Violation("KEY-LIMIT", f"a message of {key[0]}, which is paused, was taken")
            if limits.paused and key[0] in self.fair:
                raise Violation("KEY-LIMIT", f"a message of {key}, which is paused, was taken")
            if limits.max_in_flight is not None and self.leased[key] > limits.max_in_flight:
                raise Violation("KEY-LIMIT", f"{self.leased[key]} of {key} are in flight, not {limits.max_in_flight}")

    # -- whose turn it is --------------------------------------------------------------------------------------------

    def _count_turns(self) -> None:
        """FAIR: with K keys no key waits for more than 2 K messages of others.

        Not counted is the claim that was under way when a key's first message came: it could not know of it.
        """
        known = {*self._waits, *(key for _, key in self._claimed)}
        for _, (queue, served) in sorted(self._claimed):
            self._waits.pop((queue, served), None)
            waiting = self._waiting(queue)
            for key in waiting:
                wait = self._waits.setdefault(key, [])
                if key not in known:
                    continue
                wait.append((queue, served))
                among = len({*wait, *waiting})
                if len(wait) > 2 * among:
                    raise Violation("FAIR", f"{key[1]!r} waits for {len(wait)} services among {among} keys")

    def _waiting(self, queue: str) -> set[Key]:
        """Keys that still have messages."""
        return {(q, name) for (q, name, _), number in self.items.items() if number and q == queue}

    def _forget_idle(self) -> None:
        waiting = {(queue, name) for (queue, name, _), number in self.items.items() if number}
        self._waits = {key: wait for key, wait in self._waits.items() if key in waiting}


def _rank(rank: object) -> Rank:
    assert isinstance(rank, int)
    return Rank(pack_int(rank))
