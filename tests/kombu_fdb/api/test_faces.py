"""What every verb of the API does, of both faces: sync, and asyncio's driven from outside."""

import inspect
import math
import pickle
import re
from itertools import product
from pathlib import Path

import pytest
from kit.processes import until

import kombu_fdb
from kombu_fdb import (
    AlreadySettled,
    CapacityExceeded,
    InvalidArgument,
    LeaseLost,
    OptionError,
    QueueError,
    QueueNotFound,
    Spot,
    StoreUnavailable,
    aio,
    errors,
)
from kombu_fdb.api import arguments, dead_letters
from kombu_fdb.api import broker as broker_module
from kombu_fdb.api import job as job_module
from kombu_fdb.api import queue as queue_module
from kombu_fdb.api.consumer import Take
from kombu_fdb.engine.dead_letters import LetterWalk
from kombu_fdb.engine.scheduling import limit_changes
from kombu_fdb.model import KeyLimits, QueueControl
from kombu_fdb.routing.tables import Exchange, QueueDeclaration

PATIENCE_S = 60.0


@pytest.fixture
def jobs(broker):
    return broker.queue("jobs")


def placed(queue):
    stats = queue.stats()
    return stats.ready, stats.leased


# -- one job -----------------------------------------------------------------------------------------------------------


def test_put_take_and_ack(jobs):
    job_id = jobs.put("build", key="alice", priority=3)
    job = jobs.take(0)
    assert (job.id, job.queue, job.payload, job.key, job.attempts, job.deaths, job.ttr) == (
        job_id,
        "jobs",
        b"build",
        "alice",
        1,
        (),
        None,
    )
    job.extend()
    job.ack()
    assert placed(jobs) == (0, 0)
    with pytest.raises(AlreadySettled):
        job.ack()
    assert jobs.take(0) is None


def test_many(jobs):
    ids = jobs.put_many(["a", "b", "c"])
    taken = jobs.take_many(2, 0)
    assert [each.id for each in taken] == ids[:2]
    taken[0].release(error="not now")
    taken[1].bury(error="never")
    assert [each.payload for each in jobs.take_many(9, 0)] == [b"a", b"c"]


def test_a_take_sleeps_until_a_job_comes(sync, jobs, threads, asleep):
    sleeping = asleep(sync)
    taken = threads.submit(jobs.take, PATIENCE_S)
    assert sleeping.wait(PATIENCE_S)
    jobs.put("a")
    assert taken.result(PATIENCE_S).payload == b"a"


def test_a_take_of_several_queues(broker):
    for name in ("a", "b"):
        broker.queue(name).put_many([name + "1", name + "2"])
    queues = [broker.queue("a"), "b"]
    assert [broker.take(queues, 0).payload for _ in range(4)] == [b"a1", b"b1", b"a2", b"b2"]
    broker.queue("b").put("b3")
    broker.queue("a").put("a3")
    assert next(iter(broker.take_many(queues, 9, 0, in_order=True))).payload == b"a3"
    assert broker.take(queues, 0.001) is None


# -- with job ----------------------------------------------------------------------------------------------------------


def test_a_block_acks(jobs):
    jobs.put("a")
    with jobs.take(0) as job:
        assert job.payload == b"a"
    assert placed(jobs) == (0, 0)
    with pytest.raises(AlreadySettled):
        job.ack()


def test_a_block_that_raises_releases_with_the_error(broker):
    jobs = broker.declare("jobs", arguments={"x-delivery-limit": 1})
    jobs.put("a")
    for attempt in (1, 2):
        with pytest.raises(ZeroDivisionError), jobs.take(0) as job:
            assert job.attempts == attempt
            1 / 0  # noqa: B018
    (letter,) = jobs.dead_letters.list()
    assert letter.deaths[0].details == {"error": "division by zero", "error_class": "builtins.ZeroDivisionError"}


