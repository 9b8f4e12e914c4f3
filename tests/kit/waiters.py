"""The protocol of a wait queue as a state machine: its clients, on any store, and a model that knows no store.

The model says who waits in which order, who is granted what, which watches fire, and which rows there are. Time is the
bench's. On a store in memory some calls are struck: an answer is lost, a signal handler's exception comes right after
the commit, or the owner ends at that moment.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from threading import Event
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from kit.conformance.queue import Bench
from kit.faults import Fault, FaultyDatabase, Interrupted
from kit.machines import Machine
from kit.simulation.connection import Flag
from kombu_fdb.engine.scheduling.wait_queue import ENDED, GRANTED, SEEN, WAITING
from kombu_fdb.errors import CommitUnknown, SessionLost
from kombu_fdb.model import Delivery, Demand, Lease, SessionId
from kombu_fdb.process.client_session import CLAIM_TIMEOUTS, ClientSession
from kombu_fdb.process.combiner_client import (
    LEFT,
    MOST_PATIENCE_S,
    NEAR_S,
    NEXT_S,
    PATIENCE_S,
    UNHURRIED,
    CombinerClient,
    Contention,
)
from kombu_fdb.settings.options import Options
from kombu_fdb.store.protocol import KeyValue

LONGEST_S = 5.0
OPTIONS = Options(operation_timeout=5.0)
#: Until a watch has fired.
LATEST_S = 60.0
#: As in ``strikes``.
Strike = Fault | str | None


class Middle:
    """Chance that is none."""

    @staticmethod
    def uniform(a: float, b: float, /) -> float:
        return (a + b) / 2


class Consumer:
    """A consumer in a process and a session of its own: the real client, whose thread is the test's."""

    def __init__(self, bench: Bench, want: int = 1, spread: type[Middle] = Middle):
        self.bench, self.want, self.spread = bench, want, spread
        self.engine = bench.another()
        self.contention = Contention()
        self.contention.contest(["q"])
        self.rung = Event()
        self.granted: list[Delivery] = []
        self.open()
        self.begin()

    def open(self) -> None:
        """A session."""
        session = self.engine.sessions.open({})
        self.client_session = ClientSession(self.engine, OPTIONS, session, Flag(), self.bench.clock)

    def begin(self) -> None:
        """Another owner, in the same session."""
        clock: Any = self.bench.clock.monotonic
        spread: Any = self.spread()
        self.combiner = CombinerClient(self.rung.set, clock, spread, LONGEST_S, self.contention, self.granted)

    def join(self, acks: Sequence[Any] = ()) -> None:
        self.combiner.join(self.client_session, ["q"], self.want, acks)

    def attend(self) -> bool:
        self.rung.clear()
        return self.combiner.attend(self.engine)

    def serve(self) -> None:
        self.combiner.serve(["q"])

    def turn(self, *, serve: bool = True) -> list[bytes]:
        """As its owner does: join, look, serve. What it got."""
        self.granted.clear()
        if not self.combiner.in_wait_queue:
            self.join()
        self.attend()
        if serve and not self.granted and self.combiner.is_first:
            self.serve()
        return self.payloads

    @property
    def payloads(self) -> list[bytes]:
        return [each.payload for each in self.granted]

    @property
    def demand(self) -> Demand:
        demand = self.combiner.demand
        assert demand is not None
        return demand

    def sleep(self) -> float:
        """Until it wants to look; how long that was."""
        pause_s = self.combiner.next_look_s()
        assert pause_s is not None
        self.bench.later(pause_s)
        return pause_s


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Wait:
    """A demand. ``stands``: its row in the store, if it has one. ``over``: its session knows that it has ended.

    ``seen_s``: when its owner has last looked. ``granted``: the messages that its owner has not collected yet.
    """

    owner: Member
    demand: Demand
    seen_s: float
    stands: bytes | None = WAITING
    granted: list[int] = field(default_factory=list)
    over: bool = False


