"""On a full disk: sessions of workers that crash at each start use up its reserve, and are swept by who can't start."""

import time

import pytest
from kit.disks import fill_queue, small_broker

from kombu_fdb.engine.upkeep.quarantine import Aside
from kombu_fdb.errors import StoreFull
from kombu_fdb.routing.tables import QueueDeclaration

PATIENCE_S = 60.0


@pytest.fixture
def broker(tmp_path):
    """Full of messages."""
    with small_broker(tmp_path / "disk", PATIENCE_S) as broker:
        for size in (20_000, 100):
            fill_queue(broker.queue("q"), size)
        yield broker


def crash(engine, number):
    """A worker's start, and no more."""
    engine.sessions.open({"host": "here", "pid": number, "program": "celery"}, ttl_s=1)
    name = f"{number}.reply"
    engine.queues.declare(QueueDeclaration(name, arguments={"x-expires": 10_000}))


def test_workers_that_crashed_at_each_start_keep_no_other_from_starting(broker, monkeypatch):
    """Those who live are not ended with them."""
    engine = broker.queue("q")._engine
    living = engine.sessions.open({})
    with monkeypatch.context() as patch, pytest.raises(StoreFull):
        patch.setattr(engine.transactions, "make_room", lambda: False)
        number = 0
        while True:
            crash(engine, number)
            number += 1
    until = time.monotonic() + PATIENCE_S
    job = None
    while job is None and time.monotonic() < until:
        assert engine.sessions.beat(living)
        try:
            job = broker.queue("q").take(timeout=PATIENCE_S)
        except StoreFull:
            continue
    assert job is not None
    job.ack()
    assert living in [session_id for session_id, _, _ in engine.sessions.beats()]


def test_a_beat_that_has_no_room_to_tell_what_is_consumed_is_a_beat(broker):
    """A worker was taken for dead because its first beat behind its consumers was longer than the one before."""
    engine = broker.queue("q")._engine
    living = engine.sessions.open({})
    (before,) = [beat for session_id, beat, _ in engine.sessions.beats() if session_id == living]
    for size in (500, 0):
        with pytest.raises(StoreFull):
            for number in range(100_000):
                engine.upkeep.set_aside(Aside("duty", f"{size}-{number}", "x" * size, 1, 0))
    assert engine.sessions.beat(living, consumed=[f"queue-{number:060}" for number in range(100)])
    (after,) = [beat for session_id, beat, _ in engine.sessions.beats() if session_id == living]
    assert after != before
