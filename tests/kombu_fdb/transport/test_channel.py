"""What a channel declares, routes and answers (research/interfaces.md A1, A4, A8, A9).

=========================================================== ===============================================
interface                                                   test
=========================================================== ===============================================
A1 passive declarations, 404                                TestDeclare.test_passive_*
A1 406 on another type, x-delayed-message                   TestDeclare.test_exchange_*
A1 redeclare updates the arguments                          TestDeclare.test_redeclare_updates
A1 prepare_queue_arguments                                  TestDeclare.test_queue_options_become_arguments
A1 delete a queue known only by name; conditions            TestDelete
A1 bind to an exchange of another process; unbind           TestBind
A1 undeclared queue through the default exchange            TestPublish.test_undeclared_queue
A1 events, mandatory, deadletter_queue                      TestPublish.test_unroutable_*
A1 get_bindings                                             TestBind.test_manager_lists_bindings
A1 after_reply_message_received                             TestDelete.test_reply_queue
A3 wire format, unknown exchange, too large                 TestPublish, test_envelope.py
A4 auto-delete, exclusive, x-expires                        TestVanishing
A9 DelaySeconds, x-delay, eta                               TestDelay
=========================================================== ===============================================
"""

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any
from unittest.mock import Mock

import pytest
from amqp.exceptions import ChannelError, NotFound, PreconditionFailed
from kombu import Exchange, Producer, Queue
from kombu.transport.virtual.base import UndeliverableWarning

from kombu_fdb.errors import OptionError, QueueError
from kombu_fdb.model import Publication
from kombu_fdb.settings.options import Options
from kombu_fdb.transport.envelope import now_ms


class TestDeclare:
    def test_passive_queue(self, channel):
        with pytest.raises(NotFound) as caught:
            channel.queue_declare("q", passive=True)
        assert caught.value.code == 404
        channel.queue_declare("q")
        assert channel.queue_declare("q", passive=True).message_count == 0

    def test_passive_exchange(self, channel):
        with pytest.raises(NotFound):
            channel.exchange_declare("e", passive=True)
        channel.exchange_declare("e", "topic")
        channel.exchange_declare("e", passive=True)
        channel.exchange_declare("amq.topic", passive=True)

    def test_passive_declare_is_not_retried(self, connection):
        """404 must not count as recoverable, or ``ensure`` repeats it."""
        calls = []

        def declare(channel):
            calls.append(1)
            channel.queue_declare("q", passive=True)

        with pytest.raises(NotFound):
            connection.autoretry(declare, max_retries=3)()
        assert calls == [1]

    def test_exchange_of_another_type(self, connection, channel):
        channel.exchange_declare("e", "topic")
        channel.exchange_declare("e", "topic")
        with pytest.raises(PreconditionFailed) as caught:
            channel.exchange_declare("e", "fanout")
        assert isinstance(caught.value, connection.channel_errors)
        assert not isinstance(caught.value, connection.connection_errors)

    def test_exchange_type_of_the_delay_plugin(self, channel):
        channel.exchange_declare("e", "x-delayed-message", arguments={"x-delayed-type": "topic"})
        assert channel.engine.inspect.exchange("e").type == "topic"

    def test_a_queues_name_has_amqps_longest_length(self, channel):
        channel.queue_declare("q" * 255)
        with pytest.raises(PreconditionFailed, match="name is too long"):
            channel.queue_declare("q" * 256)
        assert channel.engine.inspect.queue("q" * 256) is None

    def test_unknown_exchange_type(self, channel):
        with pytest.raises(PreconditionFailed):
            channel.exchange_declare("e", "headers")

    def test_redeclare_updates(self, channel):
        channel.queue_declare("q", arguments={"x-message-ttl": 1000})
        channel.queue_declare("q", arguments={"x-message-ttl": 2000})
        assert channel.engine.inspect.queue("q").arguments == {"x-message-ttl": 2000}

    def test_queue_options_become_arguments(self, channel):
        Queue("q", expires=10, message_ttl=5, max_length=7, max_priority=9)(channel).declare()
        assert channel.engine.inspect.queue("q").arguments == {
            "x-expires": 10_000,
            "x-message-ttl": 5000,
            "x-max-length": 7,
            "x-max-priority": 9,
        }

    def test_generated_name(self, channel):
        declared = channel.queue_declare()
        assert declared.queue.startswith("amq.gen-")
        assert channel.queue_declare(declared.queue, passive=True)

    def test_size_counts_ready_messages(self, channel):
        producer = Producer(channel)
        producer.publish(1, routing_key="q")
        producer.publish(2, routing_key="q")
        producer.publish(3, routing_key="q", headers={"x-delay": 60_000})
        held = channel.basic_get("q")
        assert channel.queue_declare("q", passive=True).message_count == channel._size("q") == 1
        held.ack()


