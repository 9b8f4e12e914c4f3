"""Two calls at once, case by case: the second runs between the reads and the commit of the first.

Each race is run as it is, and with the guard it depends on taken out (``simulation.TWINS``), which must break it: else
the race would prove nothing.
"""

import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest
from kit.conformance.invariants import check_counts, messages
from kit.conformance.newer import make_newer, upgraded
from kit.conformance.queue import Bench
from kit.conformance.wait_queues import Competitor
from kit.duties import active_consumer, promote_all
from kit.faults import FaultyDatabase
from kit.simulation import twin

from kombu_fdb.engine.copies import CopiesMissing
from kombu_fdb.engine.messages import claim
from kombu_fdb.engine.messages.claim import Served
from kombu_fdb.engine.scheduling import fair
from kombu_fdb.errors import Outrun, SessionLost
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import ClaimTerms, KeyLimits
from kombu_fdb.routing.tables import Exchange, QueueDeclaration

Race = Callable[[Bench], None]


@pytest.fixture
def bench():
    return Bench(FaultyDatabase())


def two_claims(bench):
    bench.put(b"a")
    taken = []
    other, session = bench.another(), bench.engine.sessions.open({})
    bench.during(lambda: taken.extend(bench.take()), lambda: taken.extend(other.messages.claim(session, ["q"], 1)))
    assert len(taken) == 1
    check_counts(bench.engine)


def message_that_comes_back_between(bench):
    """All that a claim takes is cleared at once: what came between them meanwhile would be lost."""
    bench.put(b"a", b"b", b"c")
    one, two, three = (each.lease for each in bench.take())
    bench.engine.messages.release([one, three], counted=False)
    taken = []
    back = partial(bench.another().messages.release, [two], counted=False)
    bench.during(lambda: taken.extend(bench.take()), back)
    assert [each.payload for each in taken] == [b"a", b"b", b"c"]
    check_counts(bench.engine)


def claim_while_the_session_ends(bench):
    bench.put(b"a")
    with pytest.raises(SessionLost):
        bench.during(bench.take, lambda: bench.another().sessions.close(bench.session))
    assert bench.counts() == (1, 0, 0)


def ack_while_swept(bench):
    bench.put(b"a")
    (delivery,) = bench.take()
    acked = bench.during(
        lambda: bench.engine.messages.ack([delivery.lease]),
        lambda: bench.another().sessions.close(bench.session),
    )
    assert acked == [False]
    assert bench.counts() == (1, 0, 0)
    check_counts(bench.engine)


def sweep_while_acked(bench):
    bench.put(b"a")
    (delivery,) = bench.take()
    bench.engine.sessions.fence(bench.session, bench.beats()[bench.session])
    bench.during(
        lambda: bench.engine.sessions.release(bench.session),
        lambda: bench.another().messages.ack([delivery.lease]),
    )
    assert messages(bench.engine) == {}
    check_counts(bench.engine)


def fence_while_beating(bench):
    stale = bench.beats()[bench.session]
    fenced = bench.during(
        lambda: bench.engine.sessions.fence(bench.session, stale),
        lambda: bench.another().sessions.beat(bench.session),
    )
    assert fenced is False
    assert bench.engine.sessions.beat(bench.session)


def two_promoters(bench):
    bench.put(b"a", due_ms=bench.clock.wall_ms() + 1)
    bench.later(1)
    bench.during(lambda: promote_all(bench.engine), lambda: promote_all(bench.another()))
    assert bench.counts() == (1, 0, 0)
    assert len(messages(bench.engine)) == 1


def delay_while_the_last_delayed_is_promoted(bench):
    """The promoter clears the note that the queue has delayed messages, having seen none left."""
    bench.put(b"a", due_ms=bench.clock.wall_ms() + 1)
    bench.later(1)
    due_ms = bench.clock.wall_ms() + 1000
    bench.during(lambda: promote_all(bench.engine), lambda: bench.put(b"b", due_ms=due_ms))
    bench.later(2)
    promote_all(bench.engine)
    assert bench.payloads() == [b"a", b"b"]


