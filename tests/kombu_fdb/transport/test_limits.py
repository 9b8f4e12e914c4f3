"""Queue arguments that bound a queue or its consumers, as a kombu user meets them."""

import contextlib
import pickle
import threading

import pytest
from amqp.exceptions import MessageNacked, PreconditionFailed
from kit.duties import active_consumer
from kit.queues import drain_all
from kombu import Consumer, Queue

from kombu_fdb.errors import StoreUnavailable

#: Makes a client, and so a session, of its own in this process.
ANOTHER_PROCESS = {"ack_delay_ms": 2.5}


def declare(connection, **arguments):
    named = {f"x-{name.replace('_', '-')}": value for name, value in arguments.items()}
    queue = Queue("q", queue_arguments=named)
    queue(connection.default_channel).declare()
    return queue


def publish(connection, *bodies, **properties):
    for body in bodies:
        connection.Producer(auto_declare=False).publish(body, routing_key="q", **properties)


def wait_until_active(listener):
    """A consumer becomes active with its first claim, a moment after it subscribed."""
    while not listener.active:
        with contextlib.suppress(TimeoutError):
            listener.connection.drain_events(timeout=0.01)


class Listener:
    """A consumer of "q" that keeps what it gets."""

    def __init__(self, connection, **options):
        self.connection = connection
        self.held = []
        channel = options.pop("channel", None) or connection.default_channel
        self.consumer = Consumer(channel, [Queue("q")], on_message=self.held.append, auto_declare=False, **options)
        self.consumer.consume()

    @property
    def bodies(self):
        drain_all(self.connection)
        return [message.payload for message in self.held]

    @property
    def active(self):
        found = active_consumer(self.connection.default_channel.engine, "q")
        return found is not None and found[1].partition("-")[2] in self.consumer._active_tags.values()


class TestArguments:
    def test_a_senseless_one_is_a_precondition_failed(self, connection):
        with pytest.raises(PreconditionFailed, match="a whole number of bytes"):
            declare(connection, max_length_bytes="1MB")

    def test_a_refusal_is_what_rabbitmq_s_client_raises(self, connection):
        declare(connection, max_length=0, overflow="reject-publish")
        with pytest.raises(MessageNacked) as caught:
            publish(connection, "a")
        again = pickle.loads(pickle.dumps(caught.value))
        assert isinstance(again, MessageNacked)
        assert str(again) == str(caught.value)
        assert "raise the queue's x-max-length" in str(again)


