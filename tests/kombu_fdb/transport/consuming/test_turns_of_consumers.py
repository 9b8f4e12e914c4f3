"""How many turns consumers cause: each counts, none is timed."""

import pytest
from kit.conformance.consumer import OPTIONS, Consumer

from kombu_fdb.transport.consuming.receiver import deliver_next

ACK_DELAY_S = OPTIONS.ack_delay_ms / 1000


def hand_out(consumer):
    with consumer.transport.draining():
        assert deliver_next(consumer.transport.fetcher)


def take_turns(consumer):
    """As long as there is something to do. How many those were."""
    turns = 0
    while consumer.transport.is_awake:
        consumer.transport.turn()
        turns += 1
    return turns


def test_without_a_prefetch_taking_the_last_one_claims_more(bench):
    bench.put(*[b""] * 3)
    consumer = Consumer(bench, ["q"], prefetch=0)
    for _ in range(3):
        take_turns(consumer)
        hand_out(consumer)
    assert len(consumer.transport.given) == 3


def test_within_a_prefetch_taking_one_causes_no_turn(bench):
    bench.put(*[b""] * 3)
    consumer = Consumer(bench, ["q"])
    take_turns(consumer)
    hand_out(consumer)
    assert take_turns(consumer) == 0


@pytest.fixture
def acked(bench):
    """It has just acknowledged its second claim, of all that is left; the first one's acks went along with that."""
    bench.put(*[b""] * 6)
    consumer = Consumer(bench, ["q"])
    for messages in (4, 2):
        take_turns(consumer)
        assert len(consumer.waiting) == messages
        bench.clock.advance(1)
        take_turns(consumer)  # a few free places have waited for long enough
        consumer.settle()
    assert bench.counts("q")[2] == 2
    return consumer


def test_an_ack_behind_a_claim_waits_as_long_as_any(bench, acked):
    take_turns(acked)
    assert bench.counts("q")[2] == 2
    bench.clock.advance(2 * ACK_DELAY_S)
    assert take_turns(acked) == 1
    assert bench.counts("q")[2] == 0
    bench.clock.advance(1)
    assert take_turns(acked) == 0


def test_acks_that_are_settled_cause_no_more_turns(bench, acked):
    take_turns(acked)
    acked.transport.store.flush_acks()  # another thread does
    bench.clock.advance(2 * ACK_DELAY_S)
    assert take_turns(acked) == 1
    bench.clock.advance(1)
    assert take_turns(acked) == 0