@pytest.mark.parametrize("how", ["ack", "release", "bury"])
def test_a_block_that_settles_is_left_alone(jobs, how):
    jobs.put("a")
    with jobs.take(0) as job:
        getattr(job, how)()
    expected = {"ack": (0, 0), "release": (1, 0), "bury": (0, 0)}[how]
    assert placed(jobs) == expected
    assert jobs.dead_letters.count().total() == (how == "bury")


@pytest.mark.parametrize("error", [LeaseLost, ZeroDivisionError])
def test_a_block_whose_job_is_lost_says_so_unless_it_has_an_error_of_its_own(jobs, error):
    job_id = jobs.put("a")
    with pytest.raises(error), jobs.take(0):
        assert jobs.delete(job_id)
        if error is ZeroDivisionError:
            1 / 0  # noqa: B018


class Unspeakable(Exception):
    def __str__(self):
        raise ZeroDivisionError


@pytest.mark.parametrize("how", ["block", "release", "bury"])
def test_an_error_that_can_t_tell_its_text_changes_nothing(broker, how):
    jobs = broker.declare("jobs", arguments={"x-delivery-limit": 0})
    jobs.put("a")
    job = jobs.take(0)
    if how == "block":
        with pytest.raises(Unspeakable), job:
            raise Unspeakable
    else:
        getattr(job, how)(error=Unspeakable())
    (letter,) = jobs.dead_letters.list()
    assert letter.deaths[0].details["error"] == "<unprintable>"
    assert letter.deaths[0].details["error_class"].endswith(".Unspeakable")


# -- consume -----------------------------------------------------------------------------------------------------------


def test_a_loop_ends_by_its_limit_and_holds_one_job(jobs):
    jobs.put_many("abcd")
    seen = []
    for job in jobs.consume(limit=3):
        assert placed(jobs) == (3 - len(seen), 1), "never more than one"
        with job:
            seen.append(job.payload)
    assert seen == [b"a", b"b", b"c"]
    assert placed(jobs) == (1, 0)


def test_a_loop_ends_when_no_job_comes(jobs):
    jobs.put_many("ab")
    seen = []
    for job in jobs.consume(timeout=0):
        with job:
            seen.append(job.payload)
    assert seen == [b"a", b"b"]


def test_a_loop_that_is_left_holds_nothing(jobs):
    jobs.put_many("ab")
    for job in jobs.consume():
        with job:
            break
    assert placed(jobs) == (1, 0)


def test_a_loop_over_several_queues(broker):
    for name in ("a", "b"):
        broker.queue(name).put_many([name + "1", name + "2"])
    seen = []
    for job in broker.consume([broker.queue("b"), "a"], timeout=0, in_order=True):
        with job:
            seen.append(job.payload)
    assert seen == [b"b1", b"b2", b"a1", b"a2"]


@pytest.mark.parametrize("how", ["stop", "close"])
def test_a_loop_that_sleeps_is_ended(sync, broker, jobs, threads, asleep, how):
    consumer, sleeping = jobs.consume(), asleep(sync)
    looped = threads.submit(list, consumer)
    assert sleeping.wait(PATIENCE_S)
    (consumer.stop if how == "stop" else broker.close)()
    assert looped.result(PATIENCE_S) == []
    assert list(consumer) == []


def test_a_loop_that_is_stopped_while_it_arms_does_not_sleep(jobs, monkeypatch):
    """Until it had armed once, a stop rang no bell, and the loop ended ``poll_interval`` later."""
    consumer, arm = jobs.consume(), Take.arm

    def arm_late(*args):
        consumer.stop()
        return arm(*args)

    monkeypatch.setattr(Take, "arm", arm_late)
    monkeypatch.setattr(Take, "shortest_s", lambda _: pytest.fail("it sleeps"))
    assert list(consumer) == []


def test_a_stopped_loop_takes_nothing(jobs):
    jobs.put("a")
    consumer = jobs.consume()
    consumer.stop()
    assert list(consumer) == []
    assert placed(jobs) == (1, 0)


# -- looking, moving, removing -----------------------------------------------------------------------------------------


