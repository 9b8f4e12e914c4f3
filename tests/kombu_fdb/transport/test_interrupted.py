"""Exceptions out of signal handlers, and closing: no message is held without an owner, and nothing stays locked."""

import dis
import queue
import threading
from functools import partial
from itertools import pairwise
from operator import methodcaller
from typing import Any

import pytest
from kit.faults import Fault, Faults, FaultyDatabase, Interrupted
from kit.interruption import interrupt, runs_handlers
from kit.processes import until
from kombu import Connection

import kombu_fdb.api.broker
import kombu_fdb.api.connection
import kombu_fdb.api.consumer
import kombu_fdb.api.job
import kombu_fdb.api.queue
from kombu_fdb import Broker
from kombu_fdb.engine.facade import messages
from kombu_fdb.engine.messages import publish
from kombu_fdb.model import Lease, Publication
from kombu_fdb.primitives import interruption
from kombu_fdb.primitives.clock import random_id
from kombu_fdb.process import client, client_session, session_threads
from kombu_fdb.process.time_to_run import TimesToRun
from kombu_fdb.store import retry
from kombu_fdb.testing.stores import MemoryStores
from kombu_fdb.transport import channel, connection, envelope, unacked
from kombu_fdb.transport.consuming import dispatch, fetcher, receiver

#: Where an exception may strike: what runs in the thread that takes, puts and settles.
API = (kombu_fdb.api.broker, kombu_fdb.api.connection, kombu_fdb.api.queue, kombu_fdb.api.consumer)
MODULES = (
    *API,
    channel,
    client,
    session_threads,
    unacked,
    dispatch,
    client_session,
    retry,
    messages,
    publish,
)
WATCHED = {str(each.__file__) for each in MODULES}
MOST_WAIT_QUEUES = 400


@pytest.fixture(params=[True, False], ids=["tokens", "answered"])
def tokens(request):
    """A store that may lose answers, and one that never does."""
    return Faults() if request.param else None


@pytest.fixture
def broker(tokens):
    url = f"fdb+memory://{random_id().hex()}"
    with MemoryStores(lambda: FaultyDatabase(faults=tokens)), Broker.open(url, delivery_limit=None) as broker:
        yield broker


