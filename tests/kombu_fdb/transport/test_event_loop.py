"""Celery's asynchronous worker loop: ``kombu.asynchronous.Hub`` (research/interfaces.md A6)."""

import _signal
import os
import signal
import threading
from contextlib import contextmanager
from functools import partial
from itertools import count
from math import inf

import pytest
from kit.interruption import interrupt, runs_handlers
from kombu import Queue
from kombu.asynchronous import Hub

from kombu_fdb.errors import FormatError, StoreUnavailable
from kombu_fdb.primitives.interruption import Ticket, undisturbed
from kombu_fdb.transport.consuming import loop as loop_module
from kombu_fdb.transport.consuming import receiver as receiver_module
from kombu_fdb.transport.consuming import watch_set as watch_set_module
from kombu_fdb.transport.consuming.dispatch import Dispatch
from kombu_fdb.transport.consuming.fetcher import Fetcher


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.close()


def run(hub, condition, turns=200):
    for _ in range(turns):
        if condition():
            return
        hub.run_once()
    raise AssertionError("the loop turned in vain")


def publish(connection, *bodies):
    for body in bodies:
        connection.Producer(auto_declare=False).publish(body, routing_key="q")


def test_delivers_what_was_there_and_what_comes(connection, connect, hub):
    received = []
    publish(connection, 1, 2)
    connection.register_with_event_loop(hub)  # Celery registers before there are consumers
    with connection.Consumer(
        [Queue("q")], on_message=lambda message: (received.append(message.payload), message.ack())
    ):
        run(hub, lambda: len(received) == 2)
        publish(connect(), 3)
        run(hub, lambda: len(received) == 3)
    assert received == [1, 2, 3]


def turns_of(monkeypatch):
    """The threads of the turns that follow."""
    threads = []
    turn = Fetcher.turn

    def noted(self):
        threads.append(threading.current_thread())
        return turn(self)

    monkeypatch.setattr(Fetcher, "turn", noted)
    return threads


def idle_loop(connection, hub, monkeypatch, until):
    """Threads of turns from now on: the thread has looked, and sleeps."""
    receiver = connection.transport.receiver
    if not receiver.may_be_driven:
        pytest.skip("all turns are the thread's")
    for name in ("SLOW_S", "HELD_UP_S"):
        monkeypatch.setattr(receiver_module, name, 60.0)  # however busy the machine is
    threads = turns_of(monkeypatch)
    receiver.watch_set.call_thread()
    until(lambda: threads and receiver.fetcher.idle)
    until(lambda: receiver.watch_set.bell._sleepers)
    threads.clear()
    return threads


@pytest.fixture
def thread_at_rest(monkeypatch):
    """However long the loop takes no turn."""
    monkeypatch.setattr(watch_set_module, "LONGEST_REST_S", 60.0)
    monkeypatch.setattr(watch_set_module, "BESIDE_LOOP", 1e6)


@pytest.mark.usefixtures("thread_at_rest")
def test_takes_the_turns_that_are_due(connection, hub, monkeypatch, until):
    """Messages that come, and acks that are enough for a claim; no message passes from one thread to another."""
    received = []
    connection.register_with_event_loop(hub)
    with connection.Consumer(
        [Queue("q")], on_message=lambda message: (received.append(message.payload), message.ack()), prefetch_count=2
    ):
        threads = idle_loop(connection, hub, monkeypatch, until)
        for number in range(5):
            publish(connection, number)
            run(hub, lambda number=number: len(received) == number + 1)
        publish(connection, *range(5, 20))
        run(hub, lambda: len(received) == 20)
        run(hub, lambda: not connection.transport.store.acks)
        assert set(threads) == {threading.current_thread()}
    assert received == list(range(20))


@pytest.mark.usefixtures("thread_at_rest")
def test_a_pool_gets_what_a_claim_brought_before_the_next_turn(connection, hub, monkeypatch, until):
    """The turn after a claim, which watches the emptied queue, costs the tasks no time."""
    at_write = []
    reading, writing = os.pipe()

    def write():
        hub.remove(writing)
        at_write.append(list(threads))

    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")], on_message=lambda _: hub.add_writer(writing, write), no_ack=True):
        threads = idle_loop(connection, hub, monkeypatch, until)
        publish(connection, 1)
        run(hub, lambda: at_write)
        assert at_write == [[threading.current_thread()]]
        run(hub, lambda: len(threads) == 2)
    os.close(reading)
    os.close(writing)


