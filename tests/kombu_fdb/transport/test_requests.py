"""What is raised of a task later, outside of its consumer's callback (transport/worker.py)."""

import logging
import threading
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.backends.base import DisabledBackend
from celery.concurrency.solo import TaskPool as SoloPool
from celery.concurrency.thread import TaskPool
from celery.exceptions import TaskRevokedError, WorkerLostError, WorkerShutdown
from celery.worker import state
from kit.processes import until
from kombu import Connection, Consumer, Message, Producer, Queue
from kombu.asynchronous.timer import Entry

from kombu_fdb import Broker
from kombu_fdb.errors import LimitExceeded, StoreFull, StoreUnavailable
from kombu_fdb.process import combiner_client
from kombu_fdb.transport.consuming import fetcher
from kombu_fdb.transport.worker import free_cancelled_timers, guard_pool, keep_started_tasks, receive

UNSTORABLE = LimitExceeded("the key is too large")


@pytest.fixture
def request_of(connection, channel):
    """A request of a message that is held, whose methods raise what they are told to. Nothing consumes its queue."""

    def make(error, *, no_ack=False, backend=None):
        class Request:
            id, time_limits, acknowledged, ignore_result = "x" * 20_000, (None, None), False, False
            task = SimpleNamespace(backend=backend, acks_on_failure_or_timeout=True)

            def __init__(self, message):
                self.message = message

            def execute_using_pool(self, *_given):
                raise error

            def acknowledge(self):
                self.message.ack()

            def reject(self, requeue):
                self.message.reject(requeue=requeue)

            on_success = on_failure = on_accepted = execute_using_pool

            def on_timeout(self, *_given):
                raise error

        found = []
        Producer(channel).publish(5, routing_key="q")
        with Consumer(channel, [Queue("q")], on_message=found.append, no_ack=no_ack):
            while not found:
                connection.drain_events(timeout=60)
        request = Request(found[0])
        receive(request)
        receive(request)
        return request

    return make


def places(channel):
    counts = channel.engine.inspect.counts("q")
    return counts.leased, counts.delayed


def test_what_can_not_be_executed_goes_back_and_frees_its_place(channel, request_of):
    """Celery frees the place in its pool for a task that was revoked, and for no other."""
    request = request_of(UNSTORABLE)
    with pytest.raises(TaskRevokedError):
        request.execute_using_pool(None)
    assert places(channel) == (0, 1)
    (resting,) = channel.engine.inspect.delayed("q", 10)
    assert resting.redeliveries == 1, "the attempt counts"
    assert request.acknowledged


def test_a_message_without_acks_ends_no_worker(channel, request_of):
    request = request_of(UNSTORABLE, no_ack=True)
    with pytest.raises(TaskRevokedError):
        request.execute_using_pool(None)


@pytest.mark.parametrize("name", ["on_success", "on_failure", "on_timeout"])
def test_a_message_whose_outcome_can_not_be_noted_goes_back(channel, request_of, name):
    getattr(request_of(UNSTORABLE), name)(None)
    assert places(channel) == (0, 1)


@pytest.mark.parametrize("name", ["on_success", "on_failure", "on_timeout"])
@pytest.mark.parametrize(
    ("error", "backend", "over"),
    [
        (ZeroDivisionError("a hook's"), SimpleNamespace(get_task_meta=lambda *_, **__: {"status": "FAILURE"}), True),
        (ZeroDivisionError("a hook's"), SimpleNamespace(get_task_meta=lambda *_, **__: {"status": "STARTED"}), False),
        (ZeroDivisionError("a hook's"), DisabledBackend(app=Celery(set_as_current=False)), True),
        (MemoryError("Process got: too large"), None, True),
    ],
)
def test_a_task_that_is_over_is_not_run_again(channel, request_of, name, error, backend, over):
    request = request_of(error, backend=backend)
    getattr(request, name)(None)
    assert (request.message._state == "ACK", places(channel)[1]) == ((True, 0) if over else (False, 1))


def test_a_failure_that_is_not_acknowledged_is_rejected(channel, request_of):
    request = request_of(MemoryError("Process got: too large"))
    request.task.acks_on_failure_or_timeout = False
    request.on_failure(None)
    assert (places(channel), channel.engine.inspect.counts("q.dead").ready) == ((0, 0), 1)


