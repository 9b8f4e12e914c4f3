"""Tarantool's queue, feature by feature (seeds/tarantool-queue.txt)."""

from __future__ import annotations

from time import monotonic

import pytest

from kombu_fdb.errors import InvalidArgument, LeaseLost, QueueError
from kombu_fdb.model import ClaimTerms, KeyLimits, QueueControl

PATIENCE_S = 60.0


def payloads(queue, limit=100):
    return [job.payload for job in queue.take_many(limit, 0)]


# -- fifo, fifottl -----------------------------------------------------------------------------------------------------


def test_fifo(broker):
    tube = broker.queue("tube")
    for number in range(5):
        tube.put(str(number))
    assert [tube.take(0).payload for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]


def test_fifottl_pri(another):
    """There 0 is the highest priority and the default."""
    tube = another(priority_order="redis").queue("tube")
    tube.put("later", priority=1)
    tube.put("default")
    tube.put("0", priority=0)
    assert payloads(tube) == [b"default", b"0", b"later"]
    with pytest.raises(InvalidArgument):
        tube.put("no such priority", priority=10)


def test_fifottl_ttl(bench):
    bench.put(b"task", ttl_ms=60_100)
    bench.later(60.0)
    assert bench.engine.inspect.peek("q", 1)
    bench.later(0.2)
    assert bench.payloads() == []
    assert bench.counts() == (0, 0, 0), "removed, not only hidden"


def test_fifottl_ttl_of_the_tube(bench):
    from kombu_fdb.routing.tables import QueueDeclaration

    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-message-ttl": 1000}))
    bench.put(b"the tube's")
    bench.put(b"its own", ttl_ms=500)
    bench.later(0.6)
    bench.put(b"young")
    assert bench.payloads() == [b"the tube's", b"young"]


def test_fifottl_delay_extends_ttl(bench):
    """The seed's example: 60.1 s to live and 80 s of delay are 140.1 s."""
    for _ in range(2):
        bench.put(b"task", ttl_ms=60_100, due_ms=bench.clock.wall_ms() + 80_000)
    bench.later(79.9)
    bench.engine.upkeep.promote()
    assert bench.payloads() == [], "not early"
    bench.later(60.1)
    bench.engine.upkeep.promote()
    assert bench.payloads(1) == [b"task"], "after 140.0 s"
    bench.later(0.2)
    assert bench.payloads() == [], "after 140.2 s"


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


def test_utubettl(bench):
    bench.engine.queues.set_control("q", QueueControl(every_key=KeyLimits(max_in_flight=1)))
    bench.put(b"short", key="a", ttl_ms=1000)
    bench.put(b"urgent", key="a", priority=9)
    bench.put(b"late", key="a", due_ms=bench.clock.wall_ms() + 5000)
    (urgent,) = bench.take()
    assert urgent.payload == b"urgent"
    bench.later(5)
    bench.engine.upkeep.promote()
    assert bench.payloads() == [], "one at a time"
    bench.engine.messages.ack([urgent.lease])
    found = [payload for _ in range(3) for payload in bench.payloads()]
    assert found == [b"late"], "the other one has outlived its time"


@pytest.mark.parametrize("no_ack", [False, True])
def test_a_task_that_is_not_leased_leaves_its_slot_to_the_next(bench, no_ack):
    """Found by utubettl: an expired task took the slot with it, and its sub-queue stood still for ever."""
    bench.engine.queues.set_control("q", QueueControl(every_key=KeyLimits(max_in_flight=1)))
    bench.put(b"1", key="a", ttl_ms=None if no_ack else 10)
    bench.put(b"2", key="a")
    bench.later(1)
    claims = [
        bench.engine.messages.claim(bench.session, ["q"], 10, terms=ClaimTerms(no_ack=["q"] if no_ack else []))
        for _ in range(3)
    ]
    assert [each.payload for claim in claims for each in claim] == ([b"1", b"2"] if no_ack else [b"2"])