def test_pages_and_spots(jobs):
    jobs.put_many([b"%d" % number * 50_000 for number in range(5)])
    first = jobs.page(2)
    assert [each.message.payload[:1] for each in first.messages] == [b"0", b"1"]
    rest = jobs.page(9, after=first.following)
    assert [each.message.payload[:1] for each in rest.messages] == [b"2", b"3", b"4"]
    assert rest.following is None
    spot = Spot.parse(str(first.messages[1].spot))
    assert jobs.at(spot).message.payload == b"1" * 50_000
    assert jobs.delete(spot)
    assert not jobs.delete(spot)
    assert jobs.at(spot) is None
    assert [each.payload for each in jobs.each()] == [b"%d" % number * 50_000 for number in (0, 2, 3, 4)]


def test_states(jobs):
    jobs.put("ready", key="k")
    jobs.put("later", delay=1000)
    jobs.put("taken", priority=9)
    job = jobs.take(0)
    for state, payload in (("ready", b"ready"), ("delayed", b"later"), ("leased", b"taken")):
        assert [each.payload for each in jobs.peek(5, state=state)] == [payload]
        assert [each.message.payload for each in jobs.page(state=state).messages] == [payload]
        assert [each.payload for each in jobs.each(state)] == [payload]
    assert jobs.peek(5, state="leased", key="nobody's") == []
    assert jobs.find(job.id).state == "leased"
    assert (jobs.count(), jobs.keys(), jobs.consumers()) == (1, jobs.keys(limit=9), [])
    assert [each.payload for each in jobs.snapshot().queues["k"]] == [b"ready"]
    assert jobs.delete(job)


def test_a_sync_queue_deletes_a_job_of_asyncio(sync):
    jobs = sync.queue("jobs")
    jobs.put("a")
    assert jobs.delete(aio.Job(jobs.take(), None))
    assert placed(jobs) == (0, 0)


def test_keys_in_pages(jobs):
    for key in "abc":
        jobs.put("x", key=key)
    assert list(jobs.keys()) == ["a", "b", "c"]
    assert list(jobs.keys(limit=2)) == ["a", "b"]
    assert list(jobs.keys(after="b")) == ["c"]
    assert list(jobs.keys(prefix="b")) == ["b"]
    assert list(jobs.keys(prefix="b", after="b")) == []


def test_reschedule(jobs):
    jobs.put("a", delay=1000)
    jobs.put("b")
    (delayed,), (ready,) = jobs.page(state="delayed").messages, jobs.page().messages
    assert jobs.reschedule(delayed.spot)
    assert jobs.reschedule(ready.spot, 1000, payload=b"c")
    assert not jobs.reschedule(delayed.spot)
    assert ([each.payload for each in jobs.peek(9)], jobs.stats().delayed) == ([b"a"], 1)
    (delayed,) = jobs.page(state="delayed").messages
    assert delayed.message.payload == b"c"
    for wrong in ((b"spot",), (delayed.spot, -1), (delayed.spot, "soon")):
        with pytest.raises(InvalidArgument):
            jobs.reschedule(*wrong)


def test_a_purge_in_parts(jobs):
    jobs.put_many("x" * 501)
    part = jobs.purge_part()
    jobs.put("later")
    assert (part.number, jobs.purge_part(part.following)) == (500, (1, None))
    assert [each.payload for each in jobs.peek(9)] == [b"later"]


def test_move(broker, jobs):
    jobs.put_many("abc")
    assert jobs.move("other", 1) == 1
    assert jobs.move(broker.queue("other")) == 2
    assert [each.payload for each in broker.queue("other").peek(9)] == [b"a", b"b", b"c"]
    with pytest.raises(QueueError):
        jobs.move(jobs)