class TestSingleActiveConsumer:
    @pytest.fixture
    def queue(self, connection):
        return declare(connection, single_active_consumer=True)

    @pytest.mark.parametrize("how", ["cancel", "close the channel", "close the connection"])
    def test_who_stands_by_takes_over(self, connect, connection, queue, until, how):
        one = Listener(connection, prefetch_count=2)
        wait_until_active(one)
        two = Listener(connect(**ANOTHER_PROCESS, poll_interval=3600.0))
        publish(connection, *range(4))
        until(lambda: one.bodies == [0, 1])
        one.held[0].ack()
        until(lambda: one.bodies == [0, 1, 2])
        ends = {
            "cancel": one.consumer.cancel,
            "close the channel": one.consumer.channel.close,
            "close the connection": connection.close,
        }
        ends[how]()
        until(lambda: two.bodies and two.bodies[-1] == 3)
        assert two.bodies == ([3] if how == "cancel" else [1, 2, 3])

    def test_of_two_channels_the_first_is_served_until_it_closes(self, connection, queue, until):
        one = Listener(connection, channel=connection.channel())
        two = Listener(connection, channel=connection.channel())
        publish(connection, *range(4))
        until(lambda: one.bodies == list(range(4)))
        for message in one.held:
            message.ack()
        one.consumer.cancel()
        publish(connection, 4)
        until(lambda: two.bodies == [4])

    def test_who_stands_by_costs_nothing(self, connect, connection, queue, until):
        """Messages that wait for the active one are no work for the others, nor a reason to wake up."""
        one = Listener(connection, prefetch_count=1)
        wait_until_active(one)
        other = connect(**ANOTHER_PROCESS, poll_interval=3600.0)
        engine = other.default_channel.engine
        two, armed = Listener(other), threading.Event()
        assert two.bodies == []  # it has drained
        until(lambda: other.transport.receiver.fetcher.idle)
        claims, arm = [], engine.messages.arm
        engine.messages.claim = lambda *arguments, **_: claims.append(arguments) or []
        engine.messages.arm = lambda *arguments: armed.set() or arm(*arguments)
        publish(connection, *range(50))
        until(lambda: one.bodies == [0])
        one.held[0].ack()
        until(lambda: one.bodies == [0, 1])
        assert two.bodies == claims == []
        assert not armed.is_set()

    def test_a_fenced_process_takes_over_from_itself(self, connection, queue, until):
        one = Listener(connection)
        publish(connection, 0)
        until(lambda: one.bodies == [0])
        client = connection.default_channel.client
        client.engine.sessions.close(client.session().session_id)
        until(lambda: one.bodies == [0, 0])
        assert one.active

    def test_a_direct_get_is_served_only_without_an_active_consumer(self, connect, connection, queue, until):
        publish(connection, 0, 1)
        other = connect(**ANOTHER_PROCESS)
        message = other.default_channel.basic_get("q")
        assert message.payload == 0
        message.ack()
        one = Listener(connection, prefetch_count=1)
        wait_until_active(one)
        publish(connection, 2)
        until(lambda: one.bodies == [1])
        assert other.default_channel.basic_get("q") is None
        one.consumer.cancel()
        assert other.default_channel.basic_get("q").payload == 2