def consume_while_the_queue_expires(bench):
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-expires": 1000}))
    ((_, last_use, _),) = bench.engine.queues.expiring()
    bench.during(
        lambda: bench.engine.queues.expire("q", last_use),
        lambda: bench.another().queues.add_consumer(bench.session, "q", "tag"),
    )
    assert bench.engine.inspect.queue("q") is not None


def test_a_claim_loses_one_race_to_messages_that_come_back_one_by_one(bench):
    """Each comes back between those that it takes; the releases might go on for longer than the claim may try."""
    bench.put(*(b"%d" % number for number in range(100)))
    first, *held = (each.lease for each in bench.take(99))
    bench.engine.messages.release([first], counted=False)
    other, database = bench.another(), bench.database
    assert isinstance(database, FaultyDatabase)

    def release_one():
        database.before_commit = None
        other.messages.release([held.pop(0)], counted=False)
        database.before_commit = release_one

    database.before_commit = release_one
    taken = bench.take()
    database.before_commit = None
    assert [each.payload for each in taken] == [b"0", b"1", b"99"]
    assert bench.engine.messages.lost_races == 1
    check_counts(bench.engine)


def claim_while_purged(bench):
    bench.put(b"a")
    taken = []
    other, session = bench.another(), bench.engine.sessions.open({})
    purged = bench.during(
        lambda: bench.engine.queues.purge("q"), lambda: taken.extend(other.messages.claim(session, ["q"], 1))
    )
    assert (purged, len(taken)) == (0, 1)
    check_counts(bench.engine)


def two_keys(bench):
    """b, then a, have their turns, and one message of a is leased."""
    for key in "ba":
        bench.put(b"1", b"2", key=key)
    _, leased = bench.take(2)
    return leased


def claim_second_turn(bench):
    """As consumers of version 0.1 do when others compete, which may run beside newer ones: leave the first turn."""
    engine = bench.another()
    in_order, rings = fair._Scheduler._in_order, fair._Scheduler._rings

    def is_older(scheduler):
        return scheduler._keys is engine.keys

    def behind_the_first(scheduler, *given):
        return in_order(scheduler, *given)[is_older(scheduler) :]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fair._Scheduler, "_in_order", behind_the_first)
        patch.setattr(fair._Scheduler, "_rings", lambda each, window: rings(each, window + is_older(each)))
        return [delivery.payload for delivery in engine.messages.claim(bench.session, ["q"], 1)]


def assert_nothing_is_stranded(bench):
    """What is ready can be claimed, without any other event that would ring for it."""
    while bench.take():
        pass
    assert bench.counts()[0] == 0


def release_while_the_key_is_emptied(bench):
    """The message goes back in front of the one that is taken, and its arrival is admitted before the key goes idle."""
    leased = two_keys(bench)

    def meanwhile():
        bench.engine.messages.release([leased.lease], counted=False)
        assert [each.key for each in bench.take(1)] == ["b"]

    bench.during(lambda: claim_second_turn(bench), meanwhile)
    assert_nothing_is_stranded(bench)


def ack_while_the_key_is_parked(bench):
    """The slot is free, and its bell is answered, before the key is parked for want of one."""
    leased = two_keys(bench)
    bench.engine.queues.limit("q", "a", KeyLimits(max_in_flight=1))

    def meanwhile():
        bench.engine.messages.ack([leased.lease])
        assert [each.key for each in bench.take(1)] == ["b"]

    bench.during(lambda: claim_second_turn(bench), meanwhile)
    assert_nothing_is_stranded(bench)


def two_claims_of_a_limited_key(bench):
    """Of different ranks, so that they meet in no turn."""
    bench.put(b"1", b"2", b"3", key="a", priority=9)
    bench.put(b"4", key="a")
    bench.take(1)
    bench.engine.queues.limit("q", "a", KeyLimits(max_in_flight=2))
    taken = []
    other = bench.another()
    bench.during(
        lambda: taken.extend(claim_second_turn(bench)),
        lambda: taken.extend(other.messages.claim(bench.session, ["q"], 1)),
    )
    assert len(taken) == 1


def first_limit_of_a_queue_while_claimed(bench):
    """The claim does not look at limits: no key has any."""
    bench.put(b"1", b"2")
    taken = []
    limits = KeyLimits(paused=True)
    bench.during(lambda: taken.extend(bench.take()), lambda: bench.another().queues.limit("q", "", limits))
    assert not taken


