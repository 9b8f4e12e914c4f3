"""How many dead letters are kept, and for how long."""

import pytest
from kit.conformance.queue import Bench
from kit.duties import trim_all
from kit.faults import FaultyDatabase

from kombu_fdb.engine import dead_letters


def dead(length, number):
    bench = Bench(FaultyDatabase(), dead_length=length, task_ids=True)
    bench.put(*(b"a long payload %d" % each for each in range(number)))
    bench.engine.messages.reject([each.lease for each in bench.take() if each.lease])
    return bench


@pytest.mark.parametrize(("length", "number"), [(5, 5), (5, 4)])
def test_as_many_as_may_be_kept_are(length, number):
    """Whatever their size."""
    bench = dead(length, number)
    assert trim_all(bench.engine) == 0
    assert bench.counts("q.dead") == (number, 0, 0)


def test_the_oldest_go_in_as_many_parts_as_it_takes(monkeypatch):
    monkeypatch.setattr(dead_letters, "TRIMMED_PER_TRANSACTION", 2)
    bench = dead(1, 6)
    assert trim_all(bench.engine) == 5
    assert bench.payloads(9, "q.dead") == [b"a long payload 5"]
    bench.check()


def test_what_has_not_outlived_its_time_stays():
    bench = dead(5, 2)
    bench.later(bench.environment.dead_ttl_ms / 1000 - 1)
    assert trim_all(bench.engine) == 0
    bench.later(1)
    assert trim_all(bench.engine) == 2
    assert bench.engine.inspect.find_task(b"a long payload 0".hex()) == []
    bench.check()


def test_unreadable_bytes_are_kept_as_long_as_there_is_room():
    """They have no end of their own."""
    bench = dead(5, 1)
    keys = bench.engine.keys
    ((key, value),) = bench.engine.upkeep.rows((keys.ready("q.dead"), keys.ready("q.dead") + b"\xff"))
    bench.write(lambda tr: tr.set(key, b"\xff" * len(value)))
    bench.later(bench.environment.dead_ttl_ms / 1000)
    assert trim_all(bench.engine) == 0
    assert [letter.payload for letter in bench.engine.inspect.peek("q.dead", 1)] == [b"\xff" * len(value)]
