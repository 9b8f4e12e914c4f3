"""Settling many leases at once, some of which are gone; and what comes back."""

import pytest
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase

from kombu_fdb.keyspace.codec import Message, encode_lease


@pytest.fixture
def bench():
    bench = Bench(FaultyDatabase())
    yield bench
    bench.check()


@pytest.mark.parametrize("verb", ["ack", "release", "reject"])
def test_those_behind_a_lost_lease_are_settled(bench, verb):
    bench.put(b"a", b"b", b"c")
    lost, *others = (each.lease for each in bench.take())
    bench.engine.messages.ack([lost])
    settle = getattr(bench.engine.messages, verb)
    assert settle([lost, others[0], others[0], others[1]]) == [False, True, False, True]
    assert bench.counts()[2] == 0


def test_what_is_released_until_this_moment_is_ready_at_once(bench):
    bench.put(b"a", b"b")
    first, second = (each.lease for each in bench.take())
    now_ms = bench.clock.wall_ms()
    bench.engine.messages.release([first], due_ms=now_ms)
    bench.engine.messages.release([second], due_ms=now_ms + 1)
    assert bench.counts() == (1, 1, 0)


def test_a_record_that_can_not_be_read_does_not_come_back(bench):
    """It is unknown how often it has come back already."""
    bench.put(b"a")
    (held,) = bench.take()
    row = bench.engine.keys.lease(*held.lease)

    def damage(tr):
        queue, place, _ = Message.of_lease(tr.get(row))
        tr.set(row, encode_lease(Message(queue, place, b"\xff")))

    bench.write(damage)
    assert bench.engine.messages.release([held.lease]) == [True]
    assert (bench.counts(), bench.counts("q.dead")) == ((0, 0, 0), (1, 0, 0))


@pytest.mark.parametrize("verb", ["ack", "release", "reject"])
def test_a_lease_that_can_not_be_read_stays_among_those_that_are_settled(verb):
    """Leases with numbers in a row are cleared at once; the sweep keeps this one for a person to look at."""
    bench = Bench(FaultyDatabase())
    bench.put(b"a", b"b", b"c")
    leases = [each.lease for each in bench.take()]
    rows = [bench.engine.keys.lease(*each) for each in leases]
    bench.write(lambda tr: tr.set(rows[1], b"\xff"))
    settled = getattr(bench.engine.messages, verb)(leases)
    assert settled == [True, False, True]
    left = []
    bench.write(lambda tr: left.extend(tr.get_many(rows)))
    assert left == [None, b"\xff", None]


@pytest.mark.parametrize("verb", ["ack", "release", "reject"])
@pytest.mark.parametrize("is_a_lease", [False, True])
def test_a_stray_row_stays_between_leases_that_are_settled(verb, is_a_lease):
    """And each lease is found, however many of those there are."""
    bench = Bench(FaultyDatabase())
    bench.put(b"a", b"b", b"c")
    leases = [each.lease for each in bench.take()]
    row = bench.engine.keys.lease(*leases[0])
    others = [row + suffix for suffix in (b"\x00", b"\x14", b"\xff")]
    left = []

    def damage(tr):
        left.append((tr.get(row) or b"") if is_a_lease else b"\xff")
        for each in others:
            tr.set(each, left[0] or b"")

    bench.write(damage)
    assert getattr(bench.engine.messages, verb)(leases) == [True] * 3
    assert bench.counts()[2] == 0
    bench.write(lambda tr: left.extend(tr.get_many(others)))
    assert left == left[:1] * 4


def test_what_is_gone_among_leases_in_a_row_is_counted_as_late(bench):
    bench.put(b"a", b"b", b"c")
    leases = [each.lease for each in bench.take()]
    bench.engine.messages.ack([leases[1]])
    assert bench.engine.messages.ack(leases) == [True, False, True]
    assert bench.engine.messages.ack(leases) == [False] * 3


def test_many_are_settled_in_parts_and_each_is_told(bench):
    bench.put(*(b"%d" % number for number in range(5)))
    leases = [each.lease for each in bench.take()]
    bench.engine.messages.ack(leases[2:3])
    bench.engine.messages._settlements.size = 2
    assert bench.engine.messages.ack(leases) == [True, True, False, True, True]
    assert bench.counts() == (0, 0, 0)
