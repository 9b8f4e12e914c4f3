"""What the seeds of this broker can do and the conformance suites do not ask for, through the public API.

They are FoundationDB's queue recipe and its processing queue, Tarantool's queue, LinkedBlockingMultiQueue, whose
sub-queues are the keys of one queue here, and queue-by.
"""

from itertools import chain

import pytest
from kit.conformance.queue import Bench
from kit.costs import CountingDatabase
from kit.duties import promote_all, sweep
from kit.faults import FaultyDatabase

from kombu_fdb.api.job import Job
from kombu_fdb.api.job import backoff_s as seconds
from kombu_fdb.errors import AlreadySettled, InvalidArgument, LeaseLost, QueueError
from kombu_fdb.model import Publication
from kombu_fdb.primitives.clock import Clock

PATIENCE_S = 60.0


@pytest.fixture
def jobs(broker):
    return broker.queue("jobs")


def test_extend_checks_ownership(another):
    owner, other = another(), another()
    owner.queue("jobs").put("1")
    job = owner.queue("jobs").take(0)
    job.extend()
    sweep(other, owner)
    with pytest.raises(LeaseLost):
        job.extend()


def test_lease_stolen(another):
    """Swept, and taken by another one: the late owner changes nothing, and can find out who has it."""
    late, other = another(), another()
    late.queue("jobs").put("1")
    job = late.queue("jobs").take(0)
    sweep(other, late)
    stolen = other.queue("jobs").take(PATIENCE_S)
    for verb in (job.ack, job.release, job.bury):
        with pytest.raises(LeaseLost):
            verb()
    found = late.queue("jobs").find(job.id)
    assert (found.state, found.owner) == ("leased", other._client.session().session_id)
    assert stolen.attempts == 2
    stolen.ack()
    late.queue("jobs").put("2")
    assert late.queue("jobs").take(PATIENCE_S).payload == b"2", "with a new session"


@pytest.mark.parametrize("how", ["ack", "release", "bury"])
def test_settling_twice(jobs, how):
    jobs.put("1")
    job = jobs.take(0)
    getattr(job, how)()
    for again in (job.ack, job.release, job.bury, job.extend):
        with pytest.raises(AlreadySettled) as caught:
            again()
        assert caught.value.how.startswith(how[:3])


@pytest.mark.parametrize(("attempt", "minutes"), [(1, 1), (2, 5), (3, 25), (4, 25)])
def test_backoff_1_5_25_min(broker, jobs, attempt, minutes):
    assert seconds("1/5/25min", attempt) == minutes * 60
    jobs.put("1")
    (delivery,) = broker._client.session().claim(["jobs"], 1)
    Job(broker.connection, delivery._replace(redeliveries=attempt - 1)).release(backoff="1/5/25min")
    assert jobs.take(0) is None
    _, due_ms = promote_all(broker._engine)
    early_ms = minutes * 60_000 - (due_ms - Clock().wall_ms())
    assert -1 <= early_ms < 30_000, "rounded up to the next millisecond"


@pytest.mark.parametrize(("name", "expected"), [("1/5/25min", 300), ("10s", 10), ("0.5/1h", 3600)])
def test_backoff_names(name, expected):
    assert seconds(name, 2) == expected


@pytest.mark.parametrize("name", ["", "fast", "1/5", "1//5min", "-1s", "1/5/25minutes"])
def test_backoff_of_another_name(jobs, name):
    with pytest.raises(InvalidArgument):
        seconds(name, 1)
    jobs.put("1")
    job = jobs.take(0)
    with pytest.raises(InvalidArgument):
        job.release(backoff=name)
    job.ack()


def test_a_delay_and_a_backoff(jobs):
    jobs.put("1")
    job = jobs.take(0)
    with pytest.raises(InvalidArgument):
        job.release(3, backoff="1s")
    job.ack()


def test_fifottl_pri(another):
    """There 0 is the highest priority and the default."""
    tube = another(priority_order="redis").queue("tube")
    tube.put("later", priority=1)
    tube.put("default")
    tube.put("0", priority=0)
    assert [job.payload for job in tube.take_many(100, 0)] == [b"default", b"0", b"later"]
    with pytest.raises(InvalidArgument):
        tube.put("no such priority", priority=10)


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
    timers = broker._client.time_to_run.timers
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


def test_kick_wakes_a_consumer(broker, threads, asleep):
    tube = broker.queue("tube")
    tube.put("task")
    tube.take(0).bury()
    waiting = asleep(broker)
    taken = threads.submit(tube.take, PATIENCE_S)
    assert waiting.wait(PATIENCE_S)
    tube.dead_letters.replay()
    assert taken.result(PATIENCE_S).payload == b"task"


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


