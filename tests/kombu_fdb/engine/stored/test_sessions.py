"""A session's heartbeat as people see it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.conformance.queue import Bench

from kombu_fdb.keyspace.codec import encode_json
from kombu_fdb.testing.memory import MemoryDatabase


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(MemoryDatabase())
    yield bench
    bench.check()


def test_a_session_tells_when_it_beat_by_its_own_clock(bench: Bench) -> None:
    other = bench.engine.sessions.open({"host": "b"}, ttl_s=12.5)
    bench.later(5)
    bench.engine.sessions.beat(other, ttl_s=12.5)
    beats = {each.session_id: each for each in bench.engine.inspect.sessions()}
    assert beats[other].beat_ms == beats[bench.session].beat_ms + 5_000 == bench.clock.wall_ms()
    assert beats[other].ttl_s == 12.5


def test_a_beat_of_an_earlier_version_has_no_clock(bench: Bench) -> None:
    keys, old = bench.engine.keys, bytes(16)
    bench.write(lambda tr: tr.set(keys.session(old), encode_json({})))
    bench.write(lambda tr: tr.set_versionstamped_value(keys.beat(old), suffix=(30_000).to_bytes(4, "big")))
    (session,) = (each for each in bench.engine.inspect.sessions() if each.session_id == old)
    assert (session.beat_ms, session.ttl_s) == (0, 30.0)


def test_which_leases_stand(bench: Bench) -> None:
    """Those of a session that was fenced do not, nor those that were settled."""
    bench.put(b"a", b"b", b"c", b"d")
    first, second = (each.lease for each in bench.take(2))
    other = bench.another()
    stranger = other.sessions.open({})
    third, fourth = (each.lease for each in bench.take(2, session=stranger))
    assert first and second and third and fourth  # noqa: PT018
    bench.engine.messages.ack([second])
    assert bench.engine.messages.holds([first, second, third, fourth]) == [True, False, True, True]
    assert bench.engine.sessions.fence(stranger, bench.beats()[stranger])
    assert bench.engine.messages.holds([third, first, fourth]) == [False, True, False]
    assert bench.engine.messages.holds([]) == []