def test_limits_and_control(jobs):
    assert jobs.limit("k", capacity=1, weight=2) == KeyLimits(capacity=1, weight=2) == jobs.limits("k")
    jobs.put("a", key="k")
    with pytest.raises(CapacityExceeded) as caught:
        jobs.put("b", key="k")
    assert caught.value.item == "b"
    jobs.unlimit("k")
    jobs.limit_every_key(max_in_flight=1)
    assert jobs.limits() == jobs.limits("k") == KeyLimits(max_in_flight=1)
    jobs.pause()
    assert jobs.take(0) is None
    assert jobs.control().paused
    jobs.resume()
    assert jobs.control(newcomer="first").newcomer == "first"
    jobs.reset_control()
    assert jobs.control().every_key == KeyLimits()
    jobs.pause("k")
    assert jobs.take(0) is None
    jobs.resume("k")
    assert jobs.take(0).payload == b"a"


def test_declare_and_drop(broker):
    jobs = broker.declare("jobs", arguments={"x-max-length": 5})
    assert jobs.declaration() == QueueDeclaration("jobs", arguments={"x-max-length": 5})
    jobs.put_many("abc")
    assert broker.queues()["jobs"].ready == 3
    assert jobs.purge() == 3
    assert jobs.drop() == 0
    assert jobs.declaration() is None
    with pytest.raises(InvalidArgument, match="Did you mean x-max-length"):
        broker.declare("jobs", arguments={"x-max-lenght": 5})


def test_a_declaration_with_an_unknown_argument(broker):
    with pytest.raises(InvalidArgument, match=r'arguments=\{"x-max-length": \.\.\.\}'):
        broker.declare("new", max_length=3)
    with pytest.raises(InvalidArgument, match="Known: arguments, auto_delete"):
        broker.declare("new", lenght=3)


def test_a_time_to_wait_that_is_no_number(jobs):
    with pytest.raises(InvalidArgument, match=r"given: 'x'\)\. Pass a number"):
        jobs.take(timeout="x")


def test_tasks_by_their_ids(broker, jobs):
    jobs.put("a", task_id="t")
    assert [each.payload for each in broker.find("t")] == [b"a"]
    (listed,) = broker.spots("t")
    assert jobs.at(listed.spot).message.payload == b"a"
    assert [each.payload for each in broker.cancel("t")] == [b"a"]
    assert broker.cancel("t") == broker.find("t") == broker.spots("t") == []


# -- dead letters ------------------------------------------------------------------------------------------------------


@pytest.fixture
def letters(jobs):
    for payload, error in (("a", KeyError("x")), ("b", OSError("y")), ("c", OSError("z"))):
        jobs.put(payload)
        jobs.take(0).bury(error=error)
    return jobs.dead_letters


def test_dead_letters(broker, jobs, letters):
    assert letters.count() == {"jobs.dead": 3}
    assert letters.count("error") == {"builtins.KeyError": 1, "builtins.OSError": 2}
    assert [each.payload for each in letters.list(1, error="OSError")] == [b"b"]
    assert [each.payload for each in letters.each()] == [b"a", b"b", b"c"]
    assert letters.get(letters.list(1)[0].message_id).payload == b"a"
    assert letters.replay(error="KeyError") == 1
    assert letters.discard(1) == 1
    assert broker.dead_letters("jobs.dead").replay(to="jobs", where=lambda letter: letter.payload == b"c") == 1
    assert [each.payload for each in jobs.peek(9)] == [b"a", b"c"]


def test_a_replay_at_a_spot(broker, jobs, letters):
    dead = broker.queue(letters.dead_queue)
    spots = [each.spot for each in dead.page().messages]
    assert letters.replay(at=spots[1:]) == 2
    assert letters.replay(at=spots) == 1, "the others have moved"
    assert [each.payload for each in jobs.peek(9)] == [b"b", b"c", b"a"]
    with pytest.raises(InvalidArgument):
        letters.replay(5, at=spots)


def test_replays_and_discards_in_parts(broker, jobs):
    jobs.put_many("x" * 250)
    for job in jobs.take_many(250, 0):
        job.bury(error=KeyError("k"))
    letters = jobs.dead_letters
    assert letters.replay_part(error="ValueError").number == 0
    part = letters.replay_part(error="KeyError")
    for job in jobs.take_many(1, 0):
        job.bury(error=KeyError("again"))
    assert (part.number, letters.replay_part(part.following, error="KeyError")) == (200, (50, None))
    assert (letters.count().total(), letters.discard_part()) == (1, (1, None))
    with pytest.raises(InvalidArgument):
        letters.replay_part(to=5)