def test_with_all_disabled_a_reader_blocks_as_if_all_were_empty(broker, threads, asleep):
    queue = broker.queue("q")
    for key in "ab":
        queue.put(key, key=key)
        queue.pause(key)
    waiting = asleep(broker)
    taken = threads.submit(queue.take, PATIENCE_S)
    assert waiting.wait(PATIENCE_S)
    assert not taken.done()
    queue.resume("b")
    assert taken.result(PATIENCE_S).payload == b"b"


@pytest.mark.parametrize("name", ["one", "two", "three"])
def test_block_on_several_queues(another, threads, asleep, name):
    reader = another()
    waiting = asleep(reader)
    taken = threads.submit(reader.take, ["one", "two", reader.queue("three")], PATIENCE_S)
    assert waiting.wait(PATIENCE_S)
    another().queue(name).put("1")
    assert taken.result(PATIENCE_S).queue == name


def test_a_broker_that_takes_from_several_queues_gets_those_that_are_free(broker, another):
    jobs = broker.declare("jobs", arguments={"x-single-active-consumer": True})
    first, second = another(), another()
    first.queue("jobs").take(0)
    jobs.put("a")
    second.queue("others").put("b")
    assert second.take(["jobs", "others"], 0).payload == b"b"
    assert second.take(["jobs", "others"], 0) is None


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("x-fair-aging", "x-fair-ageing"),
        ("x-max-lenght", "x-max-length"),
        ("message-ttl", "x-message-ttl"),
        ("x-dead-letter-exchage", "x-dead-letter-exchange"),
    ],
)
def test_a_misspelt_argument_is_an_error(broker, misspelt, meant):
    with pytest.raises(InvalidArgument, match=f"Did you mean {meant}[?]"):
        broker.declare("jobs", arguments={misspelt: 60_000})


@pytest.mark.parametrize("key", ["", "alice"])
def test_conflict_free_enqueue(key):
    """Each conflicts on its own commit token only, so none is retried, whatever commits in between."""
    memory = FaultyDatabase()
    counted = CountingDatabase(memory)
    bench = Bench(counted)
    bench.put(b"first", key=key)
    other = bench.another()
    counted.reset()

    def other_commits_first():
        memory.before_commit = None
        other.publisher.publish([Publication("", "q", b"other", key=key)])

    memory.before_commit = other_commits_first
    bench.put(b"mine", key=key)
    assert [(cost.conflict_keys, cost.conflict_ranges) for cost in counted.transactions] == [(1, 0), (1, 0)]
    assert bench.payloads() == [b"first", b"other", b"mine"], "commit order"


def test_high_contention_dequeue(another, threads):
    """Eight consumers of four processes take all there is, each message once."""
    brokers = [another() for _ in range(4)]
    expected = sorted(b"%d" % number for number in range(200))
    brokers[0].queue("q").put_many(expected)

    def consume(broker):
        taken = []
        while (job := broker.queue("q").take(0)) is not None or broker.queue("q").count():
            if job is not None:
                job.ack()
                taken.append(job.payload)
        return taken

    shares = [each.result(PATIENCE_S * 3) for each in [threads.submit(consume, broker) for broker in brokers * 2]]
    assert sorted(chain.from_iterable(shares)) == expected
    assert brokers[0].queue("q").stats().leased == 0


def test_the_states_of_queue_bys_third_example(broker):
    """What is put, or taken: the round that is left, and what waits behind it, by key."""
    queue = broker.queue("q")
    for act, job, round_, behind in [
        ("put", "alice 1", [], {"alice": ["alice 1"]}),
        ("put", "bob x", [], {"alice": ["alice 1"], "bob": ["bob x"]}),
        ("put", "alice 2", [], {"alice": ["alice 1", "alice 2"], "bob": ["bob x"]}),
        ("take", "alice 1", ["bob x"], {"alice": ["alice 2"]}),
        ("put", "alice 3", ["bob x"], {"alice": ["alice 2", "alice 3"]}),
        ("put", "alice 4", ["bob x"], {"alice": ["alice 2", "alice 3", "alice 4"]}),
        ("take", "bob x", [], {"alice": ["alice 2", "alice 3", "alice 4"]}),
        ("put", "bob y", [], {"alice": ["alice 2", "alice 3", "alice 4"], "bob": ["bob y"]}),
        ("take", "alice 2", ["bob y"], {"alice": ["alice 3", "alice 4"]}),
        ("take", "bob y", [], {"alice": ["alice 3", "alice 4"]}),
        ("take", "alice 3", [], {"alice": ["alice 4"]}),
        ("take", "alice 4", [], {}),
    ]:
        if act == "put":
            queue.put(job, key=job.split()[0])
        else:
            taken = queue.take(0)
            taken.ack()
            assert taken.payload.decode() == job
        left, keys = queue.snapshot()
        assert [each.payload.decode() for each in left] == round_
        assert {key: [each.payload.decode() for each in waiting] for key, waiting in keys.items()} == behind
