"""Sessions: their heartbeats as people see them, which leases stand, who has a role."""

import pytest

from kombu_fdb.engine.session import UNREADABLE_TTL_S, description_of
from kombu_fdb.keyspace.codec import encode_json


def test_a_session_tells_when_it_beat_by_its_own_clock(bench):
    other = bench.engine.sessions.open({"host": "b"}, ttl_s=12.5)
    bench.later(5)
    bench.engine.sessions.beat(other, ttl_s=12.5)
    beats = {each.session_id: each for each in bench.engine.inspect.sessions()}
    assert beats[other].beat_ms == beats[bench.session].beat_ms + 5_000 == bench.clock.wall_ms()
    assert (beats[other].ttl_s, beats[other].host) == (12.5, "b")


@pytest.mark.parametrize(
    ("beat", "ttl_s"),
    [
        (bytes(10) + (30_000).to_bytes(4, "big"), 30.0),  # an earlier version's
        (b"", UNREADABLE_TTL_S),
        (b"shorter", UNREADABLE_TTL_S),
        (bytes(10), UNREADABLE_TTL_S),
    ],
)
def test_a_beat_without_a_clock_leaves_time_for_another(bench, beat, ttl_s):
    keys, odd = bench.engine.keys, bytes(16)
    bench.write(lambda tr: tr.set(keys.session(odd), encode_json({})))
    bench.write(lambda tr: tr.set(keys.beat(odd), beat))
    (session,) = (each for each in bench.engine.inspect.sessions() if each.session_id == odd)
    assert (session.beat_ms, session.ttl_s) == (0, ttl_s)


def test_a_role_is_freed_by_its_holder_only(bench):
    sessions, holder = bench.engine.sessions, bench.session
    other = sessions.open({})
    assert sessions.hold_role("promoter", holder, None)
    sessions.leave_role("promoter", other)
    assert not sessions.hold_role("promoter", other, None)
    for _ in range(2):
        sessions.leave_role("promoter", holder)
    assert sessions.hold_role("promoter", other, None)


def test_which_leases_stand(bench):
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


def test_a_session_s_neighbours_are_those_behind_it_in_the_ring(bench):
    ring = sorted([bench.session, *(bench.engine.sessions.open({}) for _ in range(4))])
    for at in range(5):
        found = bench.engine.sessions.neighbours(ring[at], 2)
        assert [session_id for session_id, *_ in found] == [ring[(at + step) % 5] for step in range(3)]
    assert [session_id for session_id, *_ in bench.engine.sessions.neighbours(ring[3], 9)] == ring[3:] + ring[:3]


@pytest.mark.parametrize("said", [b"", b"{", b"[1]", b"5"])
def test_what_a_session_says_of_itself_is_an_object_or_nothing(said):
    assert description_of(said) == {}
    assert description_of(encode_json({"host": "b"})) == {"host": "b"}
