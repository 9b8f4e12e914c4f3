"""What an abandoned connection held goes back: one that was collected without being closed, or is no longer drained.

RabbitMQ returns the messages of a connection when its socket is gone, so also when its object was collected.
"""

import contextlib
import gc
import os
import threading
import weakref
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
from kit.interruption import interrupt, runs_handlers
from kit.queues import drain_all, fill
from kombu import Connection, Queue
from kombu.asynchronous import Hub
from kombu.mixins import ConsumerMixin

from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.process import session_threads
from kombu_fdb.transport import channel as channel_module
from kombu_fdb.transport import connection as connection_module
from kombu_fdb.transport import unacked
from kombu_fdb.transport.consuming import dispatch as dispatch_module
from kombu_fdb.transport.consuming import fetcher, receiver

DEADLINE_S = 60.0
#: Seconds after which a connection counts as not drained, where a test waits for that.
SOON_S = 0.2


@pytest.fixture
def url(any_store):
    return any_store


@pytest.fixture(autouse=True)
def frozen_heap():
    """Whole collections of what a long test run has left take seconds, in which no other thread runs.

    The receiver's thread then wakes late, and is in the middle of a turn, which holds the connection, at each of them.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def watcher(connect):
    """Another process, in all but the pid: a session of its own."""
    connection = connect(ack_delay_ms=2.5)
    connection.connect()
    return connection


@pytest.fixture
def engine(watcher):
    return watcher.default_channel.engine


@pytest.fixture
def abandoned(url):
    """A connection that no fixture closes."""
    return lambda **options: Connection(url, transport_options={"session_ttl": 60.0, "sweep_interval": 0.5, **options})


def open_files():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def collect():
    """A cycle may hang on another one's finalizer."""
    for _ in range(3):
        gc.collect()


def placed(engine, queue="q"):
    counts = engine.inspect.counts(queue)
    return counts.ready, counts.leased


def everything(connection, queue="q"):
    """Payload of each message that is ready, and whether it counts as redelivered."""
    found = []
    while (message := connection.default_channel.basic_get(queue)) is not None:
        found.append((message.payload, message.delivery_info["redelivered"]))
        message.ack()
    return found


def away(verb, times):
    """The verb of a store that does not answer its first calls."""
    return Mock(wraps=verb, side_effect=chain([StoreUnavailable] * times, repeat(DEFAULT)))


def let_the_receiver_turn(connection):
    """It carries out cancels between two claims, and the thread that cancels waits for it."""
    connection.default_channel.queue_declare("other")
    connection.default_channel.basic_cancel(connection.default_channel.basic_consume("other", False, print))


class TestAnAttempt:
    """A callback that raises: its message comes back as redelivered, and at last as a dead letter."""

    @pytest.mark.parametrize("way", ["closed", "collected", "exit"])
    @pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
    def test_that_fails_counts(self, abandoned, watcher, engine, way, error, until):
        fill(watcher, 3)

        def consume():
            """Two are held, of which the second one has failed; the third one has not been handed out."""
            connection, seen = abandoned(), list[Any]()

            def work(message):
                seen.append(message)
                if len(seen) == 2:
                    raise error

            consumer = connection.Consumer([Queue("q")], on_message=work, prefetch_count=3)
            consumer.consume()
            with pytest.raises(error):
                while True:
                    connection.drain_events(timeout=60)
            if way == "closed":
                connection.close()
            elif way == "exit":
                connection.transport.store.close()

        consume()
        until(lambda: collect() is None and placed(engine) == (3, 0))  # the receiver's thread may be in a turn
        deliveries = [watcher.default_channel.basic_get("q") for _ in range(3)]
        assert [message.delivery_info["redelivered"] for message in deliveries] == [True, True, False]
        assert [message.headers.get("x-delivery-count") for message in deliveries] == [None, 1, None]

    def test_that_always_fails_ends(self, connect, watcher, engine):
        queue = Queue("q", queue_arguments={"x-delivery-limit": 2})
        queue(watcher.default_channel).declare()
        fill(watcher, 1)
        for _ in range(3):
            assert engine.inspect.counts("q").ready == 1
            connection = connect()
            with pytest.raises(ZeroDivisionError), connection, connection.Consumer([queue], on_message=lambda _: 1 / 0):
                connection.drain_events(timeout=60)
        assert (engine.inspect.counts("q").ready, engine.inspect.counts("q.dead").ready) == (0, 1)


