"""A task is found and taken back by its id, wherever it waits, with no worker running."""

import pytest
from kit.conformance.invariants import leftovers

from kombu_fdb.errors import QueueError
from kombu_fdb.model import ClaimTerms, Lease, Publication
from kombu_fdb.routing.tables import Exchange


def where(bench, task_id="t"):
    return [(found.queue, found.state, found.payload) for found in bench.engine.inspect.find_task(task_id)]


def test_every_copy_of_a_routed_task_is_cancelled(bench):
    bench.engine.queues.declare_exchange(Exchange("x", "fanout"))
    for queue in ("one", "two", "three"):
        bench.engine.queues.bind(queue, "x", "")
    bench.engine.publisher.publish([Publication("x", "", b"a" * 100_000, task_id="t")])
    taken = bench.take(1, "two")[0]
    assert sorted(where(bench)) == [(name, "leased" if name == "two" else "ready", b"a" * 100_000)
                                    for name in ("one", "three", "two")]  # fmt: skip
    assert len(bench.engine.messages.cancel("t")) == 2
    bench.engine.messages.ack([taken.lease])
    assert leftovers(bench.engine) == [key for key in leftovers(bench.engine) if b"bind" in key or b"bound" in key]


def test_the_loser_of_the_race_for_a_task_changes_nothing(bench):
    """A claim that commits first makes the cancellation look again; afterwards the task is the worker's."""
    bench.put(b"a")
    taken = []
    engine, keys = bench.another(), bench.engine.keys
    read = keys.task

    def task(task_id):
        if not taken:
            taken.append(Lease(b"", 0))
            taken[:] = [bench.take()[0].lease]
        return read(task_id)

    engine.keys.task = task
    cancelled = len(engine.messages.cancel(b"a".hex()))
    assert cancelled == 0
    assert bench.engine.messages.ack(taken) == [True]


@pytest.mark.parametrize("end", ["ack", "purge", "delete", "expire", "overflow", "drop", "reject twice", "no ack"])
def test_nothing_of_a_task_stays_behind(bench, end):
    bench.put(b"a", b"b" * 5_000, key="tenant", **({"ttl_ms": 1} if end == "expire" else {}))
    if end == "ack":
        bench.engine.messages.ack([each.lease for each in bench.take()])
    elif end == "purge":
        assert bench.engine.queues.purge("q") == 2
    elif end == "delete":
        for each in bench.engine.inspect.peek("q", 2):
            assert bench.engine.messages.delete("q", each.message_id)
    elif end == "expire":
        bench.later(1)
        assert bench.take() == []
    elif end == "overflow":
        from kombu_fdb.routing.tables import QueueDeclaration

        bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-max-length": 1}))
        bench.later(2)
        bench.another().publisher.publish([Publication("", "q", b"c")])
        bench.engine.queues.purge("q")
    elif end == "drop":
        bench.engine.queues.delete("q")
    elif end == "reject twice":
        bench.engine.messages.reject([each.lease for each in bench.take()])
        bench.engine.messages.reject([each.lease for each in bench.take(100, "q.dead")])
    else:
        bench.engine.messages.claim(bench.session, ["q"], 10, terms=ClaimTerms(no_ack={"q"}))
    for payload in (b"a", b"b" * 100):
        assert bench.engine.inspect.find_task(payload.hex()) == []
    assert [key for key in leftovers(bench.engine) if b"\x02task\x00" in key] == []


def test_too_long_an_id_is_refused(bench):
    with pytest.raises(QueueError, match="task id is too long"):
        bench.engine.publisher.publish([Publication("", "q", b"a", task_id="x" * 256)])
    assert bench.counts() == (0, 0, 0)
