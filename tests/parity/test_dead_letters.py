"""Dead letters: read, count, replay and discard them, in parts (the processing queue's "DLQ reader and replay")."""

import json
import os
import struct
from collections import Counter

import pytest

from kombu_fdb.api.dead_letters import DeadLetters
from kombu_fdb.engine.dead_letters import LETTERS_PER_TRANSACTION
from kombu_fdb.errors import InvalidArgument, QueueNotFound
from kombu_fdb.routing.tables import Exchange, QueueDeclaration


@pytest.fixture
def jobs(broker):
    return broker.queue("jobs")


class Holder:
    """A bench as a broker."""

    def __init__(self, bench):
        self.engine = bench.engine


@pytest.fixture
def letters(bench):
    """Of queue q, on the bench's clock."""
    return DeadLetters(Holder(bench), "q.dead", clock=bench.clock)


def die(bench, *payloads, reason="rejected", queue="q", **details):
    for payload in payloads:
        bench.put(payload, queue=queue)
        bench.engine.messages.reject([each.lease for each in bench.take(1, queue)], reason=reason, **details)


def task(name):
    """What Celery publishes, as far as these tests look."""
    meta = json.dumps(["application/json", "utf-8", {"task": name, "id": "1"}, {}, "", "q"]).encode()
    return struct.pack(">BI", 1, len(meta)) + meta + b"[]"


# -- looking -----------------------------------------------------------------------------------------------------------


def test_count_by_reason_task_key_and_error(broker, jobs):
    for name, key, error in (("mail", "a", ValueError("1")), ("mail", "b", KeyError("2")), ("pay", "a", "3")):
        jobs.put(task(name), key=key)
        jobs.take(0).bury(error=error)
    letters = jobs.dead_letters
    assert letters.count() == {"jobs.dead": 3}
    assert letters.count("reason") == {"rejected": 3}
    assert letters.count("task") == {"mail": 2, "pay": 1}
    assert letters.count("key") == {"a": 2, "b": 1}
    assert letters.count("error") == {"builtins.ValueError": 1, "builtins.KeyError": 1, "": 1}
    assert letters.count("queue", task="mail") == {"jobs": 2}
    assert letters.count(error="KeyError") == {"jobs.dead": 1}
    assert letters.count(lambda letter: str(len(letter.key)), where=lambda letter: letter.key == "b") == {"1": 1}
    with pytest.raises(InvalidArgument):
        letters.count("colour")


def test_bytes_that_can_not_be_read_are_seen_and_discarded_and_not_replayed(bench, letters):
    die(bench, b"1")  # as many bytes as what is put in its place, which the queue counts
    ((key, _),) = bench.engine.transactions.read(lambda work: work.tr.get_range(*_whole(bench)))
    bench.write(lambda tr: tr.set(key, b"\xff"))
    assert [each.payload for each in letters.list()] == [b"\xff"]
    assert letters.replay() == letters.discard(reason="rejected") == 0
    assert letters.discard() == 1
    bench.write(lambda tr: tr.clear_range(*_range(bench.engine.keys._key("task"))))  # of the message that was there


def _range(prefix):
    return prefix, prefix + b"\xff"


def _whole(bench):
    return _range(bench.engine.keys.ready("q.dead"))


# -- replay ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "conditions",
    [
        {"reason": "malformed"},
        {"error": "KeyError"},
        {"error": "builtins.KeyError"},
        {"task": "pay"},
        {"where": lambda letter: b"pay" in letter.payload},
        {"reason": "malformed", "queue": "q", "key": "", "task": "pay"},
    ],
)
def test_replay_by_condition(bench, letters, conditions):
    die(bench, task("mail"), b"plain", error="x", error_class="builtins.ValueError")
    die(bench, task("pay"), reason="malformed", error_class="builtins.KeyError")
    assert letters.replay(**conditions) == 1
    assert bench.payloads() == [task("pay")]
    assert letters.replay(**conditions) == 0
    assert letters.discard(task="mail") == 1
    assert [each.payload for each in letters.list()] == [b"plain"]


def test_priority_is_kept_through_death_and_replay(bench, letters):
    priorities = {b"low": 0, b"high": 9, b"middle": 5}
    for payload, priority in priorities.items():
        bench.put(payload, priority=priority, key="alice")
    bench.engine.messages.reject([each.lease for each in bench.take()])
    assert [each.priority for each in letters.list()] == [9, 5, 0], "in the order of the deaths"
    assert letters.replay() == 3
    for _ in range(2):  # and again
        assert list(bench.engine.inspect.keys_of("q")) == ["alice"]
        taken = bench.take()
        assert [each.payload for each in taken] == [b"high", b"middle", b"low"]
        bench.engine.messages.reject([each.lease for each in taken])
        assert letters.replay() == 3


def test_a_dead_letter_exchange_delivers_by_priority(bench):
    bench.engine.queues.declare_exchange(Exchange("dead", "fanout"))
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-dead-letter-exchange": "dead"}))
    bench.engine.queues.bind("graveyard", "dead", "")
    bench.put(b"low", priority=1)
    bench.engine.messages.reject([each.lease for each in bench.take()])
    bench.put(b"high", priority=8)
    bench.engine.messages.reject([each.lease for each in bench.take()])
    assert bench.payloads(10, "graveyard") == [b"high", b"low"]