class TestBeforeTheFirstDrain:
    def test_nothing_is_claimed(self, connection, watcher, engine):
        fill(watcher, 10)
        with connection.Consumer([Queue("q")], on_message=print):
            let_the_receiver_turn(connection)
            let_the_receiver_turn(connection)
            assert placed(engine) == (10, 0)
            assert [payload for payload, _ in everything(watcher)] == list(range(10))

    def test_the_first_drain_finds_all(self, connection, watcher):
        fill(watcher, 10)
        received = []
        with connection.Consumer([Queue("q")], on_message=received.append):
            let_the_receiver_turn(connection)
            drain_all(connection)
        assert [message.payload for message in received] == list(range(10))

    def test_an_event_loop_counts(self, connection, engine, until):
        fill(connection, 10)
        hub = Hub()
        connection.register_with_event_loop(hub)
        with connection.Consumer([Queue("q")], on_message=print, prefetch_count=10):
            until(lambda: placed(engine) == (0, 10))
            connection.transport._leave_loop()
        hub.close()

    def test_a_single_active_consumer_is_active_from_its_first_drain(self, connection, watcher):
        queue = Queue("q", queue_arguments={"x-single-active-consumer": True})
        received = []
        with connection.Consumer([queue], on_message=print):
            let_the_receiver_turn(connection)
            fill(watcher, 3)
            with watcher.Consumer([queue], on_message=received.append):
                watcher.drain_events(timeout=DEADLINE_S)
        assert received[0].payload == 0


