"""Which of many queues a consumer watches, and which it should rather claim from."""

import pytest
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase

from kombu_fdb.model import ClaimTerms, KeyLimits
from kombu_fdb.routing.tables import QueueDeclaration


@pytest.fixture
def bench():
    return Bench(FaultyDatabase())


def hungry(bench, *queues, tag="one"):
    """Those to be claimed from; the others are watched."""
    found, watches = bench.engine.messages.arm_empty(queues, bench.session, {"single": tag})
    assert (found | set(watches), found & set(watches)) == (set(queues), set())
    return found


def activate(bench, tag):
    terms = ClaimTerms(consumers={"single": tag})
    bench.engine.messages.claim(bench.session, ["single"], 1, terms=terms)


def test_the_empty_ones_are_watched(bench):
    bench.put(b"x", queue="full")
    assert hungry(bench, "full", "empty") == {"full"}


def test_a_paused_queue_is_watched_whatever_is_in_it(bench):
    bench.put(b"x", queue="paused")
    bench.engine.queues.change_control("paused", paused=True)
    assert hungry(bench, "paused", "empty") == set()
    assert not bench.engine.messages.has_work(["paused"])


def test_a_consumer_that_stands_by_watches_who_is_active(bench):
    bench.engine.queues.declare(QueueDeclaration("single", arguments={"x-single-active-consumer": True}))
    activate(bench, "one")
    bench.put(b"x", queue="single")
    assert hungry(bench, "single", "empty", tag="one") == {"single"}
    assert hungry(bench, "single", "empty", tag="two") == set()
    _, watches = bench.engine.messages.arm_empty(["single"], bench.session, {"single": "two"})
    fired = []
    watches["single"].on_fire(lambda: fired.append(True))
    bench.put(b"y", queue="single")
    assert not fired
    bench.engine.queues.remove_consumer(bench.session, "single", "one")
    assert fired


def test_what_only_the_active_consumer_may_have_is_no_work_for_others(bench):
    bench.engine.queues.declare(QueueDeclaration("single", arguments={"x-single-active-consumer": True}))
    bench.put(b"x", queue="single")
    assert bench.engine.messages.has_work(["single"]), "no consumer is active"
    activate(bench, "one")
    bench.put(b"y", queue="single")
    assert not bench.engine.messages.has_work(["single"])


@pytest.mark.parametrize("key", ["", "alice"])
def test_a_key_that_may_not_be_served_is_no_work_once_a_claim_has_seen_it(bench, key):
    bench.put(b"x", queue="fair", key=key)
    bench.engine.queues.limit("fair", key, KeyLimits(max_in_flight=1))
    bench.put(b"y", queue="fair", key=key)
    assert hungry(bench, "fair") == {"fair"}
    (held,) = bench.take(1, "fair")
    assert bench.take(1, "fair") == []
    assert hungry(bench, "fair") == set()
    bench.engine.messages.ack([held.lease])
    assert hungry(bench, "fair") == {"fair"}


def test_messages_without_a_key_are_work_in_a_queue_of_keys(bench):
    bench.put(b"x", queue="fair", key="alice")
    bench.put(b"y", queue="fair")
    assert bench.payloads(9, "fair") == [b"x", b"y"]
    bench.put(b"z", queue="fair")
    assert hungry(bench, "fair") == {"fair"}


def test_a_row_that_stands_nowhere_is_work_until_a_claim_has_set_it_aside(bench):
    bench.put(b"x", queue="fair", key="alice")
    bench.payloads(9, "fair")
    bench.write(lambda tr: tr.set(bench.engine.keys.ready("fair") + b"\x00", b"?"))
    assert hungry(bench, "fair") == {"fair"}
    bench.take(9, "fair")
    assert hungry(bench, "fair") == set()
