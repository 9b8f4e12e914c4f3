"""The steps of the two threads that keep a session."""

from unittest.mock import MagicMock, patch

import pytest
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase

from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.process import duties as duties_of
from kombu_fdb.process.duty_cycle import LIVING, ROLE_TTL_S, PromoterRole
from kombu_fdb.process.session_threads import logged


class Process:
    """Serves on a bench; ``rung``: how often its duties thread was woken."""

    def __init__(self, bench):
        self.client_session = MagicMock(lost=False)
        self._duties = bench.duties(bench.engine.sessions.open({}))

    @property
    def rung(self):
        return int(self.client_session.bell.ring.call_count)

    def serve(self):
        """Until it would sleep."""
        rang = self.rung > 0
        self.client_session.bell.ring.reset_mock()
        while self._duties.serve(self.client_session, lambda: None, rang=rang) == 0.0:
            rang = False

    def leave(self):
        self._duties.leave(self.client_session)


def delay(bench):
    bench.put(b"later", due_ms=bench.clock.wall_ms() + 60_000)


def test_of_a_fleet_only_the_promoter_wakes_up_for_a_delayed_message():
    """All of its processes did, for each: a thousand of them as often as messages were delayed."""
    bench = Bench(FaultyDatabase())
    promoter, other = Process(bench), Process(bench)
    for _ in range(3):
        promoter.serve()
        other.serve()
        delay(bench)
        assert (promoter.rung, other.rung) == (1, 0)
    promoter.leave()
    bench.later(1)
    other.serve()
    delay(bench)
    assert (promoter.rung, other.rung) == (1, 1)


def test_a_promoter_that_was_replaced_sleeps_on():
    """It stood still for so long that another process has taken its role."""
    bench = Bench(FaultyDatabase())
    replaced, other = Process(bench), Process(bench)
    replaced.serve()
    other.serve()
    for _ in range(int(ROLE_TTL_S) + 2):
        bench.later(1)
        other.serve()
    replaced.serve()
    delay(bench)
    assert (replaced.rung, other.rung) == (0, 1)


class Fleet:
    """Duties of sessions that beat, until they are killed; in turns of a second."""

    def __init__(self, size):
        self.bench = Bench(FaultyDatabase())
        self._living = {session: self.bench.duties(session) for session in self._open(size)}
        self.bench.engine.sessions.close(self.bench.session)

    def _open(self, size):
        return sorted(self.bench.engine.sessions.open({}) for _ in range(size))

    @property
    def promoter(self):
        return next((session for session, duties in self._living.items() if duties.promotes), None)

    def kill(self, *sessions):
        for session in sessions:
            del self._living[session]

    def observers(self, session):
        """In the ring, its observers stand before it."""
        ring = [*self._living] * 2
        at = ring.index(session, LIVING)
        return ring[at - LIVING : at]

    def pass_second(self):
        self.bench.later(1)
        for session, duties in self._living.items():
            self.bench.engine.sessions.beat(session)
            duties.run_once()


def test_of_a_fleet_only_the_observers_of_the_promoter_look_at_its_role_each_second():
    """All of its processes did."""
    size, seconds = 30, 60
    fleet = Fleet(size)
    for _ in range(10):
        fleet.pass_second()
    looks = 0
    look = fleet.bench.engine.sessions.role_record

    def count(role):
        nonlocal looks
        looks += 1
        return look(role)

    with patch.object(fleet.bench.engine.sessions, "role_record", count):
        for _ in range(seconds):
            fleet.pass_second()
    near, far = 1 + LIVING, size - 1 - LIVING
    assert looks <= seconds * (near + far / ROLE_TTL_S) + far


def test_a_session_that_comes_later_is_observed_from_the_next_sweep_on():
    """It may be the promoter next."""
    bench = Bench(FaultyDatabase())
    duties = bench.duties()
    bench.engine.sessions.open({})
    duties.sweep()
    later = bench.engine.sessions.open({})
    observed = [duties.sweep_duty.observes(later)]
    duties.sweep()
    assert [*observed, duties.sweep_duty.observes(later)] == [False, True]


@pytest.mark.parametrize("with_its_observers", [False, True])
def test_a_promoter_that_dies_is_replaced(*, with_its_observers):
    """By one of its observers in time; if they died with it, by one that looks more seldom."""
    fleet = Fleet(30)
    for _ in range(20):
        fleet.pass_second()
    promoter = fleet.promoter
    assert promoter is not None
    fleet.kill(*(fleet.observers(promoter) if with_its_observers else []), promoter)
    seconds = 0
    while fleet.promoter is None:
        fleet.pass_second()
        seconds += 1
    assert seconds <= (2 * ROLE_TTL_S if with_its_observers else ROLE_TTL_S) + 1


def test_a_promoter_whose_renewal_failed_looks_again_at_once():
    """It had taken the role from a beat, and had meant to look at it five seconds later."""
    bench = Bench(FaultyDatabase())
    sessions, clock = bench.engine.sessions, bench.clock
    other, own = sessions.open({}), sessions.open({})
    role = PromoterRole(bench.engine, clock, own, observes=lambda _: False)
    for _ in range(3):
        bench.later(ROLE_TTL_S)
        assert sessions.hold_role("promoter", other, None)
        assert not role.hold()
    sessions.leave_role("promoter", other)
    assert not role.hold()
    role.brought = None, clock.monotonic()
    assert role.hold()
    bench.later(2)
    with patch.object(sessions, "hold_role", side_effect=StoreUnavailable), pytest.raises(StoreUnavailable):
        role.hold()
    assert role.hold()


def test_deferred_calls_are_made_although_a_duty_is_refused():
    """On a full disk one can be in each round, for hours."""
    bench, deferred = Bench(FaultyDatabase()), MagicMock()
    duties = bench.duties(bench.session)
    with (
        patch.object(duties, "run_once", side_effect=StoreUnavailable("the disk is full")),
        pytest.raises(StoreUnavailable),
    ):
        duties.serve(MagicMock(), deferred, rang=False)
    deferred.assert_called_once_with()


def test_the_end_of_failures_is_told_in_words_that_suit_one_and_many(caplog):
    """It said that the duties works again."""
    for what in ("the duties", "the heartbeat to the store"):
        tell = logged(what)
        for error in (StoreUnavailable(), StoreUnavailable(), None, None):
            tell(error)
    assert caplog.messages[1::2] == ["the duties succeeded again", "the heartbeat to the store succeeded again"]


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_new_duty_is_one_row_of_the_table(monkeypatch, *, everywhere):
    """Its name, what it is about, its step, its pause, and who does it. Where it fails, it is set aside and shown."""
    bench, made, done = Bench(FaultyDatabase()), duties_of.table, []

    def with_row(engine, clock, guard, *others):
        def step(subject):
            done.append(clock.monotonic())
            raise ValueError(subject)

        row = duties_of.routine("x", lambda: ["a"], step, 20, everywhere=everywhere)
        return [*made(engine, clock, guard, *others), row]

    monkeypatch.setattr(duties_of, "table", with_row)
    both = [bench.duties(), bench.duties(bench.engine.sessions.open({}))]
    for _ in range(60):
        for each in both:
            each.run_once()
        bench.later(0.5)
    assert len(done) == (4 if everywhere else 2)
    assert [(each.duty, each.subject) for each in bench.engine.upkeep.asides()] == [("x", "a")]