def test_replay_into_a_deleted_queue_names_the_fix_and_loses_nothing(broker, jobs):
    for number in range(2):
        jobs.put(str(number))
        jobs.take(0).bury()
    jobs.drop()
    with pytest.raises(QueueNotFound, match="to=") as caught:
        jobs.dead_letters.replay()
    assert caught.value.queue == "jobs"
    with pytest.raises(QueueNotFound):
        jobs.dead_letters.replay(to="typo")
    assert jobs.dead_letters.count().total() == 2
    broker.declare("jobs", durable=True)
    assert jobs.dead_letters.replay() == 2


def test_a_replay_that_meets_a_deleted_queue_says_what_it_has_done(bench):
    number = LETTERS_PER_TRANSACTION
    bench.engine.queues.declare_exchange(Exchange("dead", "fanout"))
    bench.engine.queues.bind("graveyard", "dead", "")
    for queue in ("q", "gone"):
        bench.engine.queues.declare(QueueDeclaration(queue, arguments={"x-dead-letter-exchange": "dead"}))
        bench.put(*(b"%d" % each for each in range(number)), queue=queue)
        bench.engine.messages.reject([each.lease for each in bench.take(number, queue)])
    bench.engine.queues.delete("gone")
    graveyard = DeadLetters(Holder(bench), "graveyard", clock=bench.clock)
    with pytest.raises(QueueNotFound) as caught:
        graveyard.replay()
    assert (caught.value.queue, caught.value.replayed) == ("gone", number)
    assert bench.counts("graveyard") == (number, 0, 0)


def test_what_dies_again_during_a_replay_is_left_for_the_next(bench, letters):
    die(bench, *(b"%d" % number for number in range(3)))
    seen = []

    def die_again(done):
        seen.append(done)
        bench.engine.messages.reject([each.lease for each in bench.take()])

    assert letters.replay(rate=1, progress=die_again) == 3
    assert seen[-1] == 3
    assert bench.counts("q.dead") == (3, 0, 0)
    assert [letter.deaths[0].count for letter in letters.list()] == [2, 2, 2]


def test_replay_at_a_rate_on_the_callers_clock(bench, letters):
    die(bench, *(b"%d" % number for number in range(30)))
    begin, times = bench.clock.monotonic(), []
    assert letters.replay(rate=10, progress=lambda done: times.append((done, bench.clock.monotonic() - begin))) == 30
    assert times[0] == (5, 0)
    for done, at in times:
        assert done <= 5 + 10 * at + 1e-6, "never more than the rate allows, and half a second's worth at once"
    assert times[-1][1] == pytest.approx(2.5, abs=0.01)
    with pytest.raises(InvalidArgument):
        letters.replay(rate=0)


def test_a_slow_replay_can_be_stopped_and_goes_on_where_it_was(bench, letters):
    die(bench, b"0", b"1", b"2")
    begin, done = bench.clock.monotonic(), []
    assert letters.replay(rate=0.01, progress=done.append, stop=lambda: bool(done)) == 1
    assert bench.clock.monotonic() == begin, "at once, though the next was due in 100 s"
    assert bench.counts("q.dead") == (2, 0, 0)
    assert letters.replay() == 2
    assert bench.payloads() == [b"0", b"1", b"2"]


@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_a_caller_killed_between_two_parts_loses_nothing(bench, letters, verb):
    """The exception stands for the kill: no line of ours runs after it."""
    number = LETTERS_PER_TRANSACTION + 30
    bench.put(*(b"%d" % each for each in range(number)))
    bench.engine.messages.reject([each.lease for each in bench.take(number)])

    def killed(done):
        raise KeyboardInterrupt(done)

    with pytest.raises(KeyboardInterrupt):
        getattr(letters, verb)(progress=killed)
    back = LETTERS_PER_TRANSACTION if verb == "replay" else 0
    assert (bench.counts("q"), bench.counts("q.dead")) == ((back, 0, 0), (30, 0, 0))
    assert getattr(letters, verb)() == 30
    assert bench.counts("q.dead") == (0, 0, 0)
    assert bench.payloads(1000) == [b"%d" % each for each in range(number if verb == "replay" else 0)]


@pytest.mark.parametrize("size", [10, 300_000])
def test_discard_deletes_all_there_is_of_a_message(bench, letters, size):
    bench.put(os.urandom(size))
    bench.engine.messages.reject([each.lease for each in bench.take()])
    assert letters.discard(where=lambda letter: len(letter.payload) == size) == 1
    whole = _range(bench.engine.keys._key("body"))
    assert bench.engine.transactions.read(lambda work: work.tr.get_range(*whole)) == []


def test_two_replays_at_once_move_each_letter_once(another, threads):
    brokers = [another(), another()]
    brokers[0].queue("jobs").put_many([str(number) for number in range(400)])
    for job in brokers[0].queue("jobs").take_many(400):
        job.bury()
    moved = list(threads.map(lambda broker: broker.queue("jobs").dead_letters.replay(), brokers))
    assert sum(moved) == 400
    payloads = Counter(job.payload for job in brokers[1].queue("jobs").take_many(1000))
    assert payloads == {b"%d" % number: 1 for number in range(400)}