@pytest.mark.parametrize(
    ("name", "option", "left"), [("on_failure", "acks_on_failure", 0), ("on_timeout", "acks_on_timeout", 1)]
)
def test_each_way_to_fail_has_an_option_of_its_own(channel, request_of, name, option, left):
    """Since Celery 5.7, where a task that ran out of time is requeued if it is not acknowledged."""
    request = request_of(MemoryError("Process got: too large"))
    setattr(request.task, option, False)
    getattr(request, name)(None)
    counts = channel.engine.inspect.counts
    there, dead = counts("q"), counts("q.dead")
    assert (there.ready, there.leased, dead.ready) == (left, 0, 1 - left)


@pytest.mark.parametrize("name", ["on_success", "on_failure", "on_timeout"])
def test_what_is_settled_raises_as_ever(channel, request_of, name):
    request = request_of(UNSTORABLE)
    request.message.ack()
    with pytest.raises(LimitExceeded):
        getattr(request, name)(None)


@pytest.mark.parametrize("name", ["execute_using_pool", "on_success", "on_failure", "on_timeout"])
def test_errors_of_the_connection_are_celerys(channel, request_of, name):
    with pytest.raises(StoreUnavailable):
        getattr(request_of(StoreUnavailable()), name)(None)
    assert places(channel) == (1, 0)


@pytest.mark.parametrize("begun", [True, False])
def test_a_task_that_was_begun_counts_when_it_comes_back(channel, request_of, begun):
    """At a cold shutdown; one that only waited in the worker comes back as redelivered as well, but uncounted."""
    request = request_of(UNSTORABLE)
    if begun:
        with pytest.raises(LimitExceeded):
            request.on_accepted(1, 2)
    channel.qos.restore_unacked_once()
    message = channel.basic_get("q")
    assert message.delivery_info["redelivered"]
    assert message.headers.get("x-delivery-count") == (1 if begun else None)
    message.ack()


def test_another_brokers_message_is_left_alone(channel, request_of):
    request = request_of(UNSTORABLE)
    request.message = SimpleNamespace(channel=SimpleNamespace(qos=object()))
    with pytest.raises(LimitExceeded):
        request.execute_using_pool(None)


@pytest.mark.parametrize(("error", "failures"), [(UNSTORABLE, 1), (StoreUnavailable(), 0)])
def test_a_thread_is_heard(channel, request_of, error, failures):
    """What the tracer raises in a pool of threads: it could store neither the result nor the failure."""
    told = []
    request = request_of(UNSTORABLE)
    type(request).on_failure = lambda self, info: told.append((self, info.exception.exc))
    pool = TaskPool(1)
    guard_pool(pool)

    def trace():
        raise error

    result = pool.apply_async(trace, callback=request.on_success, error_callback=request.on_failure)
    with pytest.raises(type(error)):
        result.get(60)
    pool.on_stop()
    assert told == [(request, error)] * failures
    assert places(channel) == ((1, 0) if failures else (0, 1))


@pytest.mark.parametrize(("error", "lost"), [(SystemExit("bye"), 1), (WorkerShutdown(0), 0)])
def test_a_task_that_exits_has_lost_its_worker(channel, request_of, error, lost):
    """As with prefork. Celery takes it for a success, so the message was acknowledged, and left no dead letter."""
    told = []
    request = request_of(UNSTORABLE)
    type(request).on_failure = lambda _, info: told.append(info.exception.exc)
    pool = SoloPool(1)
    guard_pool(pool)

    def trace():
        raise error

    with pytest.raises(WorkerLostError if lost else WorkerShutdown):
        pool.apply_async(trace, callback=request.on_success, error_callback=request.on_failure)
    assert [repr(each) for each in told] == [repr(WorkerLostError("builtins.SystemExit: bye"))] * lost


def test_what_celery_settles_is_not_given_back(channel, request_of, caplog):
    """Celery defers a rejection to its loop; released before, the message ran again. With early acks it is gone."""
    request = request_of(UNSTORABLE)
    request.acknowledged = True
    state.reserved_requests.add(request)
    with pytest.raises(TaskRevokedError):
        request.execute_using_pool(None)
    assert places(channel) == (1, 0)
    assert request not in state.reserved_requests, "it would count as one of the worker's for as long as that lives"
    assert "was settled, and raised afterwards: kombu_fdb.errors.LimitExceeded" in caplog.text


def test_children_of_prefork_are_heard_in_any_case():
    pool = SimpleNamespace(_pool=SimpleNamespace(_result_handler=None), on_apply=print)
    guard_pool(pool)
    assert pool.on_apply is print
    guard_pool(None)


