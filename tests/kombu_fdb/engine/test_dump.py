"""A dump has every message of its queue, however many parts it takes, and whatever stands between them."""

import re
from functools import partial

import pytest
from kit.conformance.newer import make_newer
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase

from kombu_fdb.engine import transfer
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import NO_PRIORITY, Publication
from kombu_fdb.primitives.ranges import LATEST_MS


def dumped(bench, **how):
    return list(bench.engine.transfer.dump("q", **how))


def payloads(bench, **how):
    return [each.payload for each in dumped(bench, **how)]


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_in_parts_of_any_size(bench, monkeypatch, rows):
    """Each message once and in its order: those without a key, two keys, one after another, the delayed ones."""
    monkeypatch.setattr(transfer, "ROWS", rows)
    monkeypatch.setattr(transfer, "ROWS_OF_EACH", rows)
    monkeypatch.setattr(transfer, "SUBQUEUES", 1)
    texts = [b"%d" % number for number in range(5)]
    for key in ("", "b", "a"):
        bench.put(*(key.encode() + text for text in texts), key=key)
    for number, text in enumerate(texts):
        bench.put(b"later" + text, due_ms=2**41 + number, key="a")
    expected = [prefix + text for prefix in (b"", b"b", b"a", b"later") for text in texts]
    assert payloads(bench) == expected
    bench.take(2)
    assert sorted(payloads(bench, leased=True)) == sorted(expected)
    assert len(payloads(bench)) == len(expected) - 2, "leased ones only if they are asked for"


@pytest.mark.parametrize(("most_bytes", "parts"), [(1, 4), (20, 2), (30, 2), (1_000, 1)])
def test_as_many_payloads_as_a_transaction_reads(most_bytes, parts, monkeypatch):
    monkeypatch.setattr(transfer, "PAYLOAD_BYTES", most_bytes)
    bench = Bench(FaultyDatabase())
    bench.put(*(b"x" * 10 for _ in range(4)))
    looks = []
    opened = transfer._open_all
    monkeypatch.setattr(transfer, "_open_all", lambda *given: looks.append(len(given[0])) or opened(*given))
    assert len(payloads(bench)) == sum(looks) == 4
    assert len(looks) == parts


def test_all_that_is_known_of_a_message(bench):
    """Also of one that was leased before, and of one that comes from a dead letter."""
    soon_ms = bench.clock.wall_ms() + 60_000
    published = Publication(
        "", "q", b"x", priority=4, expires_ms=soon_ms, key="k", ttr_ms=5_000, task_id="t", message_id=b"m" * 16
    )
    bench.engine.publisher.publish([published])
    (held,) = bench.take()
    assert held.lease is not None
    bench.engine.messages.release([held.lease])
    (found,) = dumped(bench)
    assert (found.message_id, found.payload, found.priority, found.due_ms) == (b"m" * 16, b"x", 4, 0)
    assert (found.key, found.keyed, found.ttr_ms, found.task_id) == ("k", True, 5_000, "t")
    assert (found.published_ms, found.expires_ms, found.redeliveries) == (bench.clock.wall_ms(), soon_ms, 1)
    (again,) = bench.take()
    assert again.lease is not None
    (leased,) = dumped(bench, leased=True)
    assert (leased.state, leased.key, leased.keyed, leased.priority, leased.due_ms) == ("ready", "k", True, 4, 0)
    assert leased.redeliveries == 2
    bench.engine.messages.reject([again.lease])
    (letter,) = bench.engine.transfer.dump("q.dead")
    assert (letter.priority_before, letter.deaths[0].queue) == (4, "q")
    assert (letter.key, letter.keyed) == ("k", False), "it waits among all the others"


def test_a_delayed_message_has_a_key_and_waits_among_no_others(bench):
    bench.put(b"x", due_ms=2**41, key="k")
    (found,) = dumped(bench)
    assert (found.state, found.key, found.keyed, found.due_ms) == ("delayed", "k", False, 2**41)


def lease(bench, number, value):
    bench.write(lambda tr: tr.set(bench.engine.keys.lease(bench.session, number), value))


def test_an_unreadable_lease_hides_no_other(bench):
    lease(bench, 0, b"\xff")
    bench.put(b"a")
    bench.take()
    assert payloads(bench, leased=True) == [b"a"]
    bench.write(lambda tr: tr.clear(bench.engine.keys.lease(bench.session, 0)))


def test_a_message_whose_place_can_not_be_read_is_dumped(bench):
    """Ready, among those with a key, and delayed: as the last of all, and never before its time."""
    keys = bench.engine.keys
    bench.put(b"a", b"b", b"c", due_ms=2**41)
    ranges = (keys.ready("q"), keys.keyed("q"), keys.delayed("q"))
    for (key, value), prefix in zip(bench.engine.upkeep.rows(range_of(keys.delayed("q"))), ranges, strict=True):
        bench.write(partial(misplace, key, prefix + b"\x15odd", value))
    found = {each.payload: (each.state, each.key, each.priority, each.due_ms) for each in dumped(bench)}
    assert found == {
        b"a": ("ready", "", NO_PRIORITY, 0),
        b"b": ("ready", "", NO_PRIORITY, 0),
        b"c": ("delayed", "", NO_PRIORITY, LATEST_MS),
    }
    bench.clean()


def misplace(key, there, value, tr):
    tr.clear(key)
    tr.set(there, value)


def test_a_newer_versions_lease_of_another_queue_is_no_hindrance(bench):
    bench.put(b"theirs", queue="other")
    bench.take(1, "other")
    make_newer(bench, leases=True)
    bench.put(b"a")
    bench.take()
    assert payloads(bench, leased=True) == [b"a"]
    with pytest.raises(FormatError, match=re.escape("newer celery-fdb")) as caught:
        list(bench.engine.transfer.dump("other", leased=True))
    assert caught.value.fix is not None
    assert "other" in str(caught.value)
    bench.clean()


def test_a_message_whose_place_can_not_be_read_hides_no_other(bench):
    """It stands before all that have a key."""
    keys = bench.engine.keys
    bench.put(b"odd", due_ms=2**41)
    ((key, value),) = bench.engine.upkeep.rows(range_of(keys.delayed("q")))
    bench.write(partial(misplace, key, keys.keyed("q") + b"\x01odd", value))
    bench.put(b"a", b"b", key="k")
    assert payloads(bench) == [b"a", b"b", b"odd"]
    bench.clean()


def test_leased_ones_come_in_the_order_in_which_they_were_published(bench):
    """Several of one transaction, and of keys in another order."""
    for key in ("b", "a"):
        bench.engine.publisher.publish([Publication("", "q", key.encode() + b"%d" % n, key=key) for n in range(2)])
    bench.take()
    assert payloads(bench, leased=True) == [b"b0", b"b1", b"a0", b"a1"]
