"""A consumer that ends while the outcome of a claim that was made for it is unknown (``single.py``)."""

import sys
from itertools import count
from threading import Event, Thread

import pytest
from kit.conformance.queue import Bench
from kit.faults import Fault, FaultyDatabase, FaultyTransaction
from kit.simulation.connection import Flag

from kombu_fdb.engine.upkeep import release
from kombu_fdb.errors import CommitUnknown, Outrun
from kombu_fdb.model import SessionId
from kombu_fdb.process.client import Client
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.settings.location import MemoryLocation
from kombu_fdb.settings.options import Options
from kombu_fdb.testing.clock import ManualClock

OPTIONS = Options()


class Process:
    """One with a consumer of ``q``, which serves one at a time."""

    def __init__(self, bench, tag):
        engine = bench.another()
        self.tag = tag
        self.client = Client(MemoryLocation("ended"), OPTIONS, engine)
        self.own = ClientSession(engine, OPTIONS, engine.sessions.open({}), Flag(), bench.clock)
        self.client._session = self.own
        engine.queues.add_consumer(self.own.session_id, "q", tag)

    def take(self, limit=1):
        return [each.payload for each in self.own.claim(["q"], limit, consumers={"q": self.tag})]

    def cancel(self):
        self.client.remove_consumer(self.own.session_id, "q", self.tag)

    def close(self):
        self.client.leave([self.tag])


def take_in_doubt(bench, process, limit=1, lands_s=0.0):
    """Of which it does not hear."""
    database = bench.database
    assert isinstance(database, FaultyDatabase)
    database.faults.at_commits(Fault.COMMIT_LATE)
    database.faults.at_landings(lands_s)
    with pytest.raises(CommitUnknown):
        process.take(limit)
    return database


ENDS = [Process.cancel, Process.close]


@pytest.fixture
def bench():
    clock = ManualClock()
    bench = Bench(FaultyDatabase(clock=clock))
    bench.clock = clock
    bench.engine = bench.another()
    bench.session = SessionId(bench.engine.sessions.open({}))
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-single-active-consumer": True}))
    bench.put(b"a", b"b")
    return bench


@pytest.mark.parametrize("end", ENDS)
def test_what_waits_for_its_release_is_back_before_the_next_consumer(bench, end):
    """Its channel may have been closed before, or its drain interrupted."""
    one, two = Process(bench, "one"), Process(bench, "two")
    (held,) = one.own.claim(["q"], 1, consumers={"q": one.tag})
    one.client.release_later([held.lease])
    end(one)
    assert two.take(2) == [b"a", b"b"]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("lands_s", [None, 0.0, 1.0, 4.0])
def test_its_late_claim_does_not_leave_it_active(bench, end, lands_s):
    one, two = Process(bench, "one"), Process(bench, "two")
    take_in_doubt(bench, one, lands_s=lands_s)
    end(one)
    bench.later(2.0)
    one.own.recover()
    bench.later(3.0)
    one.own.recover()
    assert [two.take(), two.take()] == [[b"a"], [b"b"]]


@pytest.mark.parametrize("end", ENDS)
def test_nor_does_one_that_another_thread_makes_meanwhile(bench, end):
    """It would run again after the end, and whatever has recovered it before."""
    one, two = Process(bench, "one"), Process(bench, "two")
    database = bench.database
    assert isinstance(database, FaultyDatabase)

    def meanwhile():
        database.before_commit = None
        end(one)
        one.own.recover()

    database.before_commit = meanwhile
    with pytest.raises(Outrun):
        one.take()
    assert not one.own._suspects
    assert [two.take(), two.take()] == [[b"a"], [b"b"]]


@pytest.mark.parametrize("line", range(1, 4))
def test_a_claim_that_ends_while_another_thread_gives_it_up_is_kept_or_released(bench, monkeypatch, line):
    """It was both, if it ended between the look whether it is under way and the note that it is suspect."""
    one = Process(bench, "one")
    claim, lines, stopped, goes_on = one.own._engine.messages.claim, count(1), Event(), Event()

    def trace(frame, event, _):
        if frame.f_code is ClientSession.give_up.__code__:
            if event == "line" and next(lines) == line:
                stopped.set()
                goes_on.wait(5)
            return trace
        return None

    def give_up():
        sys.settrace(trace)
        try:
            one.own.give_up(*one.own._claims)
        finally:
            sys.settrace(None)
            stopped.set()

    giving_up = Thread(target=give_up)

    def claim_and_wait(*arguments, **named):
        found = claim(*arguments, **named)
        giving_up.start()
        stopped.wait(5)
        return found

    monkeypatch.setattr(one.own._engine.messages, "claim", claim_and_wait)
    taken = one.take()
    goes_on.set()
    giving_up.join()
    one.own.recover()
    assert bench.counts() == (2 - len(taken), 0, len(taken))


