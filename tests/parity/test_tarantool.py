"""Tarantool's queue: what of its features the conformance suites do not ask for."""

from __future__ import annotations

from time import monotonic

import pytest

from kombu_fdb.errors import InvalidArgument, LeaseLost, QueueError

PATIENCE_S = 60.0


def payloads(queue, limit=100):
    return [job.payload for job in queue.take_many(limit, 0)]


# -- fifo, fifottl -----------------------------------------------------------------------------------------------------


def test_fifottl_pri(another):
    """There 0 is the highest priority and the default."""
    tube = another(priority_order="redis").queue("tube")
    tube.put("later", priority=1)
    tube.put("default")
    tube.put("0", priority=0)
    assert payloads(tube) == [b"default", b"0", b"later"]
    with pytest.raises(InvalidArgument):
        tube.put("no such priority", priority=10)


def test_put_passes_ttl_and_delay_on(broker):
    tube = broker.queue("tube")
    found = tube.find(tube.put("task", ttl=60.1, delay=80))
    assert found.state == "delayed"
    assert found.expires_ms - found.published_ms == pytest.approx(140_100, abs=5)


def test_fifottl_delay(broker):
    tube = broker.queue("tube")
    begin = monotonic()
    tube.put("task", delay=0.1)
    assert tube.take(0) is None
    assert tube.take(PATIENCE_S).payload == b"task"
    assert monotonic() - begin >= 0.1


def test_fifottl_ttr(broker):
    """A consumer that did not settle in time has lost the task; any other may take it."""
    tube = broker.queue("tube")
    tube.put("task", ttr=0.05)
    slow = tube.take(0)
    assert slow.ttr == 0.05
    again = tube.take(PATIENCE_S)
    assert (again.id, again.attempts) == (slow.id, 2)
    with pytest.raises(LeaseLost):
        slow.ack()
    again.ack()
    assert tube.stats() == broker.queue("never used").stats()


def test_fifottl_ttr_begins_anew_with_extend_and_ends_with_the_task(broker):
    tube = broker.queue("tube")
    tube.put("task", ttr=1000)
    job = tube.take(0)
    timers = broker._client.overdue.timers
    (before,) = timers.values()
    job.extend()
    (after,) = timers.values()
    assert after.due > before.due
    job.ack()
    assert not timers


def test_ttr_survives_the_grave(broker):
    tube = broker.queue("tube")
    tube.put("task", ttr=1000)
    tube.take(0).bury()
    tube.dead_letters.replay(1)
    assert tube.take(0).ttr == 1000


# -- utube, utubettl ---------------------------------------------------------------------------------------------------


def test_utube(broker):
    """One in flight per sub-queue, in order inside."""
    tube = broker.queue("tube")
    tube.limit_every_key(max_in_flight=1)
    for url in range(3):
        tube.put(f"a{url}", key="a.org")
        tube.put(f"b{url}", key="b.org")
    first = tube.take_many(10, 0)
    assert [job.payload for job in first] == [b"a0", b"b0"]
    assert tube.take(0) is None
    first[0].ack()
    (second,) = tube.take_many(10, 0)
    assert second.payload == b"a1"
    second.release()
    assert payloads(tube) == [b"a1"], "a released task comes first again"


# -- producer and consumer ---------------------------------------------------------------------------------------------


def test_waiting_consumers_are_visible_with_their_next_heartbeat(another, threads, asleep):
    consumer = another(session_ttl=0.6)
    waiting = asleep(consumer)
    taken = threads.submit(consumer.queue("tube").take, PATIENCE_S)
    assert waiting.wait(PATIENCE_S)
    looker = another()
    while not (found := looker.queue("tube").consumers()):
        pass
    assert found == [consumer._client.membership().session_id]
    looker.queue("tube").put("task")
    taken.result(PATIENCE_S).ack()
    while looker.queue("tube").consumers():
        pass


def test_a_disconnected_consumers_tasks_return_at_once(another, threads, asleep):
    gone, other = another(), another()
    gone.queue("tube").put("task")
    held = gone.queue("tube").take(0)
    waiting = asleep(other)
    taken = threads.submit(other.queue("tube").take, PATIENCE_S)
    assert waiting.wait(PATIENCE_S)
    gone.close()
    assert taken.result(PATIENCE_S).attempts == held.attempts == 1, "it did not fail, so it does not count"


# -- miscellaneous -----------------------------------------------------------------------------------------------------


def test_peek(broker):
    """By id, whatever its state, without changing it."""
    tube = broker.queue("tube")
    delayed = tube.put("delayed", delay=1000)
    large = tube.put(b"x" * 300_000, key="alice")
    assert tube.find(delayed).state == "delayed"
    assert (tube.find(large).state, tube.find(large).payload) == ("ready", b"x" * 300_000)
    job = tube.take(0)
    assert (job.id, tube.find(large).state) == (large, "leased")
    assert tube.find(large).owner == broker._client.membership().session_id
    assert broker.queue("other").find(large) is None
    job.ack()
    assert tube.find(large) is None


def test_kick_wakes_a_consumer(broker, threads, asleep):
    tube = broker.queue("tube")
    tube.put("task")
    tube.take(0).bury()
    waiting = asleep(broker)
    taken = threads.submit(tube.take, PATIENCE_S)
    assert waiting.wait(PATIENCE_S)
    tube.dead_letters.replay()
    assert taken.result(PATIENCE_S).payload == b"task"


def test_delete_in_any_state(broker):
    tube = broker.queue("tube")
    states = {
        "ready": tube.put("ready"),
        "keyed": tube.put("keyed", key="alice"),
        "delayed": tube.put("delayed", delay=1000),
        "taken": tube.put("taken", priority=9),
        "buried": tube.put("buried", priority=8),
    }
    taken, buried = tube.take(0), tube.take(0)
    buried.bury()
    assert broker.queue("tube.dead").delete(states.pop("buried"))
    for job_id in states.values():
        assert tube.delete(job_id)
        assert not tube.delete(job_id)
    with pytest.raises(LeaseLost):
        taken.ack()
    assert broker.queues().get("tube", tube.stats()) == broker.queue("never used").stats()
    assert tube.dead_letters.count().total() == 0
    tube.put("next", key="alice")
    assert payloads(tube) == [b"next"]


def test_drop(broker):
    tube = broker.declare("tube", arguments={"x-max-length": 10})
    tube.put_many("ab")
    job = tube.take(0)
    with pytest.raises(QueueError):
        tube.drop()
    assert tube.declaration() is not None, "nothing happened"
    job.ack()
    assert tube.drop() == 1
    assert tube.declaration() is None
    assert "tube" not in broker.queues()


def test_queue_metadata_and_taken_tasks_are_visible(broker):
    tube = broker.declare("tube", arguments={"x-message-ttl": 60_000})
    job_id = tube.put("task")
    assert tube.declaration().arguments == {"x-message-ttl": 60_000}
    assert tube.peek(10, state="leased") == []
    tube.take(0)
    (taken,) = tube.peek(10, state="leased")
    assert (taken.message_id, taken.owner) == (job_id, broker._client.membership().session_id)
    assert broker.queue("other").peek(10, state="leased") == []
    assert broker.queues()["tube"].leased == 1