def test_a_replay_of_what_was_changed(broker, jobs, letters):
    spot = broker.queue(letters.dead_queue).page().messages[1].spot
    assert letters.replay_changed(spot, b"better")
    assert not letters.replay_changed(spot, b"better")
    assert [each.payload for each in jobs.peek(9)] == [b"better"]


def test_a_replay_at_spots_tells_how_many_are_back(broker, jobs, letters):
    stranger = broker.queue("strangers")
    stranger.put("never died")
    spot = stranger.page().messages[0].spot
    with pytest.raises(QueueError) as caught:
        broker.dead_letters("strangers").replay(at=[spot])
    assert caught.value.replayed == 0
    jobs.drop()
    with pytest.raises(QueueNotFound):
        letters.replay(at=[broker.queue("jobs.dead").page().messages[0].spot])


# -- looking after it --------------------------------------------------------------------------------------------------


def test_inspection(broker, jobs):
    jobs.put("a")
    job = jobs.take(0)
    (session,) = broker.inspect.sessions(held=True)
    assert (session.held, session.open) == (1, True)
    assert broker.inspect.facts(["jobs"])["jobs"].control == QueueControl()
    assert broker.inspect.totals().keys() <= {"jobs"}
    assert broker.inspect.key_totals() == {}
    until(lambda: broker.inspect.samples("day"))  # the duties write them
    assert broker.inspect.samples("hour")[-1].queues.keys() == {"jobs"}
    with pytest.raises(InvalidArgument, match='"hour", "day" or "week"'):
        broker.inspect.samples("year")
    assert broker.inspect.set_aside() == []
    job.ack()


def test_topology(broker):
    shape = broker.topology
    shape.declare_exchange(Exchange("x", "topic"))
    shape.bind("jobs", "x", "a.*")
    assert shape.exchanges() == [Exchange("x", "topic")]
    assert shape.bindings() == [("x", "jobs", "a.*")]
    assert (shape.route("x", "a.b"), shape.route("x", "b")) == (["jobs"], [])
    with pytest.raises(errors.NotEquivalent):
        shape.declare_exchange(Exchange("x", "fanout"))
    shape.unbind("jobs", "x", "a.*")
    assert shape.delete_exchange("x")


def test_transfer(broker, jobs):
    jobs.put_many("ab")
    with pytest.warns(DeprecationWarning, match=r"Broker\.transfer"):
        assert repr(broker.migration).split(" at ")[0] == repr(broker.transfer).split(" at ")[0]
    moved = broker.transfer
    messages = list(moved.dump("jobs"))
    assert [each.payload for each in messages] == [b"a", b"b"]
    assert list(moved.dedups()) == []
    jobs.purge()
    marked = [(bytes([number] * 16), each) for number, each in enumerate(messages)]
    assert (moved.restore(b"i" * 16, marked), moved.restore(b"i" * 16, marked)) == (2, 0)
    assert moved.finished(b"i" * 16) is None
    moved.finish(b"i" * 16, {"messages": 2})
    assert moved.finished(b"i" * 16) == {"messages": 2}
    assert jobs.count() == 2


# -- errors ------------------------------------------------------------------------------------------------------------