class TestCollected:
    def test_its_messages_go_back_in_order_and_uncounted(self, abandoned, watcher, engine, until):
        fill(watcher, 10)

        def forget():
            connection, held = abandoned(), []
            connection.Consumer([Queue("q")], on_message=held.append, prefetch_count=10).consume()
            connection.drain_events(timeout=DEADLINE_S)
            until(lambda: placed(engine) == (0, 10))

        forget()
        until(lambda: collect() is None and placed(engine) == (10, 0))
        assert everything(watcher) == [(0, True), *((number, False) for number in range(1, 10))]

    @pytest.mark.parametrize("drained", [False, True], ids=["not drained", "drained"])
    def test_nothing_refers_to_it(self, abandoned, watcher, until, drained):
        fill(watcher, 10)

        def forget():
            connection = abandoned()
            # With a time to run, and as a queue with one active consumer: these have timers and tags of their own.
            arguments = {"x-consumer-timeout": 3_600_000, "x-single-active-consumer": True}
            queues = [Queue("q", queue_arguments=arguments), Queue("empty")]
            consumer = connection.Consumer(queues, on_message=print)
            consumer.consume()
            if drained:
                drain_all(connection)
                drain_all(connection)
                connection.default_channel.basic_get("q")
            transport = connection.transport
            return [weakref.ref(each) for each in (connection, transport, connection.default_channel, consumer)]

        references = forget()
        collect()
        until(lambda: collect() is None and [each() for each in references] == [None] * 4)

    def test_its_messages_in_the_programs_hands_keep_it(self, abandoned, watcher, engine, until):
        fill(watcher, 1)

        def forget():
            return abandoned().default_channel.basic_get("q")

        message = forget()
        collect()
        message.ack()
        assert placed(engine) == (0, 0)

    def test_its_consumers_end(self, abandoned, watcher, engine, until):
        single = Queue("single", queue_arguments={"x-single-active-consumer": True})
        fill(watcher, 3, "single")

        def forget():
            connection = abandoned()
            queues = [Queue("passing", auto_delete=True), Queue("own", exclusive=True), single]
            connection.Consumer(queues, on_message=lambda _: None).consume()
            drain_all(connection)

        forget()
        assert engine.inspect.queue("passing")
        assert placed(engine, "single") == (0, 3)
        until(
            lambda: (
                collect() is None and engine.inspect.queue("passing") is None and engine.inspect.queue("own") is None
            )
        )
        received = []
        with watcher.Consumer([single], on_message=received.append):
            until(lambda: watcher.drain_events(timeout=DEADLINE_S) or len(received) == 3)
        assert [message.payload for message in received] == [0, 1, 2]

    def test_its_consumer_whose_end_was_interrupted_ends(self, abandoned, engine, until, monkeypatch):
        """And no turn of the receiver has ended it yet."""
        keeper = abandoned()
        keeper.default_channel.client.session()  # the same one, which goes on
        monkeypatch.setattr(fetcher.Fetcher, "carry_out_cancels", lambda _: None)

        def forget():
            connection = abandoned()
            connection.Consumer([Queue("q")], on_message=print).consume()
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(connection.default_channel, "_end", Mock(side_effect=KeyboardInterrupt))
                connection.default_channel.close()

        forget()
        until(lambda: collect() is None and engine.inspect.consumer_count("q") == 0)

    def test_fifty_leave_nothing_behind(self, abandoned, watcher, engine, until, monkeypatch):
        fill(watcher, 200)
        with watcher.Consumer([Queue("warm")]):  # what the first consumer of a store opens, and keeps
            drain_all(watcher)
        keeper = abandoned()
        with keeper.Consumer([Queue("warm")]):
            drain_all(keeper)
        collect()
        threads, files = set(threading.enumerate()), open_files()

        def forget():
            connection = abandoned()
            connection.Consumer([Queue("q")], on_message=lambda _: None, prefetch_count=4).consume()
            connection.drain_events(timeout=DEADLINE_S)

        gc.disable()
        try:
            for _ in range(50):
                forget()
        finally:
            gc.enable()
        until(lambda: collect() is None and placed(engine) == (200, 0))
        until(lambda: collect() is None and not set(threading.enumerate()) - threads)
        until(lambda: open_files() <= files + 10)  # SQLite's store keeps a few connections
        client = keeper.default_channel.client
        until(lambda: len(client.session().consumed) == 1)
        assert client.session().known == set()
        assert len(client._users) == 1
        keeper.close()
        until(lambda: client._session is None)

    @pytest.mark.parametrize("store", ["answers", "is away for a while"])
    def test_one_that_only_published_closes_the_store(self, abandoned, engine, until, monkeypatch, store):
        def forget():
            connection = abandoned()
            connection.default_channel.queue_declare("own", exclusive=True)
            fill(connection, 1)
            return connection.transport.store

        client = forget()
        if store != "answers":
            monkeypatch.setattr(session_threads, "RETRY_S", 0.01)
            monkeypatch.setattr(client.engine.queues, "remove_consumer", away(client.engine.queues.remove_consumer, 2))
        until(lambda: collect() is None and client.engine_if_open is None)
        assert engine.inspect.queue("own") is None
        assert placed(engine) == (1, 0)
        until(lambda: not any(thread.name == "kombu-fdb-deferred" for thread in threading.enumerate()))

    def test_in_a_forked_child_nothing_happens(self, request, url, abandoned, watcher, engine, until):
        if url.startswith("fdb+memory"):
            pytest.skip("a store in memory belongs to one process")
        fill(watcher, 3)
        kept = [abandoned()]
        kept[0].Consumer([Queue("q")], on_message=lambda _: None).consume()
        drain_all(kept[0])
        pid = os.fork()
        if pid == 0:
            kept.clear()
            collect()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        let_the_receiver_turn(kept[0])
        assert placed(engine) == (0, 3)
        kept[0].close()


