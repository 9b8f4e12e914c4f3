"""Promotion in parts: of many queues, and of many messages."""

from functools import partial

import pytest
from kit.conformance.queue import Bench
from kit.duties import promote_all
from kit.faults import FaultyDatabase

from kombu_fdb.engine.upkeep import promotion
from kombu_fdb.keyspace.layout import range_of


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_queues_are_looked_at_so_many_at_once(bench, monkeypatch, number):
    monkeypatch.setattr(promotion, "QUEUES_PER_LOOK", 2)
    now_ms = bench.clock.wall_ms()
    queues = [f"q{each}" for each in range(number)]
    for at, queue in enumerate(queues):
        bench.put(b"%d" % at, queue=queue, due_ms=now_ms + 1000)
        bench.put(b"later %d" % at, queue=queue, due_ms=now_ms + 9000 - at)
    assert promote_all(bench.engine) == (0, now_ms + 1000)
    bench.later(1)
    assert promote_all(bench.engine) == (number, now_ms + 9000 - (number - 1))
    assert [bench.counts(queue) for queue in queues] == [(1, 1, 0)] * number
    bench.later(8)
    assert promote_all(bench.engine) == (number, None)


def test_a_part_of_those_that_are_due_is_the_first_ones(bench):
    now_ms = bench.clock.wall_ms()
    for after_ms in (3, 1, 2):
        bench.put(b"%d" % after_ms, due_ms=now_ms + after_ms)
    bench.later(1)
    promoted = []
    for _ in range(2):
        bench.work(lambda work: promoted.append(promotion.promote(work, 2, "q")))
    assert promoted == [(2, now_ms + 3), (1, None)]
    assert bench.payloads() == [b"1", b"2", b"3"]


@pytest.mark.parametrize(("number", "seen"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (7, [0, 1, 6, 5])])
def test_of_many_that_rest_those_due_first_and_last_are_looked_at(bench, monkeypatch, number, seen):
    monkeypatch.setattr(promotion, "MESSAGES_PER_TRANSACTION", 2)
    keys = bench.engine.keys
    rows = [(keys.unpark(1_000 + each, "q", "k"), b"") for each in range(number)]
    for key, value in rows:
        bench.write(partial(store, key, value))
    assert bench.engine.transactions.read(promotion._unparks) == [rows[each] for each in seen]
    bench.clean()


def store(key, value, tr):
    tr.set(key, value)


def test_behind_one_that_cannot_be_read_the_next_one_is_due_when_it_is_due():
    bench = Bench(FaultyDatabase())
    due_ms = bench.clock.wall_ms() + 5_000
    bench.put(b"a", due_ms=due_ms)
    ((key, value),) = bench.engine.upkeep.rows(range_of(bench.engine.keys.delayed("q")))
    bench.write(lambda tr: tr.set(key[:-1], value))
    assert promote_all(bench.engine) == (0, due_ms)
    (letter,) = bench.engine.inspect.peek("q.dead", 1)
    assert letter.deaths[0].reason == "malformed"