def ack_while_its_queue_gets_its_first_limit(bench):
    """It has read that no key is limited, so no key waits for it; before it commits, one does."""
    competitor = Competitor(bench, 1)
    bench.put(b"1", b"2", key="a")
    (held,) = competitor.serve().deliveries

    def meanwhile():
        bench.engine.queues.limit("q", "a", KeyLimits(max_in_flight=1))
        assert not bench.take()

    bench.during(lambda: competitor.join(held.lease), meanwhile)
    assert_nothing_is_stranded(bench)


def pause_while_claimed(bench):
    bench.put(b"1")
    taken = []
    bench.during(lambda: taken.extend(bench.take()), lambda: bench.another().queues.change_control("q", paused=True))
    assert not taken


def arrival_while_a_competitor_admits_it(bench):
    """Both find the arrival of a rung; the competitor serves it and gives it its next turn."""
    bench.put(b"1", b"2", key="c")
    bench.take(1)
    bench.put(b"3", b"4", key="a")
    bench.during(lambda: bench.take(1), lambda: claim_second_turn(bench))
    assert_one_turn_a_key(bench)


def message_without_a_key_while_a_competitor_admits_it(bench):
    """The same; it has no arrival but itself."""
    bench.put(b"1", b"2", key="c")
    bench.take(1)
    bench.put(b"3", b"4")
    bench.during(lambda: bench.take(1), lambda: claim_second_turn(bench))
    assert_one_turn_a_key(bench)


def assert_one_turn_a_key(bench):
    keys = bench.engine.keys
    ring = bench.engine.transactions.read(lambda work: work.tr.get_range(*range_of(keys.ring("q"))))
    turns = [keys.split_ring("q", entry)[-1] for entry, _ in ring]
    assert len(set(turns)) == len(turns), "two turns for one key"


class Consumers:
    """Two of a queue of which one is active."""

    def __init__(self, bench):
        bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-single-active-consumer": True}))
        self.engine = bench.engine
        self.sessions = {tag: bench.engine.sessions.open({}) for tag in ("one", "two")}
        self.engines = {"one": bench.engine, "two": bench.another()}

    def take(self, tag):
        return self.engines[tag].messages.claim(self.sessions[tag], ["q"], 1, terms=ClaimTerms(consumers={"q": tag}))

    def cancel(self, tag):
        self.engines[tag].queues.remove_consumer(self.sessions[tag], "q", tag)

    @property
    def active(self):
        found = active_consumer(self.engine, "q")
        return "" if found is None else found[1]


def test_who_loses_the_race_for_the_only_place_does_not_stand_in_a_wait_queue(bench):
    """Its first one might be a consumer that gets nothing, and would keep the active one waiting behind it."""
    consumers = Consumers(bench)
    bench.put(b"a", b"b")
    terms = ClaimTerms(consumers={"q": "one"}, gives_way=True)
    found = bench.during(
        lambda: bench.engine.messages.claim(consumers.sessions["one"], ["q"], 1, terms=terms),
        lambda: consumers.take("two"),
    )
    assert (found, consumers.active) == ([], "two")


def test_who_loses_another_race_may_give_way(bench):
    bench.put(b"a", b"b")
    other, session = bench.another(), bench.engine.sessions.open({})
    with pytest.raises(Outrun):
        bench.during(
            lambda: bench.engine.messages.claim(bench.session, ["q"], 1, terms=ClaimTerms(gives_way=True)),
            lambda: other.messages.claim(session, ["q"], 1),
        )


def two_consumers_become_active(bench):
    """The first one finds no message that they could meet at."""
    consumers = Consumers(bench)

    def meanwhile():
        bench.put(b"a", b"b")
        assert len(consumers.take("two")) == 1

    bench.during(lambda: consumers.take("one"), meanwhile)
    assert consumers.active == "two"


def cancel_while_another_takes_over(bench):
    consumers = Consumers(bench)
    consumers.take("one")

    def meanwhile():
        consumers.engines["two"].queues.leave(consumers.sessions["one"], ["one"])
        consumers.take("two")

    bench.during(lambda: consumers.cancel("one"), meanwhile)
    assert consumers.active == "two"