class TestUndrained:
    def test_what_waits_goes_back_and_no_more_is_claimed(self, connect, watcher, engine, until):
        connection, held = connect(undrained_timeout=SOON_S), []
        fill(watcher, 10)
        with connection.Consumer([Queue("q")], on_message=held.append):
            connection.drain_events(timeout=DEADLINE_S)
            until(lambda: placed(engine) == (9, 1))
            until(lambda: not connection.transport.receiver.fetcher.attended)
            fill(watcher, 1, first=10)
            until(lambda: placed(engine) == (10, 1))  # the thread may have claimed a moment after the drain
            let_the_receiver_turn(connection)
            assert everything(watcher) == [(number, False) for number in range(1, 11)]
            assert placed(engine) == (0, 1), "what was handed out stays"
            held.pop().ack()
            until(lambda: placed(engine) == (0, 0))

    def test_goes_on_with_the_next_drain(self, connect, watcher, engine, until):
        connection, held = connect(undrained_timeout=SOON_S), []
        fill(watcher, 10)
        with connection.Consumer([Queue("q")], on_message=held.append):
            for handed in (1, 2):
                connection.drain_events(timeout=DEADLINE_S)
                until(lambda handed=handed: placed(engine) == (10 - handed, handed))
            until(lambda: connection.drain_events(timeout=DEADLINE_S) or len(held) == 10)
            assert [message.payload for message in held] == list(range(10))
            assert not any(message.delivery_info["redelivered"] for message in held)

    def test_a_sleeping_receiver_asks_the_store_for_nothing(self, connect, watcher, engine, until, monkeypatch):
        connection = connect(undrained_timeout=SOON_S, poll_interval=0.01)
        with connection.Consumer([Queue("q")], on_message=print):
            drain_all(connection)
            receiver = connection.transport.receiver
            until(lambda: not receiver.fetcher.attended and receiver.fetcher.asleep)
            turns = []
            monkeypatch.setattr(receiver, "turn", lambda turn=receiver.turn: turns.append(None) or turn())
            fill(watcher, 1)  # rings no bell of its
            let_the_receiver_turn(watcher)
            assert len(turns) <= 1

    def test_an_event_loop_that_is_blocked(self, connect, watcher, engine, until):
        """Celery's solo pool: a task of an hour runs inside the loop."""
        connection, hub = connect(undrained_timeout=SOON_S), Hub()
        fill(watcher, 10)
        seen = []
        elsewhere = []

        def on_message(message):
            if not seen:
                until(lambda: placed(engine) == (9, 1))
                elsewhere.extend(everything(watcher)[:9])
                fill(watcher, 3, first=10)
            seen.append(message.payload)
            message.ack()

        connection.register_with_event_loop(hub)
        with connection.Consumer([Queue("q")], on_message=on_message, prefetch_count=10):
            until(lambda: placed(engine) == (0, 10))
            until(lambda: hub.run_once() or len(seen) == 4)
            connection.transport._leave_loop()
        hub.close()
        assert elsewhere == [(number, False) for number in range(1, 10)]
        assert seen == [0, 10, 11, 12]
        assert connection.default_channel.client.lost_acks == 0

    def test_a_callback_that_works_for_an_hour(self, connect, watcher, engine, until):
        connection = connect(undrained_timeout=SOON_S)
        fill(watcher, 5)
        seen = []

        def on_message(message):
            if not seen:
                until(lambda: placed(engine) == (4, 1))
            seen.append(message.payload)
            message.ack()

        with connection.Consumer([Queue("q")], on_message=on_message):
            until(lambda: connection.drain_events(timeout=DEADLINE_S) or len(seen) == 5)
        assert seen == [0, 1, 2, 3, 4]
        until(lambda: placed(engine) == (0, 0))

    def test_what_no_longer_fits_goes_back(self, connect, watcher, engine, until):
        """One consumer's messages that can't be handed out do not stay, however busily the connection is drained."""
        connection, held = connect(undrained_timeout=SOON_S), []
        fill(watcher, 8)
        with connection.Consumer([Queue("q")], on_message=held.append, prefetch_count=8) as consumer:
            connection.drain_events(timeout=DEADLINE_S)
            until(lambda: placed(engine) == (0, 8))
            consumer.qos(prefetch_count=1)
            until(lambda: drain_all(connection) is None and placed(engine) == (7, 1))

    def test_one_active_consumer_gives_way(self, connect, watcher, engine, until):
        queue = Queue("q", queue_arguments={"x-single-active-consumer": True})
        connection, received = connect(undrained_timeout=SOON_S), []
        fill(watcher, 3)
        with connection.Consumer([queue], on_message=lambda message: message.ack()):
            connection.drain_events(timeout=DEADLINE_S)
            with watcher.Consumer([queue], on_message=received.append):
                until(lambda: watcher.drain_events(timeout=DEADLINE_S) or len(received) == 2)
        assert [message.payload for message in received] == [1, 2]

    def test_one_active_consumer_keeps_its_place_while_it_works(self, connect, watcher, engine, until):
        """The order of the queue depends on it."""
        queue = Queue("q", queue_arguments={"x-single-active-consumer": True})
        connection, held = connect(undrained_timeout=SOON_S), []
        fill(watcher, 3)
        with connection.Consumer([queue], on_message=held.append):
            connection.drain_events(timeout=DEADLINE_S)
            until(lambda: placed(engine) == (2, 1))
            let_the_receiver_turn(connection)
            with watcher.Consumer([queue], on_message=print), pytest.raises(TimeoutError):
                watcher.drain_events(timeout=0)
            held.pop().ack()

    def test_an_outage_meanwhile(self, connect, watcher, engine, until, monkeypatch):
        connection, held = connect(undrained_timeout=SOON_S), []
        fill(watcher, 5)
        with connection.Consumer([Queue("q")], on_message=held.append, prefetch_count=5):
            connection.drain_events(timeout=DEADLINE_S)
            until(lambda: placed(engine) == (0, 5))
            own = connection.default_channel.engine
            with monkeypatch.context() as patch:
                patch.setattr(own.messages, "release", Mock(side_effect=StoreUnavailable))
                until(lambda: connection.transport.receiver.failed)
            until(lambda: placed(engine) == (4, 1))


