"""Deterministic simulation of a whole namespace: ``python -m kombu_fdb.testing.simulation FIRST [LAST]``.

One thread, one :class:`~kombu_fdb.testing.memory.MemoryDatabase` with injected faults, one
:class:`~kombu_fdb.testing.clock.ManualClock`, and everything that happens drawn from one seed. Actors are producers
and consumer processes; a step of one is a call of the engine. While a writing transaction commits, a step of *another*
actor may run first, so that calls interleave exactly where FoundationDB lets them: between a transaction's reads and
its commit. Consumers die at any step, stop for longer than their session's life and wake up again; the wall clock
jumps.

The history is checked against what the guarantees of ``docs/guarantees.md`` promise, after every step and at the end,
when the faults stop, everything is swept, promoted and drained. ``TWINS`` are versions of the engine with one guard
taken out; a simulation that does not catch them proves nothing.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kombu_fdb.errors import CommitUnknown, LeaseLost, StoreError
from kombu_fdb.keyspace.codec import decode_amount, decode_lease, decode_record, size_of
from kombu_fdb.keyspace.layout import has_key, split_place
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.model import Delivery, KeyLimits, Lease, Publication
from kombu_fdb.queue import claim as claim_verb
from kombu_fdb.queue import control as control_verbs
from kombu_fdb.queue import delay as delay_verbs
from kombu_fdb.queue import fair as fair_verb
from kombu_fdb.queue import session as session_verbs
from kombu_fdb.queue import settle as settle_verbs
from kombu_fdb.queue import single as single_verbs
from kombu_fdb.queue import sweep as sweep_verbs
from kombu_fdb.queue.engine import Engine, Policy
from kombu_fdb.queue.keeper import Duties
from kombu_fdb.store.protocol import KeyValue, Transaction
from kombu_fdb.testing.clock import ManualClock
from kombu_fdb.testing.faults import Fault, Faults
from kombu_fdb.testing.memory import MemoryDatabase

__all__ = ["TWINS", "Simulation", "Violation", "simulate", "twin"]

#: The second is a fair one.
QUEUES = ("a", "b")
KEYS = ("", "k", "l", "m", "t/1", "t/2")
SESSION_TTL_S = 30.0
SWEEP_INTERVAL_S = 5.0
BEAT_INTERVAL_S = 5.0
RATES: Mapping[Fault, float] = {
    Fault.CONFLICT: 0.03,
    Fault.ANSWER_LOST_APPLIED: 0.03,
    Fault.ANSWER_LOST_NOT_APPLIED: 0.03,
    Fault.COMMIT_LATE: 0.01,
    Fault.TOO_OLD: 0.01,
    Fault.UNAVAILABLE: 0.01,
}


class Violation(AssertionError):
    """A guarantee does not hold."""


@dataclass
class Sent:
    """What is known of one published message, by its payload."""

    queue: str
    due_ms: int
    #: False while the publisher never learned whether it is stored.
    confirmed: bool = True
    may_expire: bool = False
    acked: int = 0
    rejected: int = 0
    #: Settled in a call whose outcome the caller never learned.
    maybe_settled: bool = False


@dataclass(eq=False)
class Process:
    """A consumer process: an engine, a session, its duties, and what it believes to hold."""

    engine: Engine
    session: bytes
    duties: Duties
    held: dict[Lease, Delivery] = field(default_factory=dict)
    last_beat: float = 0.0
    asleep_until: float = 0.0
    #: It did nothing for at least a session's life since its session began: whoever ended that was right.
    overslept: bool = False
    #: A claim of unknown outcome: recover before the next.
    in_doubt: bool = False


class _Clock(ManualClock):
    """Remembers the latest moment it ever showed: what was due then may be delivered, wherever the clock jumps."""

    latest_wall_ms = 0

    def wall_ms(self) -> int:
        now_ms = super().wall_ms()
        self.latest_wall_ms = max(self.latest_wall_ms, now_ms)
        return now_ms


class Simulation:
    """One seed's run. :meth:`run` raises ``Violation`` with the seed and the last steps."""

    def __init__(self, seed: int, *, steps: int = 400, rates: Mapping[Fault, float] = RATES) -> None:
        self.seed = seed
        self.steps = steps
        self.rng = random.Random(seed)
        self.clock = _Clock()
        self.faults = Faults(random.Random(seed + 1), rates)
        self.database = MemoryDatabase(clock=self.clock, rng=random.Random(seed + 2), faults=self.faults)
        self.sent: dict[bytes, Sent] = {}
        self.history: list[str] = []
        self._ids = random.Random(seed + 3)
        self._depth = 0
        self._busy: set[int] = set()
        self._number = 0
        #: By key: its limit in flight (0: none), and how many may still be.
        self._most: dict[str, int] = {}
        self._allowed: dict[str, int] = {}
        self.producer = self._engine()
        self.processes: list[Process] = []
        self.database.before_commit = self._interleave

    # -- actors ----------------------------------------------------------------------------------------------------

    def _engine(self) -> Engine:
        return Engine(
            self.database,
            "sim",
            clock=self.clock,
            ids=lambda: self._ids.randbytes(16),
            rng=self.rng,
            policy=Policy(delivery_limit=6),
            timeout_s=60.0,
            publish_timeout_s=60.0,
        )

    def _start_process(self) -> None:
        engine = self._engine()
        session = engine.open_session({"number": len(self.history)}, ttl_s=SESSION_TTL_S)
        duties = self._duties(engine, session)
        self.processes.append(Process(engine, session, duties, last_beat=self._now))
        self._note(f"process {session.hex()[:4]} starts")

    def _duties(self, engine: Engine, session: bytes) -> Duties:
        return Duties(engine, self.clock, self.rng, session, sweep_interval_s=SWEEP_INTERVAL_S)

    @property
    def _now(self) -> float:
        return self.clock.monotonic()

    def _note(self, text: str) -> None:
        self.history.append(f"{'  ' * self._depth}{self._now:10.2f} {text}")

    def _interleave(self) -> None:
        """Others' steps, between the reads and the commit of this one."""
        if self._depth < 2:
            for _ in range(self.rng.choice([0, 0, 0, 1, 1, 4])):
                self._step()

    # -- steps -----------------------------------------------------------------------------------------------------

    def run(self) -> Simulation:
        """Raises ``Violation``."""
        try:
            for _ in range(self.steps):
                self._step()
                self._check()
            self._come_to_rest()
        except Violation as violation:
            history = "\n".join(self.history[-40:])
            raise Violation(f"seed {self.seed}: {violation}\n{history}") from violation
        return self

    def _step(self) -> None:
        self._depth += 1
        try:
            self._choose()()
        except (StoreError, LeaseLost) as error:
            self._note(f"-> {error}")
        finally:
            self._depth -= 1

    def _choose(self) -> Callable[[], None]:
        awake = [p for p in self.processes if p.asleep_until <= self._now and id(p) not in self._busy]
        if not awake or self.rng.random() < 0.03:
            return self._start_process if len(self.processes) < 5 else self._pass_time
        free = {self._publish: 16, self._pass_time: 20, self._jump_wall: 1, self._outage: 1, self._limit: 3}
        owned = {self._claim: 22, self._ack: 16, self._release: 5, self._reject: 2, self._duty: 24, self._stop: 2}
        if self.rng.random() < sum(free.values()) / (sum(free.values()) + sum(owned.values())):
            return self.rng.choices([*free], [*free.values()])[0]
        process, kind = self.rng.choice(awake), self.rng.choices([*owned], [*owned.values()])[0]
        return lambda: self._act(process, kind)

    def _act(self, process: Process, kind: Callable[[Process], None]) -> None:
        """One thread per process: it does nothing else meanwhile, but beats when it is time."""
        if process not in self.processes:
            return  # it died while an actor before it acted
        self._busy.add(id(process))
        try:
            if self._now - process.last_beat >= BEAT_INTERVAL_S:
                self._beat(process)
            kind(process)
        finally:
            self._busy.discard(id(process))

    def _publish(self) -> None:
        batch = []
        for _ in range(self.rng.choice([1, 1, 1, 3])):
            self._number += 1
            payload = b"%d" % self._number + b"." * self.rng.choice([0, 0, 0, 3000])
            due_ms = self.clock.wall_ms() + self.rng.choice([0, 0, 0, 5_000, 60_000])
            ttl_ms = self.rng.choice([None, None, None, 20_000])
            queue = self.rng.choice(QUEUES)
            key = self.rng.choice(KEYS) if queue == "b" else ""
            priority = self.rng.choice([0, 0, 0, 5])
            batch.append(Publication("", queue, payload, priority, due_ms, ttl_ms, key=key))
            self.sent[payload] = Sent(queue, due_ms, confirmed=False, may_expire=ttl_ms is not None)
        self._note(f"publish {[p.payload[:6].decode() for p in batch]}")
        try:
            self.producer.publish(batch)
        except CommitUnknown:
            raise
        except StoreError:
            for publication in batch:  # not stored, and must never appear
                del self.sent[publication.payload]
            raise
        for publication in batch:
            self.sent[publication.payload].confirmed = True

    def _claim(self, process: Process) -> None:
        if process.in_doubt:
            process.engine.recover(process.session, set(process.held))
            process.in_doubt = False
        limit = self.rng.choice([1, 2, 5])
        acks = list(process.held)[: self.rng.choice([0, 0, 2])]
        try:
            taken = process.engine.claim(process.session, self.rng.sample(QUEUES, 2), limit, acks=acks)
        except LeaseLost:
            self._lose_session(process)
            return
        except CommitUnknown:
            process.in_doubt = True
            self._maybe_settled(process, acks)
            raise
        for lease in acks:
            self._settled(process, lease, "acked")
        for delivery in taken:
            self._delivered(process, delivery)

    def _delivered(self, process: Process, delivery: Delivery) -> None:
        self._note(f"{process.session.hex()[:4]} takes {delivery.payload[:6].decode()} as {delivery.lease.number}")
        sent = self.sent.get(delivery.payload)
        self._require(sent is not None, "DURABLE", "a message was delivered that was never stored")
        assert sent is not None
        self._require(
            self.clock.latest_wall_ms >= sent.due_ms, "NOT-EARLY", f"{delivery.payload[:6]!r} before it was due"
        )
        self._require(not (sent.acked or sent.rejected), "ONE-PLACE", f"{delivery.payload[:6]!r} after it was settled")
        for other in self.processes:
            alive = not other.overslept and other is not process
            holds = any(held.payload == delivery.payload for held in other.held.values())
            self._require(not (alive and holds), "NOT-TWICE", f"{delivery.payload[:6]!r} is with a live process")
        process.held[delivery.lease] = delivery

    def _ack(self, process: Process) -> None:
        self._settle(process, process.engine.ack, "acked")

    def _reject(self, process: Process) -> None:
        self._settle(process, process.engine.reject, "rejected")

    def _settle(self, process: Process, verb: Callable[[list[Lease]], list[bool]], outcome: str) -> None:
        leases = self.rng.sample(list(process.held), min(len(process.held), self.rng.choice([1, 3])))
        try:
            done = verb(leases)
        except CommitUnknown:
            self._maybe_settled(process, leases)
            raise
        for lease, ok in zip(leases, done, strict=True):
            if ok:
                self._settled(process, lease, outcome)
            else:
                process.held.pop(lease, None)

    def _settled(self, process: Process, lease: Lease, outcome: str) -> None:
        delivery = process.held.pop(lease)
        sent = self.sent[delivery.payload]
        setattr(sent, outcome, getattr(sent, outcome) + 1)
        self._note(f"{process.session.hex()[:4]} {outcome} {delivery.payload[:6].decode()}")
        self._require(sent.acked + sent.rejected <= 1, "ONE-OWNER", f"{delivery.payload[:6]!r} was settled twice")

    def _maybe_settled(self, process: Process, leases: list[Lease]) -> None:
        for lease in leases:
            self.sent[process.held.pop(lease).payload].maybe_settled = True

    def _release(self, process: Process) -> None:
        leases = list(process.held)[: self.rng.choice([1, 3])]
        due_ms = self.rng.choice([0, self.clock.wall_ms() + 3_000])
        for lease in leases:
            self.sent[process.held.pop(lease).payload].due_ms = 0  # whatever comes of it, due or not is open now
        process.engine.release(leases, counted=self.rng.random() < 0.5, due_ms=due_ms)

    def _beat(self, process: Process) -> None:
        try:
            alive = process.engine.beat(process.session)
        except StoreError:
            return  # tried again at the next step, as the thread does
        if alive:
            process.last_beat = self._now
        else:
            self._lose_session(process)

    def _lose_session(self, process: Process) -> None:
        self._note(f"{process.session.hex()[:4]} learns that it was fenced")
        self._require(process.overslept, "NOT-TWICE", "a session was fenced that never stopped beating")
        process.held.clear()
        process.session = process.engine.open_session({})
        process.duties = self._duties(process.engine, process.session)
        process.last_beat = self._now
        process.in_doubt = process.overslept = False

    def _duty(self, process: Process) -> None:
        process.duties.run_once()

    def _stop(self, process: Process) -> None:
        """Die, close properly, or freeze for a while (SIGSTOP, a suspended laptop)."""
        how = self.rng.choice(["die", "close", "freeze"])
        self._note(f"{process.session.hex()[:4]} is going to {how}")
        if how == "freeze":
            seconds = self.rng.choice([10, 35, 60])
            process.asleep_until = self._now + seconds
            process.overslept = process.overslept or seconds >= SESSION_TTL_S
            return
        self.processes.remove(process)
        for delivery in process.held.values():
            self.sent[delivery.payload].due_ms = 0
        if how == "close":
            process.duties.stop()
            process.engine.close_session(process.session)

    def _pass_time(self) -> None:
        """A live process beats in time whatever it does: its heartbeat has a thread of its own."""
        self.clock.advance(self.rng.choice([0.1, 2.0, 5.0]))
        for process in list(self.processes):
            late = self._now - process.last_beat >= BEAT_INTERVAL_S
            if late and process.asleep_until <= self._now and id(process) not in self._busy:
                self._act(process, lambda _: None)

    def _outage(self) -> None:
        """The store answers nobody for longer than a session lives; then all come back, in any order."""
        if self._depth > 1:
            return
        self._note("the store is not available for 40 s")
        rates = dict(self.faults.rates)
        self.faults.rates = {Fault.UNAVAILABLE: 1.0}
        for _ in range(10):
            self.clock.advance(4.0)
            for process in list(self.processes):
                if process.asleep_until <= self._now and id(process) not in self._busy:
                    self._act(process, lambda _: None)
        self.faults.rates = rates

    def _limit(self) -> None:
        """Somebody pauses a key, limits it, or sets it free."""
        key = self.rng.choice(KEYS)
        limits = self.rng.choice(
            [None, None, KeyLimits(paused=True), KeyLimits(max_in_flight=1), KeyLimits(max_in_flight=2, weight=3)]
        )
        self._note(f"limit {key!r}: {limits}")
        self._allowed.pop(key, None)
        self._most[key] = 0  # whatever comes of it
        self.producer.limit("b", key, limits)
        self._most[key] = 0 if limits is None else limits.max_in_flight or 0

    def _jump_wall(self) -> None:
        seconds = self.rng.choice([-300, -30, 30, 300])
        self._note(f"the wall clock jumps by {seconds} s")
        self.clock.jump_wall(seconds)

    # -- checks ----------------------------------------------------------------------------------------------------

    def _require(self, holds: bool, guarantee: str, text: str) -> None:
        if not holds:
            raise Violation(f"{guarantee}: {text}")

    def _in_store(self) -> dict[bytes, tuple[str, str]]:
        """Every message in the store by its id: queue and state."""
        keys, found = self.producer.keys, dict[bytes, tuple[str, str]]()
        for state in ("ready", "keyed", "delayed", "lease"):
            for key, value in self.database.items(*range_of(keys._key(state))):
                queue, record = str(keys.unpack(key)[1]), value
                if state == "lease":
                    queue, _place, record = decode_lease(value)
                message_id = decode_record(record).message_id
                self._require(message_id not in found, "ONE-PLACE", f"{found.get(message_id)} and {queue, state}")
                found[message_id] = (queue, {"lease": "leased", "keyed": "ready"}.get(state, state))
        return found

    def _check(self) -> None:
        keys, expected = self.producer.keys, Counter(self._in_store().values())
        counted, sizes = Counter[tuple[str, str]](), Counter[str]()
        for key, value in self.database.items(*keys.all_counts):
            _tag, queue, state = keys.unpack(key)
            counted[str(queue), str(state)], size = decode_amount(value)
            sizes[str(queue)] += size
        for state in ("ready", "keyed"):
            for key, value in self.database.items(*range_of(keys._key(state))):
                sizes[str(keys.unpack(key)[1])] -= size_of(value)
        self._require(not any(sizes.values()), "COUNTS", f"bytes counted too much: {dict(sizes)}")
        self._require(counted == expected, "COUNTS", f"{dict(counted)} is not {dict(expected)}")
        self._check_keys()

    def _check_keys(self) -> None:
        """The counters of each key too; and no sub-queue has two turns."""
        keys = self.producer.keys
        ready, leased = Counter[str](), Counter[str]()
        for row, _ in self.database.items(*range_of(keys.keyed("b"))):
            ready[split_place(keys.place("b", row))[0]] += 1
        for _, value in self.database.items(*keys.all_leases):
            place = decode_lease(value)[1]
            leased[split_place(place)[0]] += has_key(place)
        leased += Counter()  # without zeros
        for name, expected, whole in (("ready", ready, keys.backlogs("b")), ("leased", leased, keys.flights("b"))):
            rows = self.database.items(*whole)
            counted = Counter({str(keys.unpack(k)[2]): int.from_bytes(v, "little", signed=True) for k, v in rows})
            self._require(counted == expected, "COUNTS", f"{name} by key: {dict(counted)} is not {dict(expected)}")
        for key, most in self._most.items():
            # What was in flight when the limit was lowered may stay, but not grow.
            allowed = self._allowed[key] = max(most, min(leased[key], self._allowed.get(key, leased[key])))
            self._require(
                not most or leased[key] <= allowed, "KEY-LIMIT", f"{leased[key]} of {key!r}, allowed {allowed}"
            )
        entries = [keys.split_ring("b", row) for row, _ in self.database.items(*range_of(keys.ring("b")))]
        turns = Counter((rank, key) for rank, _, _, key in entries)
        self._require(all(number == 1 for number in turns.values()), "FAIR", f"{turns} turns")

    def _come_to_rest(self) -> None:
        """Faults stop, everybody is dead but one; what is still there must be delivered to it."""
        self.faults.stop()
        self.database.before_commit = None
        self.database.land_late_commits()
        self.processes.clear()
        self._start_process()
        (last,) = self.processes
        for _ in range(60):
            self.clock.advance(5)
            self._beat(last)
            last.duties.run_once()
        # Past everything that was ever due, wherever the clock had jumped to.
        self.clock.jump_wall((self.clock.latest_wall_ms - self.clock.wall_ms()) / 1000 + 120)
        last.duties.run_once()
        for key in KEYS:
            last.engine.limit("b", key, None)
        found = self._drain(last)
        for payload, sent in self.sent.items():
            gone = not sent.confirmed or sent.acked or sent.may_expire or sent.maybe_settled
            self._require(
                bool(gone) or found[payload] == 1, "DURABLE", f"{payload[:6]!r} is in the store {found[payload]} times"
            )
        self._require(not self._in_store(), "BACK-SOON", f"left behind: {self._in_store()}")
        bodies = self.database.items(*range_of(self.producer.keys._key("body")))
        self._require(not bodies, "ONE-PLACE", f"{len(bodies)} payloads without a message")
        self._check()

    def _drain(self, last: Process) -> Counter[bytes]:
        """Take all that is left, dead letters too; how often each payload was found."""
        found = Counter[bytes]()
        queues = [*QUEUES, *(f"{queue}.dead" for queue in QUEUES)]
        for _ in range(1000):
            taken = last.engine.claim(last.session, queues, 50)
            if not taken and last.engine.arm(queues) is not None:
                return found
            found.update(delivery.payload for delivery in taken)
            last.engine.ack([delivery.lease for delivery in taken])
        raise Violation("BACK-SOON: the queues do not run empty")


