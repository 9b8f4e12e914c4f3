"""What is to be known of many queues, keys, messages and sessions: in parts, and each part whole."""

import pytest
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase

from kombu_fdb.engine.facade import inspection
from kombu_fdb.engine.inspection import browse
from kombu_fdb.errors import QueueError
from kombu_fdb.model import Publication, QueueControl
from kombu_fdb.routing.tables import Exchange, QueueDeclaration


@pytest.mark.parametrize("at_once", [1, 2, 3, 50])
def test_facts_of_many_queues(bench, monkeypatch, at_once):
    """Each queue's own, of messages with a key and without one."""
    monkeypatch.setattr(inspection, "QUEUES_PER_LOOK", at_once)
    begin_ms = bench.clock.wall_ms()
    names = ["plain", "keyed", "both", "low", "empty"]
    bench.put(b"1", queue="plain")
    bench.later(1)
    bench.put(b"2", b"3", queue="keyed", key="k")
    bench.later(1)
    bench.put(b"4", queue="both", key="k")
    bench.put(b"5", queue="low", priority=9)
    bench.later(1)
    bench.put(b"6", queue="both")
    bench.put(b"7", queue="both", key="later")
    bench.engine.queues.set_control("keyed", QueueControl(paused=True))
    bench.engine.queues.declare(QueueDeclaration("empty", auto_delete=True))
    facts = bench.engine.inspect.facts(names)
    assert list(facts) == names
    ages = [None if each.oldest_ms is None else each.oldest_ms - begin_ms for each in facts.values()]
    assert ages == [0, 1_000, 2_000, 2_000, None]
    assert [name for name in names if facts[name].declared] == ["empty"]
    assert [name for name in names if facts[name].can_vanish] == ["empty"]
    assert [name for name in names if facts[name].control.paused] == ["keyed"]


@pytest.mark.parametrize("rows", [1, 2, 1_000])
def test_a_message_is_found_wherever_it_stands(bench, monkeypatch, rows):
    """And deleted, once."""
    monkeypatch.setattr(browse, "MESSAGES_PER_TRANSACTION", rows)
    ids = [bytes([number]) * 16 for number in range(12)]
    for number, message_id in enumerate(ids):
        kind = [{}, {"key": "k"}, {"due_ms": 2**41}, {}][number // 3]
        queue = "leased" if number >= 9 else "q"
        message = Publication("", queue, b"%d" % number, message_id=message_id, task_id=str(number), **kind)
        bench.engine.publisher.publish([message])
    bench.take(3, "leased")
    for number, message_id in reversed(list(enumerate(ids))):
        queue, another = ("leased", "q") if number >= 9 else ("q", "leased")
        found = bench.engine.inspect.find(queue, message_id)
        assert found is not None
        assert found.payload == b"%d" % number
        assert bench.engine.inspect.find(another, message_id) is None
        assert not bench.engine.messages.delete(another, message_id)
        assert bench.engine.messages.delete(queue, message_id)
        assert not bench.engine.messages.delete(queue, message_id)
    assert bench.counts() == bench.counts("leased") == (0, 0, 0)


@pytest.mark.parametrize(
    ("consumed", "is_internal"),
    [
        ((), True),
        (("a-b.reply.celery.pidbox", "celeryev.1"), True),
        (("w@host.celery.pidbox", "celeryev.1"), False),  # a worker that takes no more
        (("celeryev.1", "jobs"), False),
    ],
)
def test_a_session_that_only_reads_what_celery_sends_itself_is_internal(bench, consumed, is_internal):
    bench.engine.sessions.beat(bench.session, consumed=consumed)
    assert [each.is_internal for each in bench.engine.inspect.sessions()] == [is_internal]
    bench.put(b"a")
    bench.take()
    assert not bench.engine.inspect.sessions()[0].is_internal, "it holds a message"


def test_sessions_with_the_number_of_their_messages_if_it_is_asked_for(bench):
    bench.put(b"a", b"b")
    bench.take()
    assert [each.held for each in bench.engine.inspect.sessions()] == [None]
    assert [each.held for each in bench.engine.inspect.sessions(held=True)] == [2]
    bench.engine.sessions.fence(bench.session, bench.beats()[bench.session])
    (fenced,) = bench.engine.inspect.sessions()
    assert (fenced.open, fenced.description) == (False, {})
    bench.engine.sessions.release(bench.session)


def test_an_exchange_is_read(bench):
    bench.engine.queues.declare_exchange(Exchange("e", "fanout"))
    found = bench.engine.inspect.exchange("e")
    assert found is not None
    assert found.type == "fanout"
    assert bench.engine.inspect.exchange("none") is None


def test_a_queue_with_keys_says_how_to_see_its_last_message(bench):
    bench.put(b"a", key="k")
    with pytest.raises(QueueError, match=r"a queue with keys has no last message .*Name a key"):
        bench.engine.inspect.peek("q", 1, reverse=True)


def test_a_lease_that_can_not_be_read_hides_no_task():
    bench = Bench(FaultyDatabase())
    bench.write(lambda tr: tr.set(bench.engine.keys.lease(bytes(16), 0), b"\xff"))
    bench.put(b"a", task_id="other")
    bench.put(b"b", task_id="t")
    bench.take()
    (found,) = bench.engine.inspect.find_task("t")
    assert (found.payload, found.state) == (b"b", "leased")
