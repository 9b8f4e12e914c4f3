"""What an exchange or a queue that is gone has left is cleared, unless it is there, comes back, or is consumed."""

import pytest

from kombu_fdb.routing.tables import PREDECLARED, Exchange


def epoch(bench, name):
    (value,) = (value for key, value in bench.engine.upkeep.rows(bench.engine.keys.all_epochs) if name.encode() in key)
    return value


def leave(bench, name):
    """An exchange that is gone; returns what it has left."""
    bench.engine.queues.declare_exchange(Exchange(name, "direct"))
    bench.engine.queues.delete_exchange(name)
    return epoch(bench, name)


def test_what_is_gone_is_cleared_once(bench):
    left = leave(bench, "gone")
    assert bench.engine.upkeep.clear_orphan("exchange", "gone", left)
    assert not bench.engine.upkeep.clear_orphan("exchange", "gone", left)
    assert bench.engine.upkeep.rows(bench.engine.keys.all_epochs) == []


def test_what_has_changed_since_stays(bench):
    left = leave(bench, "gone")
    leave(bench, "gone")
    assert not bench.engine.upkeep.clear_orphan("exchange", "gone", left)


def test_what_is_declared_again_stays(bench):
    leave(bench, "e")
    bench.engine.queues.declare_exchange(Exchange("e", "direct"))
    assert not bench.engine.upkeep.clear_orphan("exchange", "e", epoch(bench, "e"))


def test_what_has_bindings_stays(bench):
    left = leave(bench, "gone")
    bench.write(lambda tr: tr.set(bench.engine.keys.binding("gone", "q", ""), b""))
    assert not bench.engine.upkeep.clear_orphan("exchange", "gone", left)


@pytest.mark.parametrize("name", PREDECLARED)
def test_what_is_there_without_a_declaration_stays(bench, name):
    """Its caches go by its epoch, also when nothing is bound to it at the moment."""
    bench.engine.queues.bind("q", name, "k")
    bench.engine.queues.unbind("q", name, "k")
    assert not bench.engine.upkeep.clear_orphan("exchange", name, epoch(bench, name))


@pytest.mark.parametrize("is_consumed", [False, True])
def test_a_queue_that_is_empty_goes_unless_it_is_consumed(bench, *, is_consumed):
    """It may be one that was not declared. Its consumer would be told that it was deleted."""
    keys = bench.engine.keys
    bench.write(lambda tr: tr.set_versionstamped_value(keys.bell("q")))
    if is_consumed:
        bench.engine.queues.add_consumer(bench.session, "q", "tag")
    ((_, bell),) = bench.engine.upkeep.rows((keys.bell("q"), keys.bell("q") + b"\x00"))
    assert bench.engine.upkeep.clear_orphan("queue", "q", bell) is not is_consumed
    forgotten, _ = bench.engine.messages.glance(bench.session, [("q", "tag")], [])
    assert forgotten == ([] if is_consumed else [("q", "tag")])