def simulate(seed: int, *, steps: int = 400) -> Simulation:
    """Run one seed. Raises ``Violation``."""
    return Simulation(seed, steps=steps).run()


# -- broken twins ------------------------------------------------------------------------------------------------------


class _NoConflictKeys:
    """A transaction that forgets the conflict keys and ranges it is given."""

    def __init__(self, inner: Transaction) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def add_read_conflict_key(self, key: bytes) -> None:
        del key

    def add_read_conflict_range(self, begin: bytes, end: bytes) -> None:
        del begin, end


class _SnapshotReads(_NoConflictKeys):
    """Moreover, all its reads are snapshots."""

    def get(self, key: bytes, *, snapshot: bool = False) -> bytes | None:
        del snapshot
        return self._inner.get(key, snapshot=True)

    def get_many(self, keys: list[bytes], *, snapshot: bool = False) -> list[bytes | None]:
        del snapshot
        return self._inner.get_many(keys, snapshot=True)

    def get_range(self, begin: bytes, end: bytes, *, limit: int = 0, snapshot: bool = False) -> list[KeyValue]:
        del snapshot
        return self._inner.get_range(begin, end, limit=limit, snapshot=True)


def _blind(module: object, verb: str) -> tuple[object, str, object]:
    """The verb without its conflict keys; what it reads serializably it reads at snapshot."""
    original = getattr(module, verb)
    return module, verb, lambda tr, *args, **kwargs: original(_SnapshotReads(tr), *args, **kwargs)