@pytest.mark.usefixtures("thread_at_rest")
def test_the_thread_takes_a_turn_beside_a_loop_only_if_one_is_due(connection, hub, monkeypatch, until):
    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")], on_message=print):
        threads, receiver = idle_loop(connection, hub, monkeypatch, until), connection.transport.receiver
        receiver.watch_set.rest_beside_loop()
        until(lambda: receiver.watch_set._rests)  # the thread; this one does what it does
        assert receiver.step() > 0
        assert threads == []
        for happens in (
            partial(setattr, receiver.watch_set, "due", True),
            receiver.watch_set.bell.ring,
            partial(setattr, receiver.fetcher, "_first_ack", -inf),
            partial(setattr, receiver.watch_set, "next_at", -inf),
            partial(setattr, receiver.watch_set, "loop", None),
        ):
            happens()
            receiver.step()
            assert threads == [threading.current_thread()]
            threads.clear()


def test_the_first_ack_waits_twice_as_long_where_a_claim_will_take_it_along(connection, hub, monkeypatch, until):
    received = []
    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")], on_message=received.append, prefetch_count=4):
        idle_loop(connection, hub, monkeypatch, until)
        watch_set, seconds = connection.transport.receiver.watch_set, list[float]()
        monkeypatch.setattr(hub, "call_later", lambda s, *_: seconds.append(s))
        publish(connection, *range(5))
        run(hub, lambda: len(received) == 4)
        received.pop().ack()
        assert seconds == [2 * watch_set.rest_s]


@pytest.mark.parametrize("blocked", ["in a turn", "too late", "failed", "broken"])
def test_leaves_the_turns_to_the_thread(connection, hub, monkeypatch, until, blocked):
    """While another thread takes one, or another process writes. If the store has failed, the loop raises that."""
    received = []
    connection.register_with_event_loop(hub)
    hub.propagate_errors = connection.connection_errors
    with connection.Consumer([Queue("q")], on_message=received.append, no_ack=True):
        threads = idle_loop(connection, hub, monkeypatch, until)
        receiver = connection.transport.receiver
        turns, others = receiver.watch_set.turns, Ticket()
        if blocked == "in a turn":
            taker = threading.Thread(target=lambda: turns.acquire(others, 60))
            taker.start()
            taker.join()
        else:
            failures = {"too late": StoreUnavailable("it writes"), "failed": FormatError("?"), "broken": LookupError()}
            fail_once(monkeypatch, failures[blocked])
        publish(connection, 1)
        if blocked in ("failed", "broken"):
            with pytest.raises(connection.connection_errors):
                run(hub, lambda: False)
            connection.transport.establish_connection()
        elif blocked == "in a turn":
            run(hub, lambda: not receiver.watch_set.due)
            turns.release(others)
        run(hub, lambda: len(received) == 1)
        assert receiver.fetcher.error is None
        if blocked == "too late":
            assert receiver._thread in threads
            assert receiver._spared_until > 0


@pytest.mark.parametrize(("share", "times"), [(1e9, 3), (1e-9, 2)])
def test_slow_turns_stay_the_loops_unless_they_take_much_of_its_time(connection, hub, monkeypatch, until, share, times):
    """A checkpoint now and then does not send all turns to the thread; a slow disk does."""
    received = []
    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")], on_message=received.append, no_ack=True):
        threads = idle_loop(connection, hub, monkeypatch, until)
        monkeypatch.setattr(receiver_module, "HELD_UP_S", -1.0)
        monkeypatch.setattr(receiver_module, "HELD_UP_SHARE", share)
        receiver, taken = connection.transport.receiver, 0
        while receiver._spared_until < 0 and taken < times:
            receiver.take_turn()
            taken += 1
        assert taken == times
        assert (receiver._spared_until > 0) == (share < 1)
        assert threading.current_thread() in threads


def fail_once(monkeypatch, error):
    """In a turn of this thread."""
    errors, thread = [error], threading.current_thread()
    plan = Dispatch.plan

    def failing(self, *args):
        if errors and threading.current_thread() is thread:
            raise errors.pop()
        return plan(self, *args)

    monkeypatch.setattr(Dispatch, "plan", failing)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT])
def test_a_shutdown_begins_after_the_turn(connection, hub, monkeypatch, until, number):
    """Celery's handlers work for long, and use the broker."""
    received = []
    mine = []

    def shut_down(*_):
        mine.append(connection.transport.receiver.watch_set.turns.mine)
        publish(connection, "from the handler")

    connection.register_with_event_loop(hub)
    before = signal.signal(number, shut_down)
    try:
        with connection.Consumer(
            [Queue("q")], on_message=lambda message: received.append(message.payload), no_ack=True
        ):
            idle_loop(connection, hub, monkeypatch, until)
            plan = Dispatch.plan

            def struck(self, *args):
                monkeypatch.setattr(Dispatch, "plan", plan)
                signal.raise_signal(number)
                return plan(self, *args)

            monkeypatch.setattr(Dispatch, "plan", struck)
            publish(connection, "sent")
            run(hub, lambda: len(received) == 2)
        assert signal.getsignal(number) is shut_down
    finally:
        signal.signal(number, before)
    assert received == ["sent", "from the handler"]
    assert mine == [False]


