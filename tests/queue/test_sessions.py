"""What people are shown of sessions, over the memory store; the conformance suite holds what depends on the store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kombu_fdb.keyspace.codec import encode_json
from kombu_fdb.queue.session import LEASES_COUNTED
from kombu_fdb.testing.memory import MemoryDatabase
from kombu_fdb.testing.queue_conformance import Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(MemoryDatabase())
    yield bench
    bench.check()


def test_a_session_tells_who_it_is_when_it_beat_and_what_it_holds(bench: Bench) -> None:
    other = bench.engine.open_session({"host": "b", "pid": 7}, ttl_s=12.5)
    bench.put(*[b"a"] * 3)
    bench.take(2, session=other)
    bench.later(5)
    bench.engine.beat(other, ttl_s=12.5)
    sessions = {each.session: each for each in bench.engine.sessions()}
    assert sessions.keys() == {bench.session, other}
    mine, theirs = sessions[bench.session], sessions[other]
    assert (mine.description, mine.leased, mine.ttl_s, mine.fenced) == ({"host": "test"}, 0, 30.0, False)
    assert (theirs.description, theirs.leased, theirs.ttl_s) == ({"host": "b", "pid": 7}, 2, 12.5)
    assert theirs.beat_ms == mine.beat_ms + 5_000 == bench.clock.wall_ms()


def test_a_fenced_session_is_shown_until_its_messages_are_back(bench: Bench) -> None:
    bench.put(b"a")
    bench.take()
    bench.engine.fence(bench.session, bench.beats()[bench.session])
    (session,) = bench.engine.sessions()
    assert (session.fenced, session.leased, session.description) == (True, 1, {})
    bench.engine.release_session(bench.session)
    assert bench.engine.sessions() == []


def test_leases_are_counted_so_far(bench: Bench) -> None:
    bench.put(*[b"a"] * (LEASES_COUNTED + 5))
    bench.take(1_000)
    assert [each.leased for each in bench.engine.sessions()] == [LEASES_COUNTED]


def test_a_beat_of_an_earlier_version_has_no_clock(bench: Bench) -> None:
    keys, old = bench.engine.keys, bytes(16)
    bench.write(lambda tr: tr.set(keys.session(old), encode_json({})))
    bench.write(lambda tr: tr.set_versionstamped_value(keys.beat(old), suffix=(30_000).to_bytes(4, "big")))
    (session,) = (each for each in bench.engine.sessions() if each.session == old)
    assert (session.beat_ms, session.ttl_s) == (0, 30.0)
    assert bench.engine.beats()[0][2] == 30.0