WRONG = [
    lambda jobs: jobs.put("x", priority=10),
    lambda jobs: jobs.put("x", delay=-1),
    lambda jobs: jobs.put("x", ttl=0),
    lambda jobs: jobs.put(7),
    lambda jobs: jobs.take_many(0),
    lambda jobs: jobs.consume(limit=0),
    lambda jobs: jobs.limit("k", capcity=3),
    lambda jobs: jobs.limit("k", weight=0),
    lambda jobs: jobs.control(newcomer="last"),
    lambda jobs: jobs.dead_letters.replay(rate=0),
    lambda jobs: jobs.dead_letters.count("color"),
    lambda jobs: jobs.dead_letters.list(reson="rejected"),
    lambda jobs: jobs.take(math.nan),
    lambda jobs: jobs.take("1"),
    lambda jobs: jobs.take_many(math.inf, 0),
    lambda jobs: jobs.take_many(True, 0),
    lambda jobs: jobs.consume(timeout=math.nan),
    lambda jobs: jobs.consume(limit=1.5),
    lambda jobs: jobs.peek(-1),
    lambda jobs: jobs.peek(10**400),
    lambda jobs: jobs.peek(state="redy"),
    lambda jobs: jobs.peek(key=5),
    lambda jobs: jobs.page(0),
    lambda jobs: jobs.page(state=None),
    lambda jobs: jobs.keys(limit=-1),
    lambda jobs: jobs.keys(after=b"a"),
    lambda jobs: jobs.snapshot(math.nan),
    lambda jobs: jobs.at(None),
    lambda jobs: jobs.delete("a"),
    lambda jobs: jobs.pause(b"k"),
    lambda jobs: jobs.limit(7, weight=2),
    lambda jobs: jobs.limits(b""),
    lambda jobs: jobs.unlimit(0),
    lambda jobs: jobs.move("other", 0.5),
    lambda jobs: jobs.move(None),
    lambda jobs: jobs.dead_letters.discard(older_than=math.nan),
    lambda jobs: jobs.dead_letters.discard(message_id=b""),
    lambda jobs: jobs.dead_letters.get(None),
    lambda jobs: jobs.dead_letters.replay(limit=True),
    lambda jobs: jobs.dead_letters.replay(to=b"q"),
    lambda jobs: jobs.dead_letters.replay(rate=math.inf),
]


def test_an_error_is_one_line_whatever_was_given(jobs):
    class Given:
        def __repr__(self):
            return "two\nlines, \x1b[31mred"

    for wrong in (Given(), "two\nlines"):
        with pytest.raises(InvalidArgument) as caught:
            jobs.put("x", delay=wrong)
        assert str(caught.value).isprintable()


def test_a_wrong_argument_is_an_invalid_argument_and_a_value_error(jobs):
    for number, call in enumerate(WRONG):
        try:
            call(jobs)
        except InvalidArgument as error:
            refused = error
        else:
            pytest.fail(f"the call at {number} of WRONG is taken")
        assert isinstance(refused, ValueError), number
        assert not isinstance(refused, OptionError), number


@pytest.mark.parametrize("face", [kombu_fdb.Broker, aio.Broker], ids=["sync", "async"])
def test_a_url_is_for_open(face):
    with pytest.raises(InvalidArgument, match=r"given: str\)\. .*Broker\.open\(url\)") as caught:
        face("fdb://shop:secret@10.0.0.1:4500/shop")
    assert "secret" not in str(caught.value)


def test_no_queue_is_an_invalid_argument(broker):
    for queues, verb in product(([], "jobs", None, 5, [None], [b"jobs"], ["\ud800"]), (broker.take, broker.consume)):
        with pytest.raises(InvalidArgument):
            verb(queues)


def test_no_name_is_an_invalid_argument(broker):
    shape = broker.topology
    verbs = (
        *(broker.queue, broker.dead_letters, broker.declare, broker.find, broker.spots, broker.cancel),
        *(shape.delete_exchange, lambda name: shape.route(name, ""), lambda name: shape.unbind("q", name, "")),
    )
    for name, verb in product((None, 5, True, b"jobs", ["jobs"], "\ud800"), verbs):
        with pytest.raises(InvalidArgument):
            verb(name)


def test_an_unreadable_declaration_is_refused(broker):
    for wrong, name in product((None, 0, 1, "yes", math.nan), ("durable", "exclusive", "auto_delete", "arguments")):
        with pytest.raises(InvalidArgument):
            broker.declare("jobs", **{name: wrong})
        if name != "exclusive":
            with pytest.raises(InvalidArgument):
                broker.topology.declare_exchange(Exchange("x", **{name: wrong}))
    assert (broker.queues(), broker.topology.exchanges()) == ({}, [])