def in_another_thread(call):
    """It must not wait for what the interrupted thread holds."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "something stayed locked"


def each_line(call, after, watched=WATCHED):
    """Interrupt ``call`` at every line in turn; look ``after`` each."""
    for line in range(1, MOST_WAIT_QUEUES):
        if not interrupt(call, line, watched, strikes=runs_handlers):
            return line
        after()
    raise AssertionError("the call has no end")


def held(broker):
    """How many messages this process holds, when all that is suspect is recovered."""
    own = broker._client.session()
    for first in list(own._claims):  # given up by age, else
        own.give_up(first)
    in_another_thread(own.watch_claims)
    return broker.queue("q").stats().leased


def settle_down(broker):
    """What the duties thread does."""
    in_another_thread(broker._client.deferred_calls.run)
    in_another_thread(broker._client._release_pending)


def let_all_go(broker):
    """As soon as the duties thread has released what it has taken from the list."""
    settle_down(broker)
    until(lambda: held(broker) == 0 and not broker._client.owes, say=lambda: f"{held(broker)} are held")


def claim(broker):
    broker._client.session().claim(["q"], 2)


def take(broker):
    broker.queue("q").take_many(2, timeout=0)


def wait(broker):
    """In a wait queue with competitors."""
    broker.connection.contention.contest(["q"])
    broker.queue("q").take_many(2, timeout=5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a job's finalizer
@pytest.mark.parametrize("how", [claim, take, wait])
def test_a_take_that_is_interrupted_anywhere_holds_nothing(broker, how):
    queue = broker.queue("q")
    queue.put_many([str(number) for number in range(3)])
    queue.take(timeout=0).release()

    def look():
        let_all_go(broker)
        assert queue.stats().ready == 3
        assert not broker.connection.held
        assert not any(broker.connection.arriving.values())
        assert not broker.connection.sleepers
        assert not broker._client.session().consumed
        assert not broker._client.session().known

    assert each_line(lambda: how(broker), look) > 20


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a job's finalizer
@pytest.mark.parametrize("how", ["ack", "release", "bury"])
def test_a_settlement_that_is_interrupted_anywhere_leaves_nothing_held(broker, how):
    """A lease that the process believes to hold would keep the store open for good."""
    settle = methodcaller(how)
    queue = broker.queue("q")
    jobs = []

    def take():
        queue.put("x", ttr=3600)
        jobs.append(queue.take(timeout=0))

    def look():
        jobs.clear()  # Python ends it, and so drops what was not settled
        let_all_go(broker)
        assert not broker.connection.held
        queue.purge()
        take()

    take()
    assert each_line(lambda: settle(jobs[-1]), look, WATCHED | {str(kombu_fdb.api.job.__file__)}) > 10


def test_a_session_whose_opening_was_interrupted_is_not_kept(broker):
    """Its threads would go on when the store is closed, and it would never end."""
    own, files, others = broker._client, {str(client.__file__)}, set(threading.enumerate())
    line, where = 0, "yes"
    while where:
        line += 1
        where = interrupt(own.session, line, files, strikes=runs_handlers)
        known, own._session = own._session, None
        if known is not None:
            known.stop()
        for thread in set(threading.enumerate()) - others:
            thread.join(10)
            assert not thread.is_alive(), f"{thread.name} has no end after {where}"
    assert line > 5


def test_a_get_that_is_interrupted_anywhere_holds_nothing(tokens):
    url = f"fdb+memory://{random_id().hex()}"
    with MemoryStores(lambda: FaultyDatabase(faults=tokens)), Broker.open(url) as broker, Connection(url) as connection:
        queue = broker.queue("q")
        connection.Producer(auto_declare=False).publish("x", routing_key="q")
        connection.default_channel.basic_get("q").requeue()

        def look():
            let_all_go(broker)
            assert queue.stats().ready == 1
            assert not len(connection.default_channel.qos)

        assert broker._client is connection.default_channel.client
        assert each_line(lambda: connection.default_channel.basic_get("q"), look) > 20


@pytest.mark.parametrize("how", ["get", "consume"])
@pytest.mark.parametrize("error", [TimeoutError, MemoryError])
def test_what_interrupts_the_opening_of_a_message_says_nothing_of_it(how, error):
    """An alarm's exception may be no ``BaseException``; the message is as good as before."""
    url, opening = f"fdb+memory://{random_id().hex()}", [channel.Channel.open, envelope.open_delivery]
    codes = {each.__code__ for each in (*opening, envelope.open_payload)}
    with MemoryStores(), Broker.open(url) as broker, Connection(url) as connection:
        own, received = connection.default_channel, queue.SimpleQueue[Any]()
        connection.Producer(auto_declare=False).publish("x", routing_key="q")
        if how == "consume":
            own.basic_consume("q", False, received.put, "tag")

        def once():
            if how == "consume":
                connection.drain_events(timeout=10)
            else:
                received.put(own.basic_get("q"))

        def look():
            settle_down(broker)
            assert broker.queue("q.dead").count() == 0

        def strikes(frame):
            return frame.f_code in codes and runs_handlers(frame)

        files, line = {code.co_filename for code in codes}, 1
        while interrupt(once, line, files, strikes=strikes, error=error):
            line += 1
            look()
        assert line > 10
        assert received.get_nowait().payload == "x"


def test_a_rejection_for_later_that_is_interrupted_anywhere_happens_once(tokens):
    """It is made, and takes no place, or the message is held as before; no call stays open for good."""
    url = f"fdb+memory://{random_id().hex()}"
    with MemoryStores(lambda: FaultyDatabase(faults=tokens)), Broker.open(url) as broker, Connection(url) as connection:
        queue = broker.queue("q")
        own, got = connection.default_channel, list[Any]()

        def get():
            connection.Producer(auto_declare=False).publish("x", routing_key="q")
            got.append(own.basic_get("q"))

        def look():
            settle_down(broker)
            until(lambda: not broker._client.deferred_calls)  # the duties thread may be making it
            is_held = own.qos.holds(got[-1].delivery_tag)
            assert is_held <= queue.stats().leased
            if is_held:
                got[-1].ack()
            elif queue.stats().leased:  # it had not been deferred yet: it comes back with the session
                broker._client.release(list(broker._client.attempted))
                queue.purge()
            get()

        get()
        assert each_line(lambda: own.qos.settle_later(got[-1].delivery_tag, requeue=False), look) > 10


