"""Whose silence is that of a process that computes. What is seen of processes is told here."""

import pytest

from kombu_fdb.process import duty_cycle
from kombu_fdb.process.duty_cycle import Reclaim

PID, TTL_S = 77, 8.0


class Host:
    """The processes that can be seen, and how they go on."""

    def __init__(self, bench):
        self.bench = bench
        self.running = {PID: "it"}
        #: How much of a core each has.
        self.share = 0.0
        self.asked = 0

    def see(self, pid):
        self.asked += 1
        return self.running.get(pid, ""), self.share * self.bench.clock.monotonic()


@pytest.fixture
def host(bench, monkeypatch):
    host = Host(bench)
    monkeypatch.setattr(duty_cycle, "see", host.see)
    return host


def opened(bench, **description):
    session = bench.engine.sessions.open({"pid": PID, "process": "it", **description}, ttl_s=TTL_S)
    bench.put(b"a")
    assert bench.take(1, session=session)
    return session


def sweep(bench, seconds):
    """Messages that came back, while only the sweeper beats."""
    duties, released = bench.duties(), 0
    for _ in range(int(2 * seconds)):
        bench.later(0.5)
        bench.engine.sessions.beat(bench.session)
        released += duties.sweep()
    return released


def test_a_silent_process_that_computes_keeps_its_messages_for_as_long_as_that(bench, host):
    session = opened(bench)
    host.share = 0.06
    assert sweep(bench, 50 * TTL_S) == 0
    assert bench.engine.sessions.beat(session, ttl_s=TTL_S)
    host.share = 0.0
    assert sweep(bench, 2.5 * TTL_S) == 1


@pytest.mark.parametrize(
    ("share", "description"),
    [
        (0.04, {}),  # an idle worker has threads that look at the store, while its heartbeat hangs
        (1.0, {"process": "another"}),
        (1.0, {"process": ""}),
        (1.0, {"process": None}),
        (1.0, {"pid": None}),
        (1.0, {"pid": "77"}),
        (1.0, {"pid": 78}),
        (1.0, {"pid": -7}),
    ],
)
def test_only_its_own_process_that_computes_speaks_for_a_session(bench, host, share, description):
    """For at least a twentieth of the time."""
    opened(bench, **description)
    host.share = share
    assert sweep(bench, 2 * TTL_S) == 1


def test_a_process_that_is_gone_is_dead_after_its_time_to_live_and_a_look(bench, host):
    opened(bench)
    host.share = 1.0
    assert sweep(bench, 3 * TTL_S) == 0
    host.running.clear()
    assert sweep(bench, TTL_S + 0.5) == 1


def test_a_session_that_was_fenced_is_cleared_although_its_process_computes(bench, host):
    """What has no record any more is not to be spared: its sweeper has died, or its process has another one."""
    session = opened(bench)
    host.share = 1.0
    assert bench.engine.sessions.fence(session, bench.beats()[session])
    assert sweep(bench, 2 * TTL_S) == 1


def test_of_sessions_that_beat_no_process_is_looked_at(bench, host):
    session, duties = opened(bench), bench.duties()
    for _ in range(40):
        bench.later(1.0)
        bench.engine.sessions.beat(bench.session)
        bench.engine.sessions.beat(session, ttl_s=TTL_S)
        duties.sweep()
    assert host.asked == 0


def test_on_a_full_disk_too_who_computes_is_spared(bench, host):
    session = opened(bench)
    host.share = 1.0
    reclaim = Reclaim(bench.clock)
    for _ in range(100):
        bench.later(0.5)
        bench.engine.sessions.beat(bench.session)
        assert not reclaim.run(bench.engine)
    host.share = 0.0
    for _ in range(40):
        bench.later(0.5)
        bench.engine.sessions.beat(bench.session)
        if reclaim.run(bench.engine):
            break
    assert session not in bench.beats()