def session_ends_while_another_takes_over(bench):
    consumers = Consumers(bench)
    consumers.take("one")
    bench.engine.sessions.fence(consumers.sessions["one"], bench.beats()[consumers.sessions["one"]])

    def meanwhile():
        consumers.engines["two"].sessions.release(consumers.sessions["one"])
        consumers.take("two")

    bench.during(lambda: bench.engine.sessions.release(consumers.sessions["one"]), meanwhile)
    assert consumers.active == "two"


def expired_while_moved(bench):
    """By a process whose clock is behind."""
    bench.put(b"a", ttl_ms=1)
    bench.later(1)
    bench.during(
        lambda: bench.engine.upkeep.drop_expired_part("q"),
        lambda: bench.another().messages.move("q", "elsewhere"),
    )
    check_counts(bench.engine)


def orphan_while_it_comes_back(bench):
    bench.put(b"a", key="k")
    held = bench.take()
    bench.engine.queues.delete("q")
    bench.engine.messages.ack([each.lease for each in held])
    ((kind, name), bell), *_ = bench.engine.upkeep.orphans().items()
    bench.during(lambda: bench.engine.upkeep.clear_orphan(kind, name, bell), lambda: bench.put(b"b", key="k"))
    assert bench.payloads() == [b"b"]


def burial_while_its_copy_is_cleared(bench):
    bench.engine.queues.declare_exchange(Exchange("dlx", "fanout"))
    for queue in ("one", "two"):
        bench.engine.queues.bind(queue, "dlx", "")
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-dead-letter-exchange": "dlx"}))
    bench.put(b"x" * 3_000_000)
    (held,) = bench.take()
    missing = CopiesMissing(held.message_id, ["two"])
    while not bench.engine.transactions.copy_part(missing, "two", b"c" * 16, bench.clock.monotonic() + 30, 16):
        pass
    (copy,) = bench.engine.upkeep.rows(bench.engine.keys.all_copies)
    bench.during(lambda: bench.engine.messages.reject([held.lease]), lambda: bench.another().upkeep.clear_copy(copy))
    assert [len(each.payload) for each in bench.take(2, "one", "two")] == [3_000_000] * 2


def newer_messages_brought_back_by_two(bench):
    bench.put(b"a")
    make_newer(bench)
    bench.take()
    with upgraded():
        bench.during(bench.engine.upkeep.regain_part, lambda: take_it(bench, bench.another()))
        assert bench.counts() == (0, 0, 1)
        check_counts(bench.engine)


def take_it(bench, other):
    """Another process brings it back, and one of its consumers has it."""
    assert other.upkeep.regain_part() == 1
    assert len(bench.take()) == 1


def two_in_wait_queue(bench):
    """And two messages."""
    competitors = Competitor(bench), Competitor(bench)
    bench.put(b"a", b"b")
    return competitors


def leave_while_the_wait_queue_is_served(bench):
    one, two = two_in_wait_queue(bench)
    seen = one.look()
    bench.during(lambda: one.serve(seen), lambda: two.engine.messages.leave(two.demand))
    assert bench.counts() == (1, 0, 1), "the message granted to the other one is not known to it"


def session_ends_while_the_wait_queue_is_served(bench):
    one, two = two_in_wait_queue(bench)
    seen = one.look()
    bench.during(lambda: one.serve(seen), lambda: two.engine.sessions.fence(two.session, bench.beats()[two.session]))
    assert bench.counts() == (1, 0, 1), "a session that has ended was given a lease"


def recovery_of_one_that_waits(bench):
    """Its owner does not know whether it stands in the wait queue."""
    one, two = two_in_wait_queue(bench)
    two.engine.sessions.recover(two.session, two.demand.first)
    one.serve()
    assert bench.counts() == (1, 0, 1), "the message granted to the other one is not known to it"


def test_two_that_serve(bench):
    """The second one believes that the first is dead. No guard of its own: both want the same message."""
    one, two = two_in_wait_queue(bench)
    seen = one.look()
    found = []

    def meanwhile():
        two.engine.messages.evict(two.demand, two.look().first)
        found.extend(each.payload for each in two.serve().deliveries)

    served = bench.during(lambda: one.serve(seen), meanwhile)
    assert isinstance(served, Served)
    assert served.ended
    assert (found, bench.counts()) == ([b"a"], (1, 0, 1))