def test_an_ack_that_is_interrupted_anywhere_can_be_repeated(broker):
    queue = broker.queue("q")
    jobs = []

    def take():
        queue.put("x")
        jobs.append(queue.take(timeout=5))
        broker._client.acks.append(jobs[-1]._delivery.lease)

    def ack():
        broker._client.flush_acks()

    def look():
        in_another_thread(broker._client.flush_acks)
        assert queue.stats().leased == 0, "the ack is lost"
        take()

    take()
    assert each_line(ack, look) > 5


def after_calls(code):
    """Where Python looks for signals within a line, among other places."""
    return {after.offset for call, after in pairwise(dis.get_instructions(code)) if call.opname.startswith("CALL")}


def interrupt_after_call(call, number, *codes):
    """Raise behind the so many-th call out of this code; False if there are not so many."""
    places = {code: after_calls(code) for code in codes}
    files = {code.co_filename for code in codes}

    def strikes(frame):
        return frame.f_lasti in places.get(frame.f_code, ())

    return bool(interrupt(call, number, files, per="opcode", strikes=strikes))


def test_acks_that_are_taken_are_always_somewhere(broker):
    own, number, codes = broker._client, 0, (client.Client.take_acks.__code__, interruption.move.__code__)
    while True:
        number += 1
        own.acks.extend(Lease(b"s", each) for each in range(3))
        taken = []
        struck = interrupt_after_call(lambda: own.take_acks(taken), number, *codes)  # noqa: B023
        assert [each.number for each in (*taken, *own.acks)] == [0, 1, 2]
        own.acks.clear()
        if not struck:
            break
    assert number > 2


#: With a condition, Python code stands between a lock and the thread that takes it.
CONDITION = [threading.Condition.__enter__, threading.Condition.__exit__, threading.Condition.notify]


def test_a_time_to_run_that_is_interrupted_anywhere_locks_no_thread_out():
    lease = Lease(b"s", 1)
    codes = [each.__code__ for each in (*CONDITION, TimesToRun.watch, TimesToRun.forget, TimesToRun.clear)]
    timers = TimesToRun(lambda leases, _counted: len(leases))

    def begin_and_end():
        timers.watch(lease, 3600, started=lambda: True, gone=lambda: None)
        timers.forget([lease])
        timers.clear()

    number = 1
    while interrupt_after_call(begin_and_end, number, *codes):
        in_another_thread(begin_and_end)
        number += 1
    assert number > 5


def test_a_cancel_that_is_interrupted_while_it_waits_stops_no_receiver():
    url = f"fdb+memory://{random_id().hex()}"
    with MemoryStores(), Connection(url) as connection:
        channel, received = connection.default_channel, queue.SimpleQueue[Any]()
        for name in ("q", "other"):
            channel.queue_declare(name)
        channel.basic_consume("q", True, received.put, "stays")
        for number in range(1, 4):
            channel.basic_consume("other", True, print, "goes")
            interrupt_after_call(lambda: channel.basic_cancel("goes"), number, *(each.__code__ for each in CONDITION))
            connection.Producer(auto_declare=False).publish("x", routing_key="q")
            connection.drain_events(timeout=60)
            assert received.get_nowait().payload == "x"


def test_a_put_that_is_interrupted_anywhere_is_stored_once_when_repeated():
    with (
        MemoryStores(lambda: FaultyDatabase(faults=Faults())),
        Broker.open(f"fdb+memory://{random_id().hex()}") as broker,
    ):
        engine, stored = broker._engine, 0

        def put():
            engine.publisher.publish([Publication("", "q", b"%d" % stored)])

        def look():
            nonlocal stored
            in_another_thread(put)
            stored += 1
            assert broker.queue("q").count() == stored

        assert each_line(put, look) > 20


def test_a_consumer_that_is_interrupted_after_the_commit_holds_nothing():
    faults = Faults()
    with (
        MemoryStores(lambda: FaultyDatabase(faults=faults)),
        Broker.open(f"fdb+memory://{random_id().hex()}") as broker,
    ):
        queue = broker.queue("q")
        queue.put("x")
        queue.take(timeout=0).release()
        faults.at_commits(Fault.INTERRUPTED)
        with pytest.raises(Interrupted):
            queue.take(timeout=0)
        assert held(broker) == 0
        assert queue.count() == 1