class TestDelete:
    def test_by_another_connection_and_undeclared(self, channel, connect):
        Producer(channel).publish(1, routing_key="q")
        assert connect().default_channel.queue_delete("q") == 1
        with pytest.raises(NotFound):
            channel.queue_declare("q", passive=True)

    def test_with_its_bindings(self, channel):
        Queue("q", Exchange("e", "fanout"))(channel).declare()
        channel.queue_delete("q")
        assert list(channel.list_bindings()) == []

    def test_if_empty(self, channel):
        Producer(channel).publish(1, routing_key="q")
        with pytest.raises(PreconditionFailed):
            channel.queue_delete("q", if_empty=True)
        assert channel.queue_purge("q") == 1
        channel.queue_delete("q", if_empty=True)

    def test_if_unused(self, connection, channel):
        channel.queue_declare("q")
        with connection.Consumer([Queue("q")]), pytest.raises(PreconditionFailed):
            channel.queue_delete("q", if_unused=True)
        channel.queue_delete("q", if_unused=True)

    def test_reply_queue(self, channel):
        channel.queue_declare("q")
        channel.after_reply_message_received("q")
        assert not channel._has_queue("q")

    def test_exchange(self, channel):
        Queue("q", Exchange("e", "fanout"))(channel).declare()
        with pytest.raises(PreconditionFailed):
            channel.exchange_delete("e", if_unused=True)
        channel.exchange_delete("e")
        assert channel._has_queue("q")
        with pytest.raises(NotFound):
            channel.exchange_declare("e", passive=True)

    def test_a_retry_declares_a_vanished_exchange_again(self, channel):
        """All workers of a namespace died when its rows were cleared: RabbitMQ's live on without their vhost's."""
        queue = Queue("q", Exchange("e"), "k")
        producer = Producer(channel.connection.client)
        policy = {"max_retries": 1, "interval_start": 0}
        for number in range(4):
            if number == 2:
                channel.exchange_delete("e")
                with pytest.raises(NotFound, match="no such exchange"):
                    producer.publish("lost", exchange="e", routing_key="k", declare=[queue])
            elif number == 3:
                channel.exchange_delete("e")
            producer.publish(number, exchange="e", routing_key="k", declare=[queue], retry=True, retry_policy=policy)
        assert [channel.basic_get("q").payload for _ in range(4)] == [0, 1, 2, 3]
        channel.exchange_delete("e")
        with pytest.raises(NotFound, match="no such exchange"):  # it is not declared with the message
            producer.publish("lost", exchange="e", routing_key="k", retry=True, retry_policy=policy)

    def test_a_vanished_exchange_is_amqps_error_after_the_last_retry(self, channel):
        """Kombu makes an error of its own of what is recoverable, if it can."""
        channel.exchange_declare("e")
        channel.exchange_delete("e")
        with pytest.raises(NotFound, match="no such exchange"):
            Producer(channel).publish(1, exchange="e", retry=True, retry_policy={"max_retries": 0})

    @pytest.mark.parametrize("exchange", ["e", "typo"])
    def test_a_retry_without_a_limit_ends_where_no_declaration_helps(self, channel, exchange):
        """Kombu repeats at once what is recoverable: Celery's ``max_retries: None`` was a loop without an end."""
        entities = [Queue("q", Exchange("e"), "k")]
        Producer(channel.connection.client).publish(0, declare=entities)
        channel.exchange_delete("e")
        errback = Mock(side_effect=[None] * 500)
        policy = {"max_retries": None, "errback": errback}
        with pytest.raises(NotFound, match="no such exchange"):
            Producer(channel.connection.client).publish(
                "lost",
                exchange=exchange,
                routing_key="k",
                declare=entities if exchange == "typo" else [],
                retry=True,
                retry_policy=policy,
            )

    def test_each_thread_of_a_connection_declares_a_vanished_exchange_again(self, channel, monkeypatch):
        client, queue, missed = channel.connection.client, Queue("q", Exchange("e"), "k"), Barrier(2, timeout=10)
        forget = channel.transport.forget_declared

        def forget_together(exchange):
            missed.wait()
            return forget(exchange)

        def publish(retry):
            policy = {"max_retries": 1}
            Producer(client).publish(1, "k", exchange="e", declare=[queue], retry=retry, retry_policy=policy)

        publish(False)
        channel.exchange_delete("e")
        monkeypatch.setattr(channel.transport, "forget_declared", forget_together)
        with ThreadPoolExecutor(2) as threads:
            [*threads.map(publish, [True, True])]
        assert channel._size("q") == 3

    def test_a_vanished_exchange_is_named_while_another_thread_closes_the_connection(self, channel, monkeypatch):
        channel.exchange_declare("e")
        channel.exchange_delete("e")
        publisher, client = channel.engine.publisher, channel.connection.client
        publish = publisher.publish

        def publish_and_close(*args, **kwargs):
            try:
                return publish(*args, **kwargs)
            finally:
                client.close()

        monkeypatch.setattr(publisher, "publish", publish_and_close)
        with pytest.raises(NotFound, match="no such exchange"):
            channel.basic_publish("lost", "e", "k")

    def test_purge_leaves_what_is_held(self, channel):
        for number in range(3):
            Producer(channel).publish(number, routing_key="q")
        held = channel.basic_get("q")
        assert channel.queue_purge("q") == 2
        held.requeue()
        assert channel._size("q") == 1


