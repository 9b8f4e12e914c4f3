"""What is published inside of a block is stored with something else in one transaction, or not at all."""

import threading

import pytest
from kit.conformance.queue import Bench
from kit.costs import CountingDatabase
from kit.faults import Fault, Faults, FaultyDatabase

from kombu_fdb.engine.messages import publish
from kombu_fdb.errors import MessageTooLarge, StoreUnavailable
from kombu_fdb.model import Publication

KEY = b"an unrelated key"


def mark(tr):
    assert tr.get(KEY) is None
    tr.set(KEY, b"")


def marked(bench):
    return bool(bench.database.items(KEY, KEY + b"\0"))


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def bench(faults):
    return Bench(FaultyDatabase(faults=faults))


def test_all_in_one_transaction(bench):
    counted = CountingDatabase(bench.database)
    engine = Bench(counted).engine
    counted.reset()
    with engine.publisher.atomically(mark):
        assert engine.publisher.publish([Publication("", "q", b"a")]) == [["q"]]
        engine.publisher.publish([Publication("", "r", b"b")])
        assert sum(cost.commits for cost in counted.transactions) == 0
    assert [cost.commits for cost in counted.transactions if cost.commits] == [1]
    assert engine.inspect.counts("q").ready == engine.inspect.counts("r").ready == 1


def test_nothing_after_an_exception_in_the_block(bench):
    with pytest.raises(ZeroDivisionError), bench.engine.publisher.atomically(mark):
        bench.put(b"a")
        raise ZeroDivisionError
    assert not marked(bench)
    assert bench.engine.inspect.counts("q").ready == 0


def test_what_was_refused_in_the_block_and_is_published_again_is_stored_once(bench, monkeypatch):
    """Celery repeats the publication of a chord's body while the store does not answer."""
    route, refusals = publish.route, iter([StoreUnavailable("it does not answer")])

    def refuse_once(*arguments):
        for refusal in refusals:
            raise refusal
        return route(*arguments)

    monkeypatch.setattr(publish, "route", refuse_once)
    with bench.engine.publisher.atomically(mark):
        with pytest.raises(StoreUnavailable):
            bench.put(b"a")
        bench.put(b"a")
    assert bench.engine.inspect.counts("q").ready == 1


def test_nothing_if_the_verb_refuses(bench):
    def refuse(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), bench.engine.publisher.atomically(refuse):
        bench.put(b"a")
    assert bench.engine.inspect.counts("q").ready == 0
    bench.put(b"b")
    assert bench.engine.inspect.counts("q").ready == 1


def test_a_block_that_publishes_nothing_runs_the_verb(bench):
    with bench.engine.publisher.atomically(mark):
        pass
    assert marked(bench)


@pytest.mark.parametrize("fault", [Fault.ANSWER_LOST_APPLIED, Fault.ANSWER_LOST_NOT_APPLIED, Fault.CONFLICT])
def test_a_lost_answer_changes_nothing(bench, faults, fault):
    with bench.engine.publisher.atomically(mark):
        bench.put(b"a")
        faults.at_commits(fault)
    assert marked(bench)
    assert bench.engine.inspect.counts("q").ready == 1


def test_a_message_that_is_too_large_is_refused_at_once(bench):
    with bench.engine.publisher.atomically(mark):
        with pytest.raises(MessageTooLarge):
            bench.put(b"a" * (bench.environment.max_message_size + 1))
        bench.put(b"b")
    assert bench.engine.inspect.counts("q").ready == 1


def test_others_are_not_gathered(bench):
    """Another thread, another engine, a block inside of the block."""
    other = bench.another()
    with bench.engine.publisher.atomically(mark):
        thread = threading.Thread(target=bench.put, args=(b"thread",))
        thread.start()
        thread.join()
        other.publisher.publish([Publication("", "q", b"engine")])
        with bench.engine.publisher.atomically(lambda tr: None):
            bench.put(b"inner")
        assert bench.engine.inspect.counts("q").ready == 3
        assert not marked(bench)
    assert marked(bench)


def test_what_no_transaction_holds_goes_in_front():
    publications = [Publication("", "q", b"x" * 1_500_000)] * 5
    assert [len(part) for part in publish.split_batch(publications, publish.weight)] == [2, 2, 1]
    assert [len(part) for part in publish.split_batch([Publication("", "q", b"")] * 4_100, publish.weight)] == [
        2_000,
        2_000,
        100,
    ]
    assert list(publish.split_batch([], publish.weight)) == []


def test_a_part_holds_exactly_so_many_bytes():
    """A message counts with what stands around it; the size of one part does not go on to the next."""
    half = publish.BATCH_BYTES // 2 - publish.OVERHEAD_BYTES
    full = [Publication("", "q", bytes(half)), Publication("", "q", bytes(half + publish.BATCH_BYTES % 2))]
    assert [len(part) for part in publish.split_batch(full * 3, publish.weight)] == [2, 2, 2]
    over = [full[0], Publication("", "q", full[1].payload + b"x")]
    assert [len(part) for part in publish.split_batch(over, publish.weight)] == [1, 1]