def test_utube_of_tasks_without_a_sub_queue(broker):
    tube = broker.queue("tube")
    tube.limit_every_key(max_in_flight=1)
    tube.put_many("ab")
    (first,) = tube.take_many(10, 0)
    first.ack()
    assert payloads(tube) == [b"b"]


def test_pri_is_strict_in_one_claim_with_and_without_sub_queues(broker):
    tube = broker.queue("tube")
    tube.put("0", key="alice")
    tube.put("9", priority=9)
    tube.put("8", priority=8)
    assert payloads(tube, 2) == [b"9", b"8"]


# -- producer and consumer ---------------------------------------------------------------------------------------------


def test_take_timeout(broker):
    tube = broker.queue("tube")
    begin = monotonic()
    assert tube.take(0.05) is None
    assert monotonic() - begin >= 0.05


def test_take_waits_for_a_task(another, threads, asleep):
    consumer = another()
    waiting = asleep(consumer)
    taken = threads.submit(consumer.queue("tube").take, PATIENCE_S)
    assert waiting.wait(PATIENCE_S)
    another().queue("tube").put("task")
    assert taken.result(PATIENCE_S).payload == b"task"


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


def test_ack(broker):
    tube = broker.queue("tube")
    tube.put("task")
    tube.take(0).ack()
    assert tube.stats() == broker.queue("never used").stats()


def test_only_the_taker_may_ack(another, sweep):
    taker, other = another(), another()
    taker.queue("tube").put("task")
    lost = taker.queue("tube").take(0)
    assert other.queue("tube").take(0) is None
    sweep(other, taker)
    held = other.queue("tube").take(PATIENCE_S)
    for verb in (lost.ack, lost.release, lost.bury, lost.extend):
        with pytest.raises(LeaseLost):
            verb()
    held.extend()
    held.ack()


def test_a_disconnected_consumers_tasks_return_at_once(another, threads, asleep):
    gone, other = another(), another()
    gone.queue("tube").put("task")
    held = gone.queue("tube").take(0)
    waiting = asleep(other)
    taken = threads.submit(other.queue("tube").take, PATIENCE_S)
    assert waiting.wait(PATIENCE_S)
    gone.close()
    assert taken.result(PATIENCE_S).attempts == held.attempts == 1, "it did not fail, so it does not count"


def test_a_dead_consumers_tasks_return_after_its_ttl(bench):
    dead = bench.engine.sessions.open({})
    bench.put(b"task")
    bench.take(session=dead)
    duties = bench.duties()
    for _ in range(6):
        duties.sweep()
        assert bench.payloads() == []
        bench.later(5.0)
        bench.engine.sessions.beat(bench.session)
    duties.sweep()
    assert bench.payloads() == [b"task"]


def test_release_with_delay(broker):
    tube = broker.queue("tube")
    tube.put("task")
    begin = monotonic()
    tube.take(0).release(delay=0.1)
    assert tube.stats().delayed == 1
    assert tube.take(PATIENCE_S).attempts == 2
    assert monotonic() - begin >= 0.1


def test_release(broker):
    tube = broker.queue("tube")
    tube.put_many("ab")
    tube.take(0).release()
    assert payloads(tube) == [b"a", b"b"], "back to its place"


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


def test_bury_and_kick(broker):
    tube = broker.queue("tube")
    for number in range(3):
        tube.put(str(number), key="alice")
    for job in tube.take_many(3):
        job.bury()
    assert tube.take(0) is None
    assert tube.dead_letters.count().total() == 3
    assert tube.dead_letters.replay(2) == 2
    back = tube.take_many(10, 0)
    assert [(job.payload, job.key) for job in back] == [(b"0", "alice"), (b"1", "alice")]
    assert tube.dead_letters.replay(10) == 1
    assert tube.dead_letters.replay(10) == 0


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


def test_purge(broker):
    tube = broker.queue("tube")
    tube.put_many("abc")
    tube.put("later", delay=1000)
    job = tube.take(0)
    assert tube.purge() == 3
    job.ack()
    assert tube.take(0) is None


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