def test_a_handler_that_sets_another_one_and_raises():
    """As Celery's does for the next signal. What it raises comes out of the call; the handlers stay as it set them."""

    class Ended(BaseException):
        pass

    def first(*_):
        signal.signal(signal.SIGQUIT, second)
        raise Ended

    def second(*_):
        called.append(2)

    def work():
        signal.raise_signal(signal.SIGQUIT)
        signal.raise_signal(signal.SIGQUIT)
        called.append(1)

    called = []
    before = signal.signal(signal.SIGQUIT, first)
    try:
        with pytest.raises(Ended):
            undisturbed(work)
        assert called == [1, 2]
        assert signal.getsignal(signal.SIGQUIT) is second
    finally:
        signal.signal(signal.SIGQUIT, before)


def test_a_child_that_another_thread_forks_meanwhile_keeps_its_handlers(monkeypatch):
    """Otherwise it would be deaf to SIGTERM for good: there, no turn ends."""
    called = []

    def work():
        monkeypatch.setattr(os, "getpid", lambda: -1)
        signal.raise_signal(signal.SIGTERM)
        called.append("work")

    before = signal.signal(signal.SIGTERM, lambda *_: called.append("handler"))
    try:
        undisturbed(work)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert called == ["handler", "work"]


def test_a_handler_that_comes_while_it_is_noted(monkeypatch):
    """What it sets stays set: Celery's first Ctrl-C prepares the second."""

    def first(*_):
        signal.signal(signal.SIGINT, second)

    def second(*_):
        raise AssertionError

    def getsignal(number):
        handler = real(number)
        if handler is first:
            signal.raise_signal(number)
        return handler

    real = _signal.getsignal
    monkeypatch.setattr(_signal, "getsignal", getsignal)
    before = signal.signal(signal.SIGINT, first)
    try:
        undisturbed(lambda: None)
        assert real(signal.SIGINT) is second
    finally:
        signal.signal(signal.SIGINT, before)


def test_after_a_reset_the_thread_takes_the_turns(connection, hub, until):
    connection.transport_options["poll_interval"] = 0.1
    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")], on_message=print):
        run(hub, lambda: connection.transport.receiver.fetcher.idle)
        hub.reset()
        publish(connection, 1)
        until(lambda: connection.transport.store.engine.inspect.counts("q").leased == 1)


def test_a_timer_that_an_earlier_one_has_replaced_takes_no_turn(connection, hub, monkeypatch):
    """Each turn could have set another one, so there would have been more and more."""
    timers = []
    turns = []
    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")]):
        monkeypatch.setattr(hub, "call_later", lambda _, timer, moment: timers.append(partial(timer, moment)))
        monkeypatch.setattr(Fetcher, "waits", True)
        monkeypatch.setattr(connection.transport.receiver.watch_set, "ask", lambda: turns.append(1))
        for seconds in (60, 30, 45):
            connection.transport._loop.take_turn_in(seconds)
        assert len(timers) == 2
        for each in reversed(timers):
            each()
    assert len(turns) == 1


FILES = frozenset(str(each.__file__) for each in (loop_module, receiver_module, watch_set_module))


def test_a_timer_that_the_loop_has_cleared_is_set_again(connection, hub):
    """Celery clears all timers, also those of others, when it has lost a connection."""
    connection.Consumer([Queue("q")], callbacks=[print]).consume()
    connection.register_with_event_loop(hub)
    loop = connection.transport._loop
    loop.take_turn_in(0.0)
    hub.timer.clear()
    loop.take_turn_in(0.001)
    assert len(hub.timer) == 1


def test_the_loop_goes_on_by_itself_after_an_exception_at_any_line_of_a_turn(connection, hub, monkeypatch, until):
    """Also while the thread sleeps, and nothing else asks for a turn before the safety look."""
    with beside_a_loop(connection, hub, monkeypatch, until) as received:
        receiver = connection.transport.receiver
        for moment in count(1):
            until(lambda: receiver.watch_set.bell._sleepers)
            publish(connection, moment)
            receive = partial(
                run, hub, lambda moment=moment: len(received) == moment and not receiver.watch_set.due, 20
            )
            if not interrupt(receive, moment, FILES, strikes=runs_handlers):
                break
            receive()
        assert moment > 30