class TestInterrupted:
    """An exception between the inbox and the callback: from a signal handler, a soft time limit, a greenlet's end."""

    def test_at_any_line_of_a_drain(self, connect, engine, until):
        connection = connect(delivery_limit=None)  # the same messages come back at each line
        modules = (connection_module, receiver, dispatch_module, unacked, channel_module)
        files = {str(each.__file__) for each in modules}
        received = []
        fill(connection, 3)
        places = []
        with connection.Consumer([Queue("q")], on_message=received.append, prefetch_count=3):
            until(lambda: drain_all(connection) is None and len(received) == 3)
            for line in range(1, 1000):
                received.pop(0).requeue()
                until(lambda: connection.transport.receiver.fetcher.arrived.wait(DEADLINE_S))
                hit = interrupt(lambda: connection.drain_events(timeout=DEADLINE_S), line, files, strikes=runs_handlers)
                places += filter(None, [hit])
                until(lambda: drain_all(connection) is None and len(received) == 3)
                assert len(connection.default_channel.credit.inbox) == 0, places
                assert len(connection.default_channel.qos) == 3, places
                if not hit:
                    break
            else:
                pytest.fail("a drain has more lines than that")
        assert len(set(places)) > 20


class TestTwoThreads:
    def test_closing_ends_a_drain(self, connection, until):
        raised = []

        def wait():
            try:
                connection.transport.drain_events(connection.transport)
            except BaseException as error:
                raised.append(error)

        with connection.Consumer([Queue("q")], on_message=print):
            transport = connection.transport
            thread = threading.Thread(target=wait)
            thread.start()
            until(lambda: transport.receiver.fetcher.attended)
            transport.close_connection(transport)
            thread.join(10)
        assert not thread.is_alive()
        assert isinstance(raised[0], connection.connection_errors)

    def test_each_message_is_handed_out_once(self, connection, until):
        fill(connection, 400)
        received = []

        def work():
            while len(received) < 400:
                with contextlib.suppress(TimeoutError):
                    connection.drain_events(timeout=0.05)

        threads = [threading.Thread(target=work) for _ in range(2)]
        with connection.Consumer(
            [Queue("q")],
            on_message=lambda message: (received.append(message.payload), message.ack()),
            prefetch_count=16,
        ):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        assert sorted(received) == list(range(400))

    def test_the_channel_is_closed_in_a_callback(self, connection, engine, until):
        fill(connection, 10)
        channel = connection.channel()

        def on_message(_):
            channel.close()

        channel.basic_consume("q", False, on_message)
        connection.drain_events(timeout=DEADLINE_S)
        drain_all(connection)
        until(lambda: placed(engine) == (10, 0))