@pytest.mark.parametrize("requeue", [False, True])
def test_what_could_not_be_rejected_is_rejected_later_and_not_run_again(channel, request_of, monkeypatch, requeue):
    """Celery logs it, and never tries again. The task was run again by the same worker, when the cluster had been
    locked for six seconds.
    """
    message = request_of(UNSTORABLE).message
    tried = threading.Event()

    def away(*_, **__):
        if threading.current_thread() is not threading.main_thread():
            tried.set()
        raise StoreUnavailable("the test switched it off")

    channel.qos.explain(message.delivery_tag, {"error": "why"}, reason="a reason")
    with monkeypatch.context() as patch:
        patch.setattr(channel.client, "requeue" if requeue else "reject", away)
        message.reject_log_error(logging.getLogger(), (StoreUnavailable,), requeue=requeue)
        assert tried.wait(60)
        assert not channel.qos.holds(message.delivery_tag)
        assert channel.engine.inspect.counts("q").ready == 0, "it stays leased"
    if requeue:
        until(lambda: channel.engine.inspect.counts("q").ready)
        assert channel.basic_get("q").headers["x-delivery-count"] == 1, "the attempt counts"
    else:
        (letter,) = until(lambda: channel.engine.inspect.peek("q.dead", 2))
        assert (letter.deaths[0].reason, letter.deaths[0].details) == ("a reason", {"error": "why"})
        assert channel.engine.inspect.counts("q").ready == 0


def test_what_can_t_be_rejected_at_all_comes_back(channel, request_of, monkeypatch):
    """As a message that is too large for a transaction, if there were one."""
    message = request_of(UNSTORABLE).message
    errors = [StoreUnavailable("the test switched it off"), LimitExceeded("the test says so")]

    def fail(*_, **__):
        raise errors.pop(0)

    monkeypatch.setattr(channel.client, "reject", fail)
    message.reject_log_error(logging.getLogger(), (StoreUnavailable,))
    until(lambda: channel.engine.inspect.counts("q").ready)
    assert channel.basic_get("q").headers["x-delivery-count"] == 1, "the attempt counts"


class Full(StoreFull):
    """A disk that has no room for what a dead letter adds, and takes whatever adds nothing."""

    fills = True


def refuse(*_, **__):
    raise Full


def test_a_disk_without_room_for_dead_letters_bounds_how_many_wait(connection, channel, monkeypatch):
    """BOUNDED: the worker took each message of the queue, and tried all rejections anew in each second."""
    for number in range(12):
        Producer(channel).publish(number, routing_key="q")
    got = []

    def fail(message):
        got.append(message.payload)
        message.reject_log_error(logging.getLogger(), (StoreUnavailable,))

    channel.basic_qos(0, 2, False)
    with Consumer(channel, [Queue("q")], on_message=fail):
        with monkeypatch.context() as patch:
            patch.setattr(fetcher, "MOST_DEFERRED", 3)
            patch.setattr(channel.client, "reject", refuse)
            with pytest.raises(TimeoutError):
                while True:
                    connection.drain_events(timeout=2)
            assert 3 <= len(got) < 3 + 2 + 2, "what was claimed before is handed out"
        while len(got) < 12:
            connection.drain_events(timeout=60)
    assert got == [*range(12)]
    until(lambda: channel.engine.inspect.counts("q.dead").ready == 12)


def test_a_worker_whose_rejections_wait_leaves_the_messages_to_others(connection, channel, url, monkeypatch):
    """On a cluster, it stood in the wait queue: granted messages by the others, and first, it served none."""
    monkeypatch.setattr(combiner_client, "LONELY", 1000)  # both stay in the wait queue
    monkeypatch.setattr(fetcher, "MOST_DEFERRED", 1)
    got = []
    channel.client.deferred_calls.add(refuse)
    channel.basic_qos(0, 2, False)
    options = {"operation_timeout": 7.0}  # so it has a client of its own
    with Connection(url, transport_options=options) as another, Consumer(channel, [Queue("q")], on_message=got.append):
        with Consumer(another, [Queue("q")], on_message=Message.ack):
            for number in range(20):
                Producer(channel).publish(number, routing_key="q")
                with suppress(TimeoutError):
                    connection.drain_events(timeout=0.01)
                another.drain_events(timeout=60)
                assert not connection.transport.receiver.fetcher._claiming.combiner.in_wait_queue
        assert not got