def _require_nothing(tr: Transaction, _keys: object, _session_id: bytes, *, and_read: list[bytes]) -> list[Any]:
    return tr.get_many(and_read, snapshot=True)


def _careless(module: Any, step: str) -> tuple[object, str, object]:
    """The same for a step of the fair scheduler."""
    scheduler = module._Scheduler
    original = getattr(scheduler, step)

    def careless(self: Any, *args: Any) -> Any:
        careful, self._tr = self._tr, _SnapshotReads(self._tr)
        try:
            return original(self, *args)
        finally:
            self._tr = careful

    return scheduler, step, careless


_fence = session_verbs.fence

#: Name -> (object, attribute, what replaces it): one guard taken out of the engine.
TWINS: dict[str, tuple[object, str, object]] = {
    "a claim does not conflict on what it takes": _blind(claim_verb, "_take"),
    "a claim does not look at its session": (session_verbs, "require", _require_nothing),
    "a claim does not conflict with the end of its session": _blind(session_verbs, "require"),
    "an acknowledgement does not conflict on the lease": _blind(settle_verbs, "_take_leases"),
    "the sweep does not conflict on the leases": _blind(sweep_verbs, "release_part"),
    "two promoters do not conflict": _blind(delay_verbs, "promote"),
    "an outage counts as silence": (sweep_verbs, "counted_gap", lambda gap_s, _longest_s: gap_s),
    "fencing ignores the last beat": (
        session_verbs,
        "fence",
        lambda tr, keys, session_id, **_: _fence(tr, keys, session_id),
    ),
    "a queue expires under its consumer": _blind(control_verbs, "begin_expiry"),
    "a key goes idle without a look at its whole range": _careless(fair_verb, "_retire"),
    "a key is parked without a look at what ends meanwhile": _careless(fair_verb, "_park"),
    "claims of one limited key do not exclude each other": _careless(fair_verb, "_exclude_rivals"),
    "a door is answered at snapshot": _careless(fair_verb, "_idle"),
    "a purge does not conflict with claims": _blind(control_verbs, "_delete_range"),
    "consumers become active without a look at each other": _blind(single_verbs, "admitted"),
    "a consumer leaves without a look at who is active": _blind(single_verbs, "leave"),
    "a session leaves without a look at who is active": _blind(single_verbs, "leave_all"),
}


@contextmanager
def twin(name: str) -> Iterator[None]:
    """The engine without one of its guards."""
    owner, attribute, replacement = TWINS[name]
    original = getattr(owner, attribute)
    setattr(owner, attribute, replacement)
    try:
        yield
    finally:
        setattr(owner, attribute, original)


def main() -> int:
    """Run a range of seeds; report the first that fails."""
    parser = argparse.ArgumentParser(description="Simulate a range of seeds.")
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, nargs="?")
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    seeds = range(given.first, (given.first if given.last is None else given.last) + 1)
    began = time.perf_counter()
    for seed in seeds:
        try:
            simulate(seed, steps=given.steps)
        except Violation as violation:
            print(violation)  # noqa: T201
            return 1
    seconds = time.perf_counter() - began
    print(f"{len(seeds)} seeds, {len(seeds) / seconds:.1f} seeds/s, no violation")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