class TestPrograms:
    def test_a_consumer_mixin_that_is_dropped(self, abandoned, watcher, engine, until):
        fill(watcher, 10)

        class Worker(ConsumerMixin):
            def __init__(self):
                self.connection = abandoned()
                self.received = []

            def get_consumers(self, consumer, channel):
                return [consumer([Queue("q")], on_message=self.received.append)]

        def forget():
            worker = Worker()
            events = worker.consume(limit=None)
            while not worker.received:
                next(events)
            worker.connection = None

        forget()
        until(lambda: collect() is None and placed(engine) == (10, 0))


class TestEndedMeanwhile:
    """A connection that ends while another connection keeps the process's session."""

    def test_an_exclusive_queue_ends_where_the_store_does_not_answer_the_close(
        self, watcher, connect, engine, until, monkeypatch
    ):
        connection = connect(ack_delay_ms=2.5)
        connection.default_channel.queue_declare("own", exclusive=True)
        queues = connection.transport.engine.queues
        remove_consumer = away(queues.remove_consumer, 1)
        monkeypatch.setattr(queues, "remove_consumer", remove_consumer)
        connection.close()
        assert remove_consumer.called
        until(lambda: engine.inspect.queue("own") is None)

    @pytest.mark.parametrize("end", ["close", "collect"])
    def test_an_exclusive_queue_ends_that_is_being_declared(self, watcher, connect, engine, until, monkeypatch, end):
        connection = connect(ack_delay_ms=2.5)
        channel, queues = connection.channel(), connection.transport.engine.queues
        declare = queues.declare

        def declare_late(*args, **kwargs):
            getattr(connection, end)()  # as another thread does
            return declare(*args, **kwargs)

        monkeypatch.setattr(queues, "declare", declare_late)
        with contextlib.suppress(connection.recoverable_connection_errors):
            channel.queue_declare("own", exclusive=True)
        until(lambda: engine.inspect.queue("own") is None)

    def test_the_consumer_of_a_channel_that_was_closed_meanwhile_ends_with_the_connection(
        self, watcher, connect, engine, until, monkeypatch
    ):
        connection = connect(ack_delay_ms=2.5)
        channel = connection.channel()
        channel.queue_declare("passing", auto_delete=True)
        monkeypatch.setattr(channel, "_require_open", channel.close)  # another thread closes it after the check
        channel.basic_consume("passing", False, lambda _: None)
        assert engine.inspect.queue("passing")
        connection.close()
        until(lambda: engine.inspect.queue("passing") is None)