class TestTimeToRun:
    def test_of_the_queue(self, connect, connection, until, caplog):
        declare(connection, consumer_timeout=100)
        slow = Listener(connection, prefetch_count=1)
        publish(connection, "task")
        until(lambda: slow.bodies == ["task"])
        fast = Listener(connect(**ANOTHER_PROCESS))
        until(lambda: fast.bodies == ["task"])
        assert fast.held[0].headers["x-delivery-count"] == 1
        fast.held[0].ack()
        until(lambda: fast.connection.default_channel.engine.inspect.counts("q").leased == 0)
        slow.held[0].ack()
        assert caplog.text.count("was settled after its time to run") == 1
        assert slow.connection.default_channel.client.lost_acks == 0

    @pytest.mark.parametrize("header", [100, "100.0", 100.4])
    def test_of_a_message(self, connection, until, header):
        publish(connection, "task", headers={"x-ttr": header})
        publish(connection, "other")
        listener = Listener(connection)
        until(lambda: listener.bodies == ["task", "other", "task"])
        assert connection.default_channel.engine.inspect.counts("q").leased == 2

    @pytest.mark.parametrize("header", [None, 0])
    def test_what_is_no_time_limits_nothing(self, connection, header):
        publish(connection, "task", headers={"x-ttr": header})
        Listener(connection)
        assert not connection.default_channel.client.time_to_run.timers

    def test_who_acks_in_time_is_left_alone(self, connection, until):
        declare(connection, consumer_timeout=3_600_000)
        listener = Listener(connection, prefetch_count=2)
        publish(connection, *range(20))
        timers = connection.default_channel.client.time_to_run.timers
        for _ in range(20):
            until(lambda: listener.bodies)
            assert 1 <= len(timers) <= 3
            listener.held.pop(0).ack()
        until(lambda: not timers)
        assert connection.default_channel.engine.inspect.counts("q").ready == 0

    def test_an_ack_counts_although_the_store_does_not_answer(self, connection, until, monkeypatch):
        """Neither the ack nor the hand-back of an earlier failure may undo it."""
        publish(connection, "in time", "late", headers={"x-ttr": 300})
        listener = Listener(connection)
        until(lambda: listener.bodies == ["in time", "late"])
        client = connection.default_channel.client
        release, refused = client.engine.messages.release, []

        def fail(*arguments, **options):
            refused.append(arguments)
            raise StoreUnavailable("for a test")

        monkeypatch.setattr(client.engine.messages, "release", fail)
        monkeypatch.setattr(client.engine.messages, "ack", fail)
        monkeypatch.setattr(client, "flush_acks", lambda: None)
        listener.held[0].ack()
        timers = client.time_to_run.timers
        until(lambda: len(timers) == 1)
        until(lambda: len(refused) == 1)
        listener.held[1].ack()
        assert not timers, "its hand-back, which failed, is not tried again"
        monkeypatch.undo()
        assert client.engine.messages.release == release
        client.flush_acks()
        assert client.lost_acks == 0
        until(lambda: connection.default_channel.engine.inspect.counts("q").leased == 0)
        assert connection.default_channel.engine.inspect.counts("q").ready == 0

    def test_late_messages_keep_their_room(self, connection, until):
        """A consumer that hangs gets no other messages, to be late with them as well."""
        declare(connection, consumer_timeout=100)
        connection.default_channel.queue_declare("other")
        listener = Listener(connection, prefetch_count=1)
        publish(connection, "first", "second")
        until(lambda: listener.bodies == ["first"])
        engine = connection.default_channel.engine
        until(lambda: engine.inspect.counts("q").ready == 2)
        for _ in range(2):  # the turn in which it is carried out may have begun before
            other = connection.default_channel.basic_consume("other", False, print)
            connection.default_channel.basic_cancel(other)
        assert listener.bodies == ["first"]
        assert engine.inspect.counts("q").ready == 2
        for settle in (listener.held[0].requeue, listener.held[0].ack):
            settle() if not listener.held[0].acknowledged else None
        until(lambda: listener.bodies == ["first", "first"])

    def test_what_waits_for_a_loop_that_hangs_goes_back_uncounted(self, connect, connection, until):
        declare(connection, consumer_timeout=200)
        hanging = Listener(connection, prefetch_count=3)
        engine = connection.default_channel.engine
        publish(connection, 0, 1, 2)
        connection.drain_events(timeout=60)
        until(lambda: engine.inspect.counts("q").leased == 0)
        dispatch = connection.transport.receiver.fetcher.dispatch
        assert dispatch.stalled, "nothing is claimed for it until it drains again"
        other = Listener(connect(**ANOTHER_PROCESS))
        until(lambda: len(other.bodies) == 3)
        assert [message.headers.get("x-delivery-count") for message in other.held] == [1, None, None]
        for message in other.held:
            message.ack()
        publish(connection, 3)
        hanging.held[0].ack()
        other.consumer.cancel()
        publish(connection, 4)
        until(lambda: 4 in hanging.bodies)

    def test_a_direct_get_has_one_too(self, connection, until):
        publish(connection, "task", headers={"x-ttr": 50})
        message = connection.default_channel.basic_get("q")
        until(lambda: connection.default_channel.engine.inspect.counts("q").ready == 1)
        message.ack()
        assert connection.default_channel.engine.inspect.counts("q").ready == 1

    def test_past_the_delivery_limit_it_is_a_dead_letter(self, connection, until):
        declare(connection, consumer_timeout=30, delivery_limit=1)
        listener = Listener(connection)
        publish(connection, "poison")
        engine = connection.default_channel.engine
        until(lambda: listener.bodies and engine.inspect.counts("q.dead").ready)
        assert listener.bodies == ["poison"] * 2
        (death,) = connection.default_channel.basic_get("q.dead").headers["x-death"]
        assert (death["reason"], death["error"]) == ("delivery_limit", "its time to run (ttr) has passed")