class Member(Consumer):
    """A consumer, and what the model knows of it."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self.wait: Wait | None = None
        #: What it saw when it became the first, the demands that it watches, and whether one of those has changed.
        self.seen: list[Wait] | None = None
        self.watched: list[Wait] = []
        self.told = False
        self.patience_s = PATIENCE_S
        #: Since when it has known each first one to have work.
        self.idle_s: dict[Wait, float] = {}
        self.held: dict[int, Lease] = {}
        self.suspects: list[Wait] = []
        self.fenced = self.dead = False

    @property
    def session(self) -> SessionId:
        return self.client_session.session_id

    def suspect(self) -> None:
        """Nothing that it was granted will reach it."""
        if self.wait is not None and self.wait not in self.suspects and not self.wait.over:
            self.suspects.append(self.wait)


who = st.integers(0, 4)
#: What strikes a call: its answer is lost, and it runs again; or it commits, and its owner is interrupted or has ended;
#: or it commits too late.
lost = (Fault.ANSWER_LOST_APPLIED, Fault.ANSWER_LOST_NOT_APPLIED)
strikes = st.sampled_from([None, None, None, *lost, Fault.INTERRUPTED, "ends", Fault.COMMIT_LATE])


class WaitQueue(Machine):
    """Five consumers of q, not counting the dead. A message's payload is its number."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(self.database)
        self.members = [Member(self.bench) for _ in range(5)]
        self.number = 0
        self.ready: list[int] = []
        self.expires_s: dict[int, float] = {}
        #: Those that wait, in order; and all that have rows.
        self.line: list[Wait] = []
        self.waits: list[Wait] = []
        self.served: tuple[bytes, float] | None = None

    @property
    def now_s(self) -> float:
        return self.bench.clock.monotonic()

    def one(self, number: int) -> Member:
        member = [each for each in self.members if not each.dead][number]
        member.granted.clear()
        return member

    # -- what happens ------------------------------------------------------------------------------------------------

    @initialize(
        waiters=st.integers(0, 5), messages=st.sampled_from([0, 0, 3, 8]), want=st.integers(1, 2), crashes=st.booleans()
    )
    def begin(self, waiters: int, messages: int, want: int, crashes: bool) -> None:
        for by in range(waiters):
            self.join(by, want, acks=False, strike=None)
        for by in range(waiters):
            self.attend(by)
        if crashes:
            self.crash(4)
        self.publish(messages, None)

    @rule(number=st.integers(1, 5), ttl_s=st.sampled_from([None, None, None, 1]))
    def publish(self, number: int, ttl_s: int | None) -> None:
        properties: dict[str, Any] = {"ttl_ms": 1000 * ttl_s} if ttl_s else {}
        for _ in range(number):
            self.number += 1
            self.bench.put(b"%d" % self.number, **properties)
            self.ready.append(self.number)
            self.expires_s[self.number] = self.now_s + (ttl_s or math.inf)

    @rule(seconds=st.sampled_from([0.3, 1.0, 5.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.bench.later(seconds)

    @rule(by=who, want=st.integers(1, 3), acks=st.booleans(), strike=strikes)
    def join(self, by: int, want: int, acks: bool, strike: Strike) -> None:
        one = self.one(by)
        if one.wait is not None:
            self.attend(by)
            return
        one.want, acked = want, dict(one.held) if acks else {}
        if one.fenced:
            with pytest.raises(SessionLost):
                one.join()
            return
        if strike is not None:
            one.client_session.recover()  # as the join does first, but what strikes shall strike the join
        self._recovered(one)
        outcome = self._struck(one, strike, lambda: one.join([*acked.values()]))
        if outcome == "refused":
            return
        for number in acked:
            del one.held[number]
        self.waits = [each for each in self.waits if each.owner is not one or not each.over]
        _, first, _ = _ROW.unpack(self._all_rows()[0][-1][1])
        wait = Wait(one, Demand(b"", one.session, first, want), self.now_s)
        self.waits.append(wait)
        self.line.append(wait)
        one.wait, one.seen, one.watched, one.told = wait, None, [], True
        if outcome == "unknown":
            one.suspect()
            one.wait = None

    @rule(by=who)
    def attend(self, by: int) -> None:
        one = self.one(by)
        wait, was_first = one.wait, one.combiner.is_first
        if one.combiner.next_look_s() != 0.0 or wait is None:
            assert not one.attend()
            return
        standing, _ = one.engine.messages.look(one.demand)
        for watch in standing.watches:
            watch.cancel()
        assert standing.stands == (wait.stands or ENDED)
        became = one.attend()
        wait.seen_s = self.now_s
        if wait.stands != WAITING:
            self._received(one, wait)
            assert not became
            return
        place = self.line.index(wait)
        assert one.combiner.is_first is (place == 0)
        assert became is (place == 0 and not was_first)
        one.told, one.watched = False, self.line[max(0, place - 3) : place + 1] if place else []
        one.patience_s = min(max(self.served[1] if self.served else 0.0, PATIENCE_S), MOST_PATIENCE_S)
        if place:
            one.seen = None
            self._waited(one, place)
        elif one.seen is None or len(self.line) > 1:
            one.seen = self.line[:SEEN]

    def _waited(self, one: Member, place: int) -> None:
        """It may have evicted the first one, if that had its time."""
        first = self.line[0]
        if self.ready:
            one.idle_s.setdefault(first, self.now_s)
        if self._all_rows()[0][0][1] != _row(first):
            assert self.ready
            assert self.now_s - one.idle_s[first] >= one.patience_s
            self._evicted(min(2 * one.patience_s, MOST_PATIENCE_S))
        if not one.told:
            near_s = max(NEAR_S, UNHURRIED * one.patience_s)
            longest_s = [NEXT_S, near_s, near_s, max(LONGEST_S, near_s)][place - 1]
            shortest_s = UNHURRIED * one.patience_s if place > 1 and first not in one.idle_s else 0.01
            assert shortest_s <= (one.combiner.next_look_s() or 0.0) <= 1.126 * longest_s

    @rule(by=who, strike=strikes)
    def serve(self, by: int, strike: Strike) -> None:
        """The first one claims, combines the claims of those that it has seen, and grants."""
        firsts = [each for each in self.members if each.seen is not None and not each.dead]
        one = firsts[by % len(firsts)] if firsts else self.one(by)
        one.granted.clear()
        wait, seen = one.wait, one.seen
        if wait is None or seen is None:
            one.serve()
            self.attend(by)
            return
        wait.seen_s = self.now_s
        if one.fenced:
            with pytest.raises(SessionLost):
                one.serve()
            return
        waiting = [each for each in seen if each.stands == WAITING and not each.owner.fenced]
        outcome = self._struck(one, strike, one.serve)
        if wait not in waiting:
            one.seen, one.told = None, True
        elif outcome != "refused":
            self._deal(one, [wait, *(each for each in waiting if each is not wait)])
            if outcome == "unknown" and wait.granted:
                assert one.granted == []
                one.suspect()
            elif wait.granted:
                self._received(one, wait)
            else:
                one.seen = [wait]

    def _deal(self, one: Member, waiting: Sequence[Wait]) -> None:
        left = {each: each.demand.want for each in waiting}
        chosen = self.ready[: sum(left.values())]
        turns = cycle(waiting)
        for number in chosen:
            turn = next(each for each in turns if left[each])
            left[turn] -= 1
            self.ready.remove(number)
            if self.expires_s[number] > self.now_s:
                turn.granted.append(number)
        for each in waiting:
            if each.granted:
                self._changed(each, GRANTED)
                self.served = one.session, max(LEFT * one.patience_s, PATIENCE_S)

    @rule(by=who, strike=strikes)
    def stop(self, by: int, strike: Strike) -> None:
        """It leaves, with what it was granted."""
        one = self.one(by)
        wait, one.watched, one.told = one.wait, [], False
        outcome = self._struck(one, strike, one.combiner.leave)
        if wait is None or outcome == "refused":
            return
        wait.seen_s = self.now_s
        if wait.stands == WAITING:
            self._changed(wait, ENDED)
        if outcome == "unknown":
            one.suspect()
        else:
            self._received(one, wait)

    @rule(by=who, number=st.integers(1, 3))
    def acknowledge(self, by: int, number: int) -> None:
        one = self.one(by)
        settled = [] if one.fenced else [*one.held][:number]
        assert all(one.engine.messages.ack([one.held.pop(each) for each in settled]))

    @rule(by=who, how=st.sampled_from(["end", "die", "sweep", "close", "evict", "evict"]))
    def mishap(self, by: int, how: str) -> None:
        getattr(self, f"_{how}")(self.one(by))

    def _end(self, one: Member) -> None:
        """The owner ends without a word, and there is another."""
        one.suspect()
        one.combiner.abandon()
        one.wait = one.seen = None
        one.begin()

    @rule(by=who)
    def recover(self, by: int) -> None:
        """As its duties do. A demand whose owner has not looked for long is given up."""
        one = self.one(by)
        if one.wait is not None and self.now_s - one.wait.seen_s > CLAIM_TIMEOUTS * OPTIONS.operation_timeout:
            one.suspect()
        if one.fenced and one.suspects:
            with pytest.raises(SessionLost):
                one.client_session.watch_claims()
            return
        one.client_session.watch_claims()
        self._recovered(one)

    def _die(self, one: Member) -> None:
        """It does nothing more."""
        if sum(each.dead for each in self.members) < 3:
            one.dead = True
            self.members.append(Member(self.bench))

    @rule(by=who)
    def crash(self, by: int) -> None:
        """Its session is lost, and it does not know."""
        one = self.one(by)
        self.bench.engine.sessions.fence(one.session, self.bench.beats()[one.session])
        one.fenced = True

    def _sweep(self, _: Member) -> None:
        for one in [each for each in self.members if each.fenced]:
            self.bench.engine.sessions.release(one.session)
            self._released(one)

    def _close(self, one: Member) -> None:
        if not one.fenced:
            one.client_session.close()
            self._released(one)

    def _released(self, one: Member) -> None:
        """Nothing is left of its session, and it has another one."""
        for wait in [each for each in self.waits if each.owner is one]:
            self._dropped(wait)
        self.ready = sorted([*self.ready, *one.held])
        if self.served and self.served[0] == one.session:
            self.served = None
        one.wait, one.fenced, one.suspects, one.held = None, False, [], {}
        one.open()
        one.combiner.belong_to(one.client_session)

    def _evict(self, one: Member) -> None:
        """However it has come to believe that the first one is dead."""
        if one.wait in self.line[1:]:
            first = self._all_rows()[0][0][0]
            one.engine.messages.evict(one.demand, first, 0.5)
            self._evicted(0.5)
            one.engine.messages.evict(one.demand, first, 2.0)  # another was faster

    # -- what follows ------------------------------------------------------------------------------------------------

    def _changed(self, wait: Wait, stands: bytes | None) -> None:
        """It waits no longer. All who watch it are told."""
        if wait in self.line:
            self.line.remove(wait)
        wait.stands = stands
        for each in self.members:
            each.told = each.told or wait in each.watched

    def _received(self, one: Member, wait: Wait) -> None:
        """Its owner has found that it waits no longer."""
        known = wait not in one.suspects
        assert [int(each.payload) for each in one.granted] == (wait.granted if known else [])
        one.held.update({int(each.payload): each.lease for each in one.granted})
        one.wait = one.seen = None
        if known:
            wait.granted, wait.over = [], True

    def _evicted(self, patience_s: float) -> None:
        self._changed(self.line[0], ENDED)
        self.served = self.served[0] if self.served else bytes(16), patience_s

    def _recovered(self, one: Member) -> None:
        for wait in one.suspects:
            self._dropped(wait)
        one.suspects = []

    def _dropped(self, wait: Wait) -> None:
        self._changed(wait, None)
        self.ready = sorted([*self.ready, *wait.granted])
        self.waits.remove(wait)
        wait.granted, wait.over = [], True

    def _struck(self, one: Member, strike: Strike, call: Callable[[], object]) -> str:
        """The call is done; or its outcome is unknown to its owner, and it has committed; or it is refused."""
        database, ended = self.database, []
        if not isinstance(database, FaultyDatabase) or strike is None or one.fenced:
            call()
            return "done"

        def end() -> None:
            database.after_answer = None
            ended.append(True)
            self._end(one)

        if isinstance(strike, str):
            database.after_answer = end
        else:
            database.faults.at_landings(1.0)
            database.faults.at_commits(strike)
        try:
            call()
        except Interrupted:
            return "unknown"
        except CommitUnknown:
            one.suspect()
            one.client_session.recover()
            database.land_late_commits()
            self._recovered(one)
            return "refused"
        finally:
            database.faults.stop()
            database.after_answer = None
        return "unknown" if ended else "done"

    # -- what holds ----------------------------------------------------------------------------------------------------

    def _all_rows(self) -> list[list[KeyValue]]:
        """Of the wait queue, of demands, and of the last service."""
        keys = self.bench.engine.keys
        wholes = [(*keys.all_wait_queues, 0), (*keys.all_demands, 0), (*keys.all_served, 0)]
        return self.bench.engine.transactions.read(lambda work: work.tr.get_ranges(wholes))

    @invariant()
    def the_rows_are_those_of_the_waiters(self) -> None:
        line, demands, served = self._all_rows()
        demand = self.bench.engine.keys.demand
        assert [value for _, value in line] == [_row(each) for each in self.line]
        states = {demand(each.demand.session, each.demand.first): each.stands for each in self.waits}
        assert {key: value[:1] for key, value in demands} == states
        expected = [_SERVED.pack(self.served[0], round(1000 * self.served[1]))] if self.served else []
        assert [value for _, value in served] == expected

    @invariant()
    def each_message_is_in_one_place(self) -> None:
        leased = [*(each.held for each in self.members), *(each.granted for each in self.waits)]
        assert self.bench.counts() == (len(self.ready), 0, sum(map(len, leased)))

    @invariant()
    def those_who_watch_are_told(self) -> None:
        for one in self.members:
            assert one.combiner.in_wait_queue is (one.wait is not None)
            if one.wait is not None and one.told:
                assert not one.watched or one.rung.wait(self._soon_s)
                assert one.combiner.next_look_s() == 0.0
            elif one.wait is not None and one.watched and self._soon_s == 0.0:  # others' watches may fire for nothing
                assert not one.rung.is_set(), "nothing has changed for it"

    @property
    def _soon_s(self) -> float:
        """Until a watch has fired."""
        return 0.0 if isinstance(self.database, FaultyDatabase) else LATEST_S

    def teardown(self) -> None:
        """BOUNDED: whoever is dead, what is there is served. Then all leave, and nothing is left."""
        self._sweep(self.members[0])
        living = [each for each in self.members if not each.dead]
        for _ in range(60):
            if not self.bench.counts()[0]:
                break
            for one in living:
                one.engine.messages.ack([*one.held.values()])
                one.held = {}
                one.turn()
                one.held = {number: each.lease for number, each in enumerate(one.granted)}
            self.bench.later(min(each.combiner.next_look_s() or 0.0 for each in living))
        assert self.bench.counts()[0] == 0
        self.bench.check()
        for one in self.members:
            self.bench.engine.sessions.close(one.session)
        line, demands, served = self._all_rows()
        assert [*line, *demands, *(value for _, value in served if value[:16] != bytes(16))] == []
        self.bench.clean()


#: A row of the wait queue, and that of its last service.
_ROW, _SERVED = struct.Struct(">16sQI"), struct.Struct(">16sI")


def _row(wait: Wait) -> bytes:
    return _ROW.pack(wait.demand.session, wait.demand.first, wait.demand.want)