def test_a_service_that_is_outrun_takes_less(bench):
    """A consumer that takes little past the wait queue would win each race, and all who stand in it would wait."""
    competitors = [Competitor(bench, 10) for _ in range(4)]
    seen = competitors[0].look()
    bench.put(*[b"m"] * 50)
    other, session, database = bench.another(), bench.engine.sessions.open({}), bench.database
    assert isinstance(database, FaultyDatabase)
    races = iter(range(3))

    def outrun():
        database.before_commit = None
        other.messages.claim(session, ["q"], 1)
        database.before_commit = outrun if next(races, None) is not None else None

    database.before_commit = outrun
    began_s = bench.clock.monotonic()
    assert len(competitors[0].serve(seen).deliveries) + sum(len(each.collect()) for each in competitors[1:]) == 40 >> 4
    assert bench.clock.monotonic() == began_s, "and does not rest meanwhile"
    check_counts(bench.engine)


GUARDS = {
    leave_while_the_wait_queue_is_served: "who serves does not look at who has left",
    session_ends_while_the_wait_queue_is_served: "who serves does not look at who has left",
    recovery_of_one_that_waits: "a recovery leaves its demand in the wait queue",
    two_consumers_become_active: "consumers become active without a look at each other",
    cancel_while_another_takes_over: "a consumer leaves without a look at who is active",
    session_ends_while_another_takes_over: "a session leaves without a look at who is active",
    release_while_the_key_is_emptied: "a key goes idle without a look at its whole range",
    ack_while_the_key_is_parked: "a key is parked without a look at what ends meanwhile",
    two_claims_of_a_limited_key: "claims of one limited key do not exclude each other",
    first_limit_of_a_queue_while_claimed: "a claim does not conflict with how its queues are worked on",
    ack_while_its_queue_gets_its_first_limit: "acks of who joins do not conflict with the first limit",
    pause_while_claimed: "a claim does not conflict with how its queues are worked on",
    arrival_while_a_competitor_admits_it: "an arrival is admitted at snapshot",
    message_without_a_key_while_a_competitor_admits_it: "messages without a key are admitted at snapshot",
    two_claims: "a claim does not conflict on what it takes",
    message_that_comes_back_between: "a run conflicts on its rows only",
    claim_while_the_session_ends: "a claim does not conflict with the end of its session",
    ack_while_swept: "an acknowledgement does not conflict on the lease",
    sweep_while_acked: "the sweep does not conflict on the leases",
    fence_while_beating: "fencing ignores the last beat",
    two_promoters: "two promoters do not conflict",
    delay_while_the_last_delayed_is_promoted: "two promoters do not conflict",
    consume_while_the_queue_expires: "a queue expires under its consumer",
    claim_while_purged: "a purge does not conflict with claims",
    expired_while_moved: "what has expired is not looked at",
    orphan_while_it_comes_back: "an orphan is not looked at",
    burial_while_its_copy_is_cleared: "a copy is taken without a look at who clears it",
    newer_messages_brought_back_by_two: "two that bring newer messages back do not conflict",
}
races = pytest.mark.parametrize("race", GUARDS, ids=lambda race: race.__name__)


@races
def test_race(bench, race):
    race(bench)


@races
def test_without_its_guard_the_race_is_lost(bench, race):
    with twin(GUARDS[race]), pytest.raises((AssertionError, pytest.fail.Exception)):
        race(bench)


def test_claims_of_many_threads_share_no_lease_number(monkeypatch):
    """A number given twice would overwrite a lease, and lose its message."""
    bench, numbers = Bench(FaultyDatabase()), list[range]()

    def note(_work, _queues, window, *_):
        numbers.append(range(window.next_number, window.next_number + window.limit))
        return []

    def claim_often():
        for _ in range(50):
            bench.take(1000)

    monkeypatch.setattr(claim, "claim", note)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=claim_often) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len({number for block in numbers for number in block}) == sum(map(len, numbers)) == 8 * 50 * 1000