class TestBind:
    def test_exchange_declared_by_another_connection(self, connect, channel):
        connect().default_channel.exchange_declare("e", "topic")
        channel.queue_declare("q")
        channel.queue_bind("q", "e", "a.#")
        assert channel.typeof("e").type == "topic"
        assert channel.get_table("e") == [("a.#", "", "q")]

    def test_unknown_exchange(self, channel):
        channel.queue_declare("q")
        with pytest.raises(NotFound):
            channel.queue_bind("q", "nowhere", "k")

    def test_unbind_is_seen_by_others(self, connect, channel):
        exchange = Exchange("e", "direct")
        queue = Queue("q", exchange, routing_key="k")(channel)
        queue.declare()
        producer = connect().Producer(auto_declare=False)
        producer.publish(1, exchange="e", routing_key="k")
        queue.unbind_from(exchange, "k")
        producer.publish(2, exchange="e", routing_key="k")
        assert channel._size("q") == 1

    def test_rebound_after_another_process_deleted_the_queue(self, connect, channel):
        queue = Queue("q", Exchange("e", "direct"), routing_key="k")
        queue(channel).declare()
        connect().default_channel.queue_delete("q")
        queue(channel).declare()
        Producer(channel).publish(1, exchange="e", routing_key="k")
        assert channel._size("q") == 1

    def test_manager_lists_bindings(self, connection, channel):
        Queue("q", Exchange("e", "direct"), routing_key="k")(channel).declare()
        manager = connection.get_manager()
        assert manager.get_bindings() == [{"destination": "q", "source": "e", "routing_key": "k"}]
        manager.close()