def test_a_close_that_is_interrupted_anywhere_is_completed_by_the_next(broker):
    queue = broker.queue("q")
    queue.put_many(["1", "2", "3"])
    ends = []

    def close():
        another = Broker(broker._client)
        ends.append((another, another.queue("q").take_many(2, timeout=0)))  # its program keeps the jobs
        another.close()

    def look():
        another, jobs = ends.pop()
        assert len(jobs) == 2
        another.close()
        let_all_go(broker)
        assert queue.stats().ready == 3
        assert not broker._client.session().known

    strikes = frozenset(str(each.__file__) for each in (kombu_fdb.api.connection, client))
    for line in range(1, MOST_WAIT_QUEUES):
        where = interrupt(close, line, strikes, strikes=lambda frame: is_closing(frame) and runs_handlers(frame))
        look()
        if not where:
            break
    assert line > 20


def is_closing(frame):
    while frame is not None and frame.f_code is not kombu_fdb.api.connection.Connection.close.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.mark.parametrize("what", ["close the channel", "close the connection", "consume", "cancel"])
def test_a_closed_connection_holds_nothing_whatever_was_interrupted(what):
    url, where, line = f"fdb+memory://{random_id().hex()}", "begin", 0
    files = frozenset(str(each.__file__) for each in (channel, connection, unacked, dispatch, fetcher, receiver))
    with MemoryStores(), Broker.open(url) as broker, Connection(url) as another:
        users = broker._client._users
        queue, producer = broker.queue("q"), another.Producer(auto_declare=False)
        for body in ("1", "2", "3"):
            producer.publish(body, routing_key="q")
        while where:
            line += 1
            with Connection(url) as kombu:
                consumer, got = kombu.channel(), list[Any]()
                consumer.basic_qos(0, 2, False)
                consumer.basic_consume("q", False, got.append, "tag")
                kombu.drain_events(timeout=5)
                calls = {
                    "close the channel": consumer.close,
                    "close the connection": kombu.close,
                    "consume": partial(kombu.channel().basic_consume, "q", False, got.append),
                    "cancel": partial(consumer.basic_cancel, "tag"),
                }
                where = interrupt(calls.pop(what), line, files, strikes=runs_handlers)
            until(lambda: queue.stats().leased == 0, say=lambda where=where: where)
            assert queue.stats().ready == 3, where
            until(lambda: another.default_channel.queue_declare("q", passive=True).consumer_count == 0)
            assert len(users) == 2, where
    assert line > 10


def test_a_consumer_whose_thread_could_not_start_can_be_made_again(monkeypatch):
    with MemoryStores(), Connection(f"fdb+memory://{random_id().hex()}") as kombu:
        kombu.Producer(auto_declare=False).publish("x", routing_key="q")
        got = []
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            patch.setattr(receiver, "start", strike)
            kombu.default_channel.basic_consume("q", True, got.append)
        kombu.default_channel.basic_consume("q", True, got.append)
        kombu.drain_events(timeout=10)
        assert len(got) == 1


def test_a_consumer_that_was_registered_without_an_answer_leaves():
    faults = Faults()
    with MemoryStores(lambda: FaultyDatabase(faults=faults)), Connection(f"fdb+memory://{random_id().hex()}") as kombu:
        channel = kombu.default_channel
        channel.queue_declare("q")
        channel.basic_consume("q", True, print, "tag")
        channel.client.session()
        faults.at_commits(Fault.INTERRUPTED)
        with pytest.raises(Interrupted):
            channel.basic_consume("q", True, print)
        channel.basic_cancel("tag")
        until(lambda: channel.queue_declare("q", passive=True).consumer_count == 0)


def strike(*_):
    raise Interrupted


def test_closing_settles_every_pending_ack(tmp_path):
    url = f"fdb+sqlite:///{tmp_path}/b.db"
    with Broker.open(url) as broker:
        broker.queue("q").put_many(["x"] * 1200)
        found = [each for _ in range(12) for each in broker._client.session().claim(["q"], 100)]
        broker._client.acks.extend(each.lease for each in found)
        broker._client.close()
    with Broker.open(url) as broker:
        assert len(found) == 1200
        stats = broker.queue("q").stats()
        assert (stats.ready, stats.leased) == (0, 0)


def test_threads_claim_side_by_side(broker, monkeypatch):
    """BOUNDED: with a lock around it, the last of ten would wait for nine timeouts of the store."""
    queue, together = broker.queue("q"), threading.Barrier(10, timeout=10)
    assert queue.take(timeout=0) is None
    claim = broker._engine.messages.claim

    def claim_together(*args, **given):
        together.wait()
        return claim(*args, **given)

    monkeypatch.setattr(broker._engine.messages, "claim", claim_together)
    threads = [threading.Thread(target=lambda: queue.take(timeout=0), daemon=True) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not together.broken