def test_a_callback_that_works_for_long_keeps_no_ack_waiting(connection, hub, until):
    """And what was claimed for a callback to come goes back."""
    left = []

    def work(message):
        if not left:
            message.ack()
            counts = connection.transport.store.engine.inspect.counts
            until(lambda: (counts("q").leased, counts("q").ready) == (0, 2))
            left.append(2)

    connection.transport_options["undrained_timeout"] = 0.5
    publish(connection, 1, 2, 3)
    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")], on_message=work):
        run(hub, lambda: left)


def test_a_callback_that_makes_room_again_and_again_does_not_keep_the_thread_from_its_turn(
    connection, hub, monkeypatch, until
):
    """As one that works on a batch, and settles each message when it is done with it."""
    left = []

    def work(message):
        threads.clear()
        until(lambda: connection.transport.on_room() or threads)
        left.append(True)

    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")], on_message=work):
        threads = idle_loop(connection, hub, monkeypatch, until)
        publish(connection, 1)
        run(hub, lambda: left)


def test_credit_returns_by_an_ack_in_another_thread(connection, hub):
    publish(connection, *range(10))
    received = []

    def on_message(message):
        received.append(message.payload)
        threading.Timer(0.01, message.ack).start()

    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")], on_message=on_message, prefetch_count=2):
        run(hub, lambda: len(received) == 10)
    assert received == list(range(10))


def test_survives_a_reset(connection, hub):
    received = []
    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")], on_message=received.append):
        hub.reset()
        publish(connection, 1)
        connection.register_with_event_loop(hub)
        run(hub, lambda: len(received) == 1)


def test_close_leaves_nothing_in_the_loop(connect, hub):
    connection = connect()
    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")]):
        assert hub.readers
    connection.close()
    assert not hub.readers
    assert not hub.on_tick


def test_close_leaves_a_reused_descriptor_alone(connect, hub):
    connection = connect()
    connection.register_with_event_loop(hub)
    descriptor = connection.transport.receiver.fetcher.arrived.fileno()
    hub.reset()
    hub.readers[descriptor] = (print, ())
    connection.close()
    assert descriptor in hub.readers
    hub.readers.clear()


@contextmanager
def beside_a_loop(connection, hub, monkeypatch, until):
    """What is received by a consumer that only a wake-up tells of a message."""
    received = []
    connection.transport_options["poll_interval"] = 300.0
    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")], on_message=received.append, no_ack=True):
        idle_loop(connection, hub, monkeypatch, until)
        yield received


@pytest.mark.parametrize("timeout", [0, 60])
def test_a_drain_beside_a_loop_that_does_not_turn(connection, hub, monkeypatch, until, timeout):
    """Celery registers before mingle drains. What is rung for the loop wakes the drain, which must not lose it."""
    with beside_a_loop(connection, hub, monkeypatch, until) as received:
        receiver = connection.transport.receiver
        if timeout:
            receiver._spared_until = inf  # the thread takes all turns
        publish(connection, 1)
        until(lambda: receiver.watch_set.due)
        connection.drain_events(timeout=timeout)
    assert len(received) == 1


def test_a_drain_leaves_the_loop_its_wake_up(connection, hub, monkeypatch, until):
    with beside_a_loop(connection, hub, monkeypatch, until) as received:
        receiver = connection.transport.receiver
        monkeypatch.setattr(connection.transport, "_first_look", lambda _: False)  # the time is over
        publish(connection, 1)
        until(lambda: receiver.watch_set.due)
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0)
        run(hub, lambda: received, turns=10)


def test_a_dead_connection_is_silent(connect, hub):
    connection = connect()
    connection.register_with_event_loop(hub)
    loop = connection.transport._loop
    connection.collect()
    loop.on_arrived()
    loop._on_timer(inf)
    assert not hub.readers


def test_what_takes_long_has_a_turn_of_the_loop_for_itself(connection, hub, monkeypatch):
    """With the solo pool a delivery is the task: between two of them the loop notes early acks, and a SIGTERM."""
    monkeypatch.setattr(loop_module, "DELIVERING_S", 0.0)
    turns, in_turn = [0], []

    def work(message):
        in_turn.append(turns[0])
        message.ack()

    publish(connection, *range(4))
    connection.register_with_event_loop(hub)
    with connection.Consumer([Queue("q")], on_message=work):
        while len(in_turn) < 4:
            hub.run_once()
            turns[0] += 1
    assert len(set(in_turn)) == 4