class TestPublish:
    def test_undeclared_queue(self, channel):
        Producer(channel).publish(1, routing_key="never-declared")
        assert channel.basic_get("never-declared").payload == 1

    def test_unknown_exchange(self, connection):
        with pytest.raises(NotFound) as caught:
            connection.Producer(auto_declare=False).publish(1, exchange="nowhere", routing_key="k")
        assert isinstance(caught.value, connection.channel_errors)

    def test_unroutable_is_dropped(self, channel):
        channel.exchange_declare("e", "direct")
        Producer(channel).publish(1, exchange="e", routing_key="k")
        assert channel.engine.inspect.queues() == {}

    def test_unroutable_is_returned(self, connection):
        returned = []
        connection.default_channel.exchange_declare("e", "direct")
        producer = connection.Producer(on_return=lambda *arguments: returned.append(arguments))
        producer.publish({"a": 1}, exchange="e", routing_key="k", mandatory=True)
        ((error, exchange, routing_key, message),) = returned
        assert (type(error), error.reply_code, error.method_name) == (ChannelError, 312, "Basic.return")  # as py-amqp's
        assert (exchange, routing_key, message.payload) == ("e", "k", {"a": 1})

    def test_unroutable_goes_to_the_deadletter_queue(self, connect):
        connection = connect(deadletter_queue="lost")
        connection.default_channel.exchange_declare("e", "topic")
        with pytest.warns(UndeliverableWarning):
            connection.Producer().publish(1, exchange="e", routing_key="k")
        assert connection.default_channel.basic_get("lost").payload == 1

    def test_too_large(self, connect):
        assert Options().max_message_size == 8 * 2**20
        with pytest.raises(OptionError, match="max_message_size"):
            Options(max_message_size=9_000_001)
        connection = connect(max_message_size=2000)
        with pytest.raises(PreconditionFailed, match="too large") as caught:
            connection.Producer().publish("x" * 3000, routing_key="q")
        assert isinstance(caught.value, connection.channel_errors)
        assert connection.default_channel.engine.inspect.queues() == {}

    def test_text_as_the_command_line_sends_it(self, channel):
        channel.basic_publish("hello", exchange="", routing_key="q")
        assert channel.basic_get("q").body == b"hello"

    def test_delivery_info(self, channel):
        Queue("q", Exchange("e", "topic"), routing_key="a.*")(channel).declare()
        Producer(channel).publish(1, exchange="e", routing_key="a.b", correlation_id="c", reply_to="r", priority=4)
        message = channel.basic_get("q")
        assert message.delivery_info == {"exchange": "e", "routing_key": "a.b", "queue": "q", "redelivered": False}
        assert message.properties["correlation_id"] == "c"
        assert (message.properties["reply_to"], message.properties["priority"]) == ("r", 4)

    @pytest.mark.parametrize(
        ("given", "timeout_s"),
        [({}, None), ({"timeout": 3}, 3), ({"confirm_timeout": 4}, 4), ({"timeout": 3, "confirm_timeout": 4}, 4)],
    )
    def test_timeouts(self, channel, monkeypatch, given, timeout_s):
        """As py-amqp waits for a confirm."""
        publisher, seen = channel.engine.publisher, list[Any]()
        publish = publisher.publish
        monkeypatch.setattr(
            publisher, "publish", lambda *args, **kwargs: seen.append(kwargs["timeout_s"]) or publish(*args, **kwargs)
        )
        Producer(channel).publish(1, routing_key="q", **given)
        assert channel._size("q") == 1
        assert seen == [timeout_s]


class TestGet:
    def test_empty(self, channel):
        channel.queue_declare("q")
        assert channel.basic_get("q") is None

    def test_no_ack_leaves_no_lease(self, channel):
        Producer(channel).publish(1, routing_key="q")
        message = channel.basic_get("q", no_ack=True)
        assert message.payload == 1
        assert channel.engine.inspect.counts("q").leased == 0
        assert len(channel.qos) == 0

    def test_malformed(self, channel):
        channel.engine.publisher.publish([Publication("", "q", b"nonsense")])
        Producer(channel).publish(1, routing_key="q")
        assert channel.basic_get("q").payload == 1
        assert channel.engine.inspect.counts("q.dead").ready == 1


class TestDelay:
    def test_is_reckoned_from_one_moment(self, channel, monkeypatch):
        """However long it takes until the message is stored."""
        monkeypatch.setattr("kombu_fdb.transport.channel.now_ms", lambda: now_ms() - 3_600_000)
        Producer(channel).publish(1, routing_key="q", headers={"x-delay": 1})
        assert channel.engine.inspect.counts("q").delayed == 1

    def test_arrives_when_due_and_not_before(self, connection, drain):
        received = []
        started = time.time()
        connection.Producer().publish(1, routing_key="q", headers={"x-delay": 300})
        with connection.Consumer(
            [Queue("q")], on_message=lambda message: (received.append(time.time()), message.ack())
        ):
            drain(connection, received, 1)
        assert 0.3 <= received[0] - started < 2