def test_a_consumer_that_goes_on_stays_active(bench):
    """A recovery says nothing of it, nor does the end of another one in its process."""
    one, two = Process(bench, "one"), Process(bench, "two")
    assert one.take() == [b"a"]
    take_in_doubt(bench, one, lands_s=1.0)
    one.client.leave(["another"])
    bench.later(2.0)
    one.own.recover()
    assert two.take() == []
    assert one.take() == [b"b"]


@pytest.mark.parametrize("end", ENDS)
def test_the_next_one_begins_with_what_its_claim_had_leased(bench, end):
    """Seed 4022 of the box: it began with a later message, and got this one half a second afterwards."""
    one, two = Process(bench, "one"), Process(bench, "two")
    take_in_doubt(bench, one)
    bench.later(1.0)
    assert two.take() == []
    end(one)
    assert [two.take(), two.take()] == [[b"a"], [b"b"]]


def test_the_next_one_waits_for_all_that_a_large_claim_had_leased(bench, monkeypatch):
    """Which takes its recovery more than one transaction."""
    bench.put(b"c")
    monkeypatch.setattr(release, "MESSAGES_PER_TRANSACTION", 1)
    one, two = Process(bench, "one"), Process(bench, "two")
    database = take_in_doubt(bench, one, 2)
    bench.later(1.0)
    taken = []

    def look():
        database.before_commit = None
        taken.extend(two.take(3))
        database.before_commit = look

    database.before_commit = look
    one.cancel()
    database.before_commit = None
    assert taken + two.take(3) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("end", ENDS)
def test_the_next_one_waits_for_the_end_of_a_session_that_was_fenced(bench, end):
    one, two = Process(bench, "one"), Process(bench, "two")
    assert one.take() == [b"a"]
    sessions = bench.engine.sessions
    (beat,) = [value for session_id, value, _ in sessions.beats() if session_id == one.own.session_id]
    assert sessions.fence(one.own.session_id, beat)
    end(one)
    assert two.take() == []
    sessions.release(one.own.session_id)
    assert [two.take(), two.take()] == [[b"a"], [b"b"]]


@pytest.mark.parametrize("end", ENDS)
def test_the_next_one_waits_for_all_that_its_claims_had_leased(bench, end):
    """Of a broker that several threads take from."""
    bench.put(b"c")
    one, two = Process(bench, "one"), Process(bench, "two")
    messages, database = one.own._engine.messages, bench.database
    assert isinstance(database, FaultyDatabase)
    claim = messages.claim

    def is_lost(*args, **named):
        claim(*args, **named)
        if messages.claim is is_lost:
            messages.claim = lose
            with pytest.raises(CommitUnknown):
                one.take()
        raise CommitUnknown

    def lose(*args, **named):
        claim(*args, **named)
        raise CommitUnknown

    messages.claim = is_lost
    with pytest.raises(CommitUnknown):
        one.take()
    taken = []

    def look():
        database.before_commit = None
        taken.extend(two.take())
        database.before_commit = look

    database.before_commit = look
    end(one)
    database.before_commit = None
    assert taken + two.take(3) == [b"a", b"b", b"c"]


def test_a_claim_of_another_thread_does_not_land_in_the_middle_of_the_end(bench):
    """The next consumer would find its place vacant, and its message leased."""
    one, two = Process(bench, "one"), Process(bench, "two")
    database = bench.database
    assert isinstance(database, FaultyDatabase)

    def meanwhile():
        database.before_commit = None
        one.own.end_consumers(["one"])

    database.before_commit = meanwhile
    with pytest.raises(Outrun):
        one.take()
    one.client.engine.queues.leave(one.own.session_id, ["one"])
    assert two.take() == [b"a"]


def test_a_claim_that_recovers_an_earlier_one_first_is_under_way(bench, monkeypatch):
    """Its consumer may end meanwhile."""
    one, two = Process(bench, "one"), Process(bench, "two")
    one.own._suspect(one.own._engine.messages.reserve())

    def recover():
        monkeypatch.undo()
        one.cancel()

    monkeypatch.setattr(one.own, "recover", recover)
    with pytest.raises(Outrun):
        one.take()
    assert two.take() == [b"a"]


def test_an_end_asks_the_store_once(bench, monkeypatch):
    one, asked = Process(bench, "one"), list[str]()
    assert one.take() == [b"a"]
    for name in ("get", "get_many", "get_range", "get_together"):
        monkeypatch.setattr(FaultyTransaction, name, noted(asked, getattr(FaultyTransaction, name)))
    one.close()
    assert asked == ["get_together"]


def noted(asked, read):
    def wrapped(*args, **named):
        before = len(asked)
        found = read(*args, **named)
        asked[before:] = [read.__name__]  # and not what it calls itself
        return found

    return wrapped