def test_a_disk_without_room_for_dead_letters_keeps_no_consumer_busy(connection, channel, url, monkeypatch, caplog):
    """A message that makes no sense was released, claimed and released again, with a line in the log each time."""
    with Broker.open(url) as broker, Consumer(channel, [Queue("q")], on_message=print):
        with monkeypatch.context() as patch:
            patch.setattr(channel.client, "reject", refuse)
            broker.queue("q").put(b"no task")
            with pytest.raises(TimeoutError):
                connection.drain_events(timeout=1)
            assert channel.engine.inspect.counts("q").leased == 1
            assert caplog.text.count("not a message of this transport") == 1
        (letter,) = until(lambda: channel.engine.inspect.peek("q.dead", 2))
    assert letter.deaths[0].reason == "malformed"


@pytest.mark.parametrize("is_green", [False, True])
def test_what_celery_cancels_with_a_connection_refers_to_nothing(monkeypatch, is_green):
    """Eventlet's timer has a greenlet for each entry, which is not to be killed: it would keep its killer's frames."""
    entry = Entry(print, ("request",))
    request = SimpleNamespace(_eta_timer_entry=SimpleNamespace(entry=entry) if is_green else entry)
    monkeypatch.setattr("celery.worker.state.scheduled_requests", [request], raising=False)
    cancelled = []
    consumer = SimpleNamespace(on_close=lambda: cancelled.append(request._eta_timer_entry))
    free_cancelled_timers(consumer)
    consumer.on_close()
    assert (entry(), entry.args, cancelled) == (None, (), [None])


def test_a_task_whose_time_has_come_goes_with_its_connection(monkeypatch):
    """Its entry and it refer to each other: its message stayed with the worker until garbage was collected."""
    message = Entry(print)
    request = SimpleNamespace(id="due", message=message)
    request._eta_timer_entry = Entry(print, (request,))
    reserved, gone = [request, SimpleNamespace(id="now", _eta_timer_entry=None)], weakref.ref(message)
    del message, request
    monkeypatch.setattr(state, "scheduled_requests", [], raising=False)
    monkeypatch.setattr(state, "reserved_requests", reserved)
    consumer = SimpleNamespace(on_close=reserved.clear)
    free_cancelled_timers(consumer)
    consumer.on_close()
    assert gone() is None


def test_what_waits_for_the_pool_goes_with_its_connection(monkeypatch):
    """Celery before 5.7 refers to it until the worker ends. Its requests know nothing of a timer: all entries go."""
    waiting, active = SimpleNamespace(id="waiting"), SimpleNamespace(id="active")
    monkeypatch.delattr(state, "scheduled_requests", raising=False)
    monkeypatch.setattr(state, "reserved_requests", [waiting, active])
    monkeypatch.setattr(state, "active_requests", [active])
    monkeypatch.setattr(state, "requests", {each.id: each for each in (waiting, active)})
    consumer = SimpleNamespace(on_close=int, timer={"an entry"})
    free_cancelled_timers(consumer)
    consumer.on_close()
    assert ([*state.requests], consumer.timer) == (["active"], set())


def test_the_error_of_a_lost_connection_keeps_no_message():
    """Eventlet keeps the error, as the context of what its greenlets are killed with."""
    consumer, messages, kept = SimpleNamespace(on_close=int, timer=set()), weakref.WeakSet(), []
    free_cancelled_timers(consumer)

    def decode():
        messages.add(message := Entry(print))
        raise ValueError(f"the test made no sense of {message}")

    def deliver():
        messages.add(message := Entry(print))
        try:
            decode()
        except ValueError:  # and what rejects the message fails
            raise StoreUnavailable(f"the test switched it off: {message}")  # noqa: B904

    try:
        deliver()
    except StoreUnavailable as error:
        kept.append(error)
        consumer.on_close()
    assert not messages


def test_what_no_child_has_begun_is_forgotten(monkeypatch):
    """Also what a child that has ended had not begun. In a cold shutdown the pool has ended before its consumer."""
    monkeypatch.setattr("celery.worker.state.should_terminate", None)
    jobs = {}
    for number in range(4):
        jobs[number] = SimpleNamespace(discard=partial(jobs.pop, number))
    unwritten = deque([jobs[0]])
    processes = SimpleNamespace(
        outbound_buffer=unwritten,
        maintain_pool=lambda: unwritten.appendleft(jobs[1]),
        _join_exited_workers=lambda: unwritten.appendleft(jobs[2]),
        _stop_task_handler=None,
        _cache=jobs,
        _active_writers=set(),
    )
    pool = SimpleNamespace(_pool=processes)
    keep_started_tasks(pool)
    pool._pool = None
    pool.flush()
    assert (list(jobs), len(unwritten)) == ([3], 0)