class TestVanishing:
    def test_exclusive_ends_with_its_connection(self, connect, channel):
        connection = connect()
        Queue("q", exclusive=True)(connection.default_channel).declare()
        assert channel._has_queue("q")
        connection.close()
        assert not channel._has_queue("q")

    def test_exclusive_ends_with_its_process_though_that_only_publishes(self, connect, connection, channel):
        """As on RabbitMQ, where the server sees the connection end. Here a session does, and it is swept."""
        theirs = connect().default_channel
        Queue("q", exclusive=True)(theirs).declare()
        theirs.basic_publish(theirs.prepare_message("x"), "", "q")
        session = theirs.client.session().session_id
        sessions = channel.engine.sessions
        (beat,) = (beat for each, beat, _ in sessions.beats() if each == session)
        assert sessions.fence(session, beat)
        sessions.release(session)
        assert not channel._has_queue("q")
        channel.engine.queues.finish_deletion("q")  # as the duties do
        assert channel.engine.inspect.counts("q").ready == 0

    def test_exclusive_is_declared_by_a_process_that_was_taken_for_dead(self, connect, channel):
        """It does not know yet, and opens another session, which owns the queue."""
        connection = connect()
        theirs = connection.default_channel
        Queue("before", exclusive=True)(theirs).declare()
        session = theirs.client.session().session_id
        sessions = channel.engine.sessions
        assert sessions.fence(session, {each: beat for each, beat, _ in sessions.beats()}[session])
        sessions.release(session)
        Queue("q", exclusive=True)(theirs).declare()
        assert theirs.client.session().session_id != session
        assert [channel._has_queue(name) for name in ("before", "q")] == [False, True]
        connection.close()
        assert not channel._has_queue("q")

    @pytest.mark.parametrize("auto_delete", [False, True])
    def test_only_auto_delete_ends_an_exclusive_queue_with_its_last_consumer(self, connect, channel, auto_delete):
        """Else it is its connection's. Each of kombu's queues that is exclusive is auto-delete, too."""
        with connect() as connection:
            connection.default_channel.queue_declare("q", exclusive=True, auto_delete=auto_delete)
            connection.default_channel.basic_consume("q", no_ack=True, callback=print)
            connection.default_channel.close()
            assert channel._has_queue("q") is not auto_delete
        assert not channel._has_queue("q")

    def test_an_exclusive_queue_without_consumers_is_unused(self, connect, channel):
        """The entry that stands for its connection is no consumer: neither of a deletion nor of ``x-expires``."""
        theirs = connect().default_channel
        queue = Queue("q", exclusive=True, expires=0.1)(theirs)
        queue.declare()
        assert [name for name, *_ in channel.engine.queues.expiring()] == ["q"]
        queue.delete(if_unused=True)
        assert not channel._has_queue("q")

    def test_a_refused_declaration_owns_nothing(self, connect, connection, channel):
        Queue("q", auto_delete=True)(channel).declare()
        other = connect()
        with pytest.raises(PreconditionFailed):
            Queue("q", exclusive=True, queue_arguments={"x-max-length": -1})(other.default_channel).declare()
        other.close()
        assert channel._has_queue("q")

    def test_lives_while_consumed(self, connection, connect, channel, until):
        queue = Queue("q", expires=0.1)
        with connection.Consumer([queue]):
            Queue("unused", expires=1.5)(channel).declare()
            until(lambda: not channel._has_queue("unused"))
            assert channel._has_queue("q")
        until(lambda: not channel._has_queue("q"))

    @pytest.mark.parametrize("is_empty", [True, False])
    def test_lives_while_messages_are_got(self, connect, channel, is_empty):
        """By whichever connection, whether there is one or not."""
        Queue("q", expires=60)(channel).declare()
        if not is_empty:
            Producer(channel).publish(1, routing_key="q")
        ((_, before, _),) = channel.engine.queues.expiring()
        assert (connect().default_channel.basic_get("q") is None) is is_empty
        ((_, last_use, _),) = channel.engine.queues.expiring()
        assert last_use > before


@pytest.mark.parametrize("kind", ["topic", "direct"])
def test_a_binding_key_has_at_most_255_bytes(channel, kind):
    channel.queue_declare("q")
    channel.exchange_declare(f"x-{kind}", kind)
    with pytest.raises(QueueError, match="routing key is too long"):
        channel.queue_bind("q", f"x-{kind}", "#." * 2_400)
    channel.queue_bind("q", f"x-{kind}", "#." * 127 + "a")
