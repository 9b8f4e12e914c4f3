"""How much of a queue's head a claim reads, and what is left of messages that it takes and does not deliver."""

import pytest
from kit.conformance.queue import Bench
from kit.costs import cost
from kit.duties import promote_all

from kombu_fdb.engine.messages import claim
from kombu_fdb.engine.messages.bury import REST_MS
from kombu_fdb.errors import StoreFull
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import ClaimTerms, KeyLimits


@pytest.fixture
def bench(counted):
    return Bench(counted)


def test_the_head_is_read_by_parts_until_it_has_as_many_bytes_as_a_claim_may_read(bench, counted, monkeypatch):
    monkeypatch.setattr(claim, "ROWS_PER_READ", 2)
    monkeypatch.setattr(claim, "HEAD_BYTES", 3_500)
    bench.put(*[b"%d" % number + b"x" * 1_000 for number in range(9)])
    counted.reset()
    assert [payload[:1] for payload in bench.payloads(9)] == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert counted.total().rows == 6
    counted.reset()
    assert [payload[:1] for payload in bench.payloads(9)] == [b"6", b"7", b"8"]
    assert counted.total().rows == 3


def test_a_window_of_several_parts_is_filled_and_no_more(bench, counted, monkeypatch):
    monkeypatch.setattr(claim, "ROWS_PER_READ", 2)
    bench.put(*[b"%d" % number for number in range(9)])
    counted.reset()
    assert bench.payloads(5) == [b"0", b"1", b"2", b"3", b"4"]
    assert counted.total().rows == 5


@pytest.mark.parametrize("key", ["", "k"])
def test_a_full_window_takes_nothing_from_the_queues_behind_however_many(bench, key):
    queues = [f"q{number}" for number in range(claim.FEW_QUEUES + 2)]
    for queue in queues:
        bench.put(b"a", b"b", queue=queue, key=key)
    assert len(bench.take(3, *queues)) == 3
    assert [bench.counts(queue)[0] for queue in queues] == [0, 1, 2, 2, 2, 2]
    bench.check()


def test_the_heads_of_few_queues_are_read_with_the_rest(bench, counted):
    queues = [f"q{number}" for number in range(claim.FEW_QUEUES)]
    for queue in queues:
        bench.put(b"a", queue=queue)
    assert cost(counted, lambda: bench.take(1, *queues)).round_trips == 3


def test_leases_of_a_claim_have_the_numbers_that_were_reserved_for_them(bench):
    bench.put(b"a", b"b", b"c")
    first = bench.engine.messages.reserve()
    taken = bench.engine.messages.claim(bench.session, ["q"], 3, terms=ClaimTerms(first=first))
    assert [each.lease.number for each in taken] == [first, first + 1, first + 2]


def limited(bench):
    """A key that may have one message in flight, and has two."""
    bench.put(b"a", key="k", ttl_ms=1000)
    bench.put(b"b", key="k")
    bench.engine.queues.limit("q", "k", KeyLimits(max_in_flight=1))


def rung(bench):
    return len(bench.engine.upkeep.rows(bench.engine.keys.all_freed("q")))


def test_a_key_whose_message_had_expired_has_its_slot_again(bench):
    limited(bench)
    bench.later(1)
    assert [bench.payloads(), bench.payloads()] == [[], [b"b"]]


def test_a_key_whose_message_is_delivered_without_a_lease_has_its_slot_again(bench):
    limited(bench)
    terms = ClaimTerms(no_ack={"q"})
    taken = [bench.engine.messages.claim(bench.session, ["q"], 9, terms=terms) for _ in range(2)]
    assert [[each.payload for each in part] for part in taken] == [[b"a"], [b"b"]]


def test_a_key_whose_message_is_leased_has_not(bench):
    limited(bench)
    assert bench.payloads() == [b"a"]
    assert rung(bench) == 0
    assert bench.payloads() == []


def test_on_a_full_disk_what_would_be_buried_rests_and_those_behind_it_are_served(bench, monkeypatch):
    """A burial writes more than it clears; a rest does not."""
    bench.put(b"bad", b"good", task_id="t")
    ((key, value), _) = bench.engine.upkeep.rows(range_of(bench.engine.keys.ready("q")))
    bench.write(lambda tr: tr.set(key, value[:1] + b"\xff" * 3))
    full = StoreFull()
    full.moves = True
    refusals, rested = [full], []
    real = claim.claim

    def refuse(work, *given, **how):
        rested.append(work.rests)
        found = real(work, *given, **how)
        if refusals:
            raise refusals.pop()
        return found

    monkeypatch.setattr(claim, "claim", refuse)
    assert bench.payloads(2) == [b"good"]
    assert rested == [False, True]
    assert bench.counts("q.dead") == (0, 0, 0)
    assert bench.counts()[1] == 1
    assert promote_all(bench.engine) == (0, bench.clock.wall_ms() + REST_MS)


def test_any_other_refusal_of_a_full_disk_is_the_callers(bench, monkeypatch):
    def refuse(*_, **__):
        raise StoreFull

    monkeypatch.setattr(claim, "claim", refuse)
    with pytest.raises(StoreFull):
        bench.take()