def test_a_time_out_may_be_longer_than_any_clock(broker, jobs):
    jobs.put_many("ab")
    for timeout in (math.inf, 10**400):
        assert jobs.take(timeout) is not None
    assert jobs.take(-math.inf) is None


def test_a_closed_broker_says_so(broker, jobs):
    jobs.put("a")
    job = jobs.take(0)
    broker.close()
    broker.close()
    for call in (jobs.count, job.ack, jobs.take, broker.queues, lambda: jobs.put("b")):
        with pytest.raises(StoreUnavailable, match="closed"):
            call()


def test_a_take_ends_with_its_broker(sync, broker, jobs, threads, asleep):
    sleeping = asleep(sync)
    taken = threads.submit(jobs.take)
    assert sleeping.wait(PATIENCE_S)
    broker.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        taken.result(PATIENCE_S)


# -- what both are made of ---------------------------------------------------------------------------------------------

PAIRS = [
    (broker_module.Broker, aio.Broker),
    (queue_module.Queue, aio.Queue),
    (job_module.Job, aio.Job),
    (dead_letters.DeadLetters, aio.DeadLetters),
    (kombu_fdb.Consumer, aio.Consumer),
    (broker_module.Inspection, aio.Inspection),
    (broker_module.Transfer, aio.Transfer),
    (broker_module.Topology, aio.Topology),
]
#: Of the sync face: what the other one is made of, and the store, which has nothing to await.
INNER = {"connection", "database", "lease", "of", "on"}


def verbs(cls):
    return {name for name, _ in inspect.getmembers(cls) if not name.startswith("_")} - INNER


@pytest.mark.parametrize(("sync", "other"), PAIRS, ids=lambda cls: cls.__qualname__)
def test_both_faces_have_the_same_verbs_with_the_same_arguments(sync, other):
    assert verbs(sync) <= verbs(other)
    for name in verbs(sync) - {"open"}:
        mine, its = getattr(sync, name), getattr(other, name)
        if callable(mine):
            assert list(inspect.signature(mine).parameters) == list(inspect.signature(its).parameters), name


def test_shared_arguments_are_those_of_the_values():
    assert set(queue_module.LimitChanges.__annotations__) == {*KeyLimits.__dataclass_fields__}
    assert set(arguments.Declaration.__annotations__) == {*QueueDeclaration.__dataclass_fields__} - {"name"}
    not_set = {"limited", "single_active", "consumer_timeout_ms"}
    assert set(queue_module.ControlChanges.__annotations__) == {*QueueControl.__dataclass_fields__} - not_set
    others = {"dead", "last", "died_after_ms", "died_before_ms"}
    wanted = {*LetterWalk.__dataclass_fields__} - others | {"older_than", "younger_than"}
    assert set(arguments.Conditions.__annotations__) == wanted


def test_an_unknown_setting_is_told_those_that_can_be_set():
    with pytest.raises(InvalidArgument) as caught:
        limit_changes._replace(QueueControl(), {"new_comer": "first"})
    known = re.findall(r"\w+", str(caught.value).partition("Known limits:")[2])
    assert set(known) == set(queue_module.ControlChanges.__annotations__)


def test_every_error_stands_in_the_tree_and_can_be_imported_from_the_package():
    tree = errors.__doc__
    for name in errors.__all__:
        assert re.search(rf" {name}[ \n]", tree), f"{name} is not in the docstring's tree"
        assert getattr(kombu_fdb, name) is getattr(errors, name)
        error = getattr(errors, name)(fix="Do so.")
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))


def test_the_version_is_that_of_the_distribution():
    text = Path(__file__).parents[3].joinpath("pyproject.toml").read_text()
    assert f'version = "{kombu_fdb.__version__}"' in text
    assert "__version__" in dir(kombu_fdb)
