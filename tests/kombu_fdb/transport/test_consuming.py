"""QoS, consumers, and when a message is whose (research/interfaces.md A2, A6).

=========================================================== ===============================================
interface                                                   test
=========================================================== ===============================================
A2 prefetch is exact, per channel, 0 is unlimited           TestPrefetch
A2 unknown tags, acks of lost leases                        TestSettle.test_unknown_tag, test_session.py
A2 basic_recover, restore at close                          TestSettle
A1 several consumers of one queue in one connection         TestConsumers
A1 cancel releases, also from inside a callback           TestCancel
A6 drain_events: timeout 0, None, a number                  TestDrain
A4 no_ack                                                   TestNoAck
=========================================================== ===============================================
"""

import threading
import time
from typing import Any

import pytest
from kit.queues import drain_all, fill
from kombu import Consumer, Queue

from kombu_fdb.store.sqlite import wakeups
from kombu_fdb.transport import connection as connection_module
from kombu_fdb.transport.consuming.fetcher import Claiming


class TestPrefetch:
    @pytest.mark.parametrize("prefetch", [1, 2, 3, 8])
    def test_exact(self, connection, prefetch, until):
        fill(connection, 20)
        held = []
        engine = connection.default_channel.engine
        with connection.Consumer([Queue("q")], on_message=held.append, prefetch_count=prefetch):
            drain_all(connection)
            assert len(held) == prefetch == engine.inspect.counts("q").leased
            seen = prefetch
            while seen < 20:
                held.pop(0).ack()
                until(lambda: drain_all(connection) is None and len(held) == prefetch)
                seen += 1
                assert engine.inspect.counts("q").leased <= prefetch + 1, "one acked, not flushed yet"
        assert [message.payload for message in held] == list(range(20 - prefetch, 20))

    def test_what_was_got_does_not_count(self, connection, until):
        """As on RabbitMQ: the window is the consumers'."""
        fill(connection, 7)
        channel, held = connection.default_channel, list[Any]()
        got = [channel.basic_get("q") for _ in range(3)]
        with connection.Consumer([Queue("q")], on_message=held.append, prefetch_count=2):
            until(lambda: drain_all(connection) is None and len(held) == 2)
            assert channel.qos.can_consume_max_estimate() == 0
            got[0].ack()
            got[1].reject()
            got[2].requeue()
            drain_all(connection)
            assert [message.payload for message in held] == [3, 4]
            held[0].ack()
            until(lambda: drain_all(connection) is None and len(held) == 3)
            assert held[2].payload == 2

    def test_unlimited_has_one_ahead_at_first(self, connection, until):
        fill(connection, 50)
        engine = connection.default_channel.engine
        with connection.Consumer([Queue("q")], on_message=lambda _: None):
            connection.drain_events(timeout=60)
            until(lambda: engine.inspect.counts("q").leased >= 2)
            assert engine.inspect.counts("q").leased == 2, "it is not drained"
            assert connection.default_channel.qos.can_consume_max_estimate() is None

    def test_per_channel(self, connection, until):
        fill(connection, 20)
        channels = [connection.channel() for _ in range(2)]
        held = [[], []]
        consumers = [
            Consumer(channel, [Queue("q")], on_message=messages.append, prefetch_count=number)
            for channel, messages, number in zip(channels, held, (2, 3), strict=True)
        ]
        for consumer in consumers:
            consumer.consume()
        until(lambda: drain_all(connection) is None and [len(messages) for messages in held] == [2, 3])
        for consumer in consumers:
            consumer.cancel()

    def test_raised_and_lowered(self, connection, until):
        fill(connection, 20)
        held = []
        with connection.Consumer([Queue("q")], on_message=held.append, prefetch_count=2) as consumer:
            until(lambda: drain_all(connection) is None and len(held) == 2)
            consumer.qos(prefetch_count=5)
            until(lambda: drain_all(connection) is None and len(held) == 5)
            consumer.qos(prefetch_count=1)
            for _ in range(4):
                held.pop(0).ack()
            drain_all(connection)
            assert len(held) == 1
            held.pop(0).ack()
            until(lambda: drain_all(connection) is None and len(held) == 1)

    def test_lowered_while_messages_wait(self, connection, until):
        """What was claimed under the old limit is handed out under the new one."""
        fill(connection, 8)
        held = []
        with connection.Consumer([Queue("q")], on_message=held.append, prefetch_count=8) as consumer:
            connection.drain_events(timeout=60)
            until(lambda: connection.default_channel.engine.inspect.counts("q").leased == 8)
            consumer.qos(prefetch_count=1)
            held.pop().ack()
            for expected in range(1, 8):
                until(lambda: drain_all(connection) is None and len(held) == 1)
                message = held.pop()
                assert message.payload == expected
                message.ack()

    def test_a_patched_can_consume_is_asked(self, connection, until):
        """Celery's ``worker_disable_prefetch`` replaces it."""
        fill(connection, 3)
        held = []
        allowed = False
        with connection.Consumer([Queue("q")], on_message=held.append, prefetch_count=3):
            connection.default_channel.qos.can_consume = lambda: allowed
            drain_all(connection)
            assert held == []
            allowed = True
            connection.transport.on_room()
            until(lambda: drain_all(connection) is None and len(held) == 3)


class TestSettle:
    def test_unknown_tag(self, channel, caplog):
        channel.basic_ack(10**9)
        channel.basic_reject(10**9)
        channel.basic_reject(10**9, requeue=True)
        assert len(caplog.records) == 3

    def test_recover(self, connection, channel, until):
        fill(connection, 3)
        held = []
        with connection.Consumer([Queue("q")], on_message=held.append):
            until(lambda: drain_all(connection) is None and len(held) == 3)
            channel.basic_recover(requeue=True)
            until(lambda: drain_all(connection) is None and len(held) == 6)
            assert [message.payload for message in held] == [0, 1, 2, 0, 1, 2]
            assert [message.delivery_info["redelivered"] for message in held] == [False] * 3 + [True] * 3
        with pytest.raises(NotImplementedError):
            channel.basic_recover()

    def test_restore_at_close(self, connect, caplog):
        connection = connect()
        fill(connection, 3)
        channel = connection.channel()
        held = [channel.basic_get("q") for _ in range(2)]
        with caplog.at_level("INFO"):
            channel.close()
            channel.close()
        assert "Restoring 2 unacknowledged message(s)" in caplog.text
        counts = connection.default_channel.engine.inspect.counts("q")
        assert (counts.ready, counts.leased) == (3, 0)
        held[0].ack()  # late: nothing happens
        assert connection.default_channel.engine.inspect.counts("q").ready == 3

    def test_close_without_connection(self, connection):
        channel = connection.channel()
        connection.close()
        channel.close()

    def test_acks_are_flushed_in_time(self, connection, until):
        fill(connection, 1)
        held = []
        engine = connection.default_channel.engine
        with connection.Consumer([Queue("q")], on_message=held.append):
            connection.drain_events(timeout=60)
            held[0].ack()
            started = time.monotonic()
            until(lambda: engine.inspect.counts("q").leased == 0)
            assert time.monotonic() - started < 10

    def test_delivery_limit(self, connect):
        connection = connect(delivery_limit=2)
        fill(connection, 1)
        channel = connection.default_channel
        for _ in range(3):
            channel.basic_get("q").requeue()
        assert channel.basic_get("q") is None
        assert channel.basic_get("q.dead").headers["x-death"][0]["reason"] == "delivery_limit"


class TestConsumers:
    def test_two_consumers_of_one_queue_take_turns(self, connection, until):
        received = [[], []]
        channel = connection.default_channel
        consumers = [Consumer(channel, [Queue("q")], on_message=each.append) for each in received]
        for consumer in consumers:
            consumer.consume()
        fill(connection, 10)
        until(lambda: drain_all(connection) is None and sum(map(len, received)) == 10)
        assert list(map(len, received)) == [5, 5]
        consumers[0].cancel()
        before = len(received[1])
        fill(connection, 4)
        until(lambda: drain_all(connection) is None and len(received[1]) == before + 4)
        consumers[1].cancel()

    def test_a_transaction_claims_a_window_at_most(self, connect, monkeypatch):
        connection, received = connect(claim_window=4), list[Any]()
        fill(connection, 10)
        claim, sizes = Claiming.claim, list[int]()

        def claims(claiming, client_session, plan):
            arriving = claiming._dispatch.arriving
            before = len(arriving)
            claim(claiming, client_session, plan)
            sizes.append(len(arriving) - before)

        monkeypatch.setattr(Claiming, "claim", claims)
        # With a prefetch: without one, how many it claims ahead follows the pace of the machine.
        with connection.Consumer([Queue("q")], on_message=received.append, prefetch_count=10):
            while len(received) < 10:
                connection.drain_events(timeout=60)
        assert max(sizes) == 4

    def test_consumer_tag_is_generated(self, channel):
        channel.queue_declare("q")
        tag = channel.basic_consume("q", False, lambda _: None, "")
        assert tag
        channel.basic_cancel(tag)
        channel.basic_cancel(tag)
        channel.basic_cancel("unknown")

    def test_decode_error_leaves_the_consumer_alive(self, connection, until):
        connection.Producer().publish(b"{nonsense", routing_key="q", content_type="application/json")
        connection.Producer().publish(1, routing_key="q")
        errors, received = [], []
        consumer = connection.Consumer([Queue("q")], callbacks=[lambda body, _: received.append(body)])
        consumer.on_decode_error = lambda message, error: errors.append(error)
        with consumer:
            until(lambda: drain_all(connection) is None and received)
        assert len(errors) == 1


class TestCancel:
    def test_hands_back_what_was_not_handed_out(self, connection, until):
        fill(connection, 10)
        held = []
        engine = connection.default_channel.engine
        with connection.Consumer([Queue("q")], on_message=held.append, prefetch_count=10):
            connection.drain_events(timeout=60)
            until(lambda: engine.inspect.counts("q").leased == 10)
        counts = engine.inspect.counts("q")
        assert (counts.ready, counts.leased) == (9, 1)
        held[0].ack()  # as in a worker's warm shutdown, when the pool ends its tasks
        until(lambda: engine.inspect.counts("q").leased == 0)
        assert connection.default_channel.basic_get("q").payload == 1
        assert connection.default_channel.basic_get("q").delivery_info["redelivered"] is False

    def test_from_inside_a_callback(self, connection, until):
        fill(connection, 10)
        engine = connection.default_channel.engine

        def on_message(message):
            message.ack()
            consumer.cancel()

        consumer = connection.Consumer([Queue("q")], on_message=on_message)
        consumer.consume()
        connection.drain_events(timeout=60)
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.05)
        until(lambda: engine.inspect.counts("q").leased == 0)
        assert engine.inspect.counts("q").ready == 9

    def test_consume_again(self, connection, until):
        received = []
        consumer = connection.Consumer([Queue("q")], on_message=lambda message: received.append(message.payload))
        for round_ in range(3):
            consumer.consume()
            connection.Producer().publish(round_, routing_key="q")
            until(lambda round_=round_: connection.drain_events(timeout=60) or round_ in received)
            consumer.cancel()


class TestNoAck:
    def test_an_ack_is_nothing(self, connection, caplog):
        """As with other transports: a callback may be used by both kinds of consumers."""
        fill(connection, 2)
        with connection.Consumer([Queue("q")], on_message=lambda message: message.ack(), no_ack=True):
            connection.drain_events(timeout=60)
            connection.drain_events(timeout=60)
        assert "settled before" not in caplog.text

    def test_not_lost_when_claimed_ahead(self, connection, until):
        fill(connection, 10)
        received = []
        engine = connection.default_channel.engine
        with connection.Consumer([Queue("q")], on_message=received.append, no_ack=True):
            connection.drain_events(timeout=60)
            connection.drain_events(timeout=60)
        until(lambda: engine.inspect.counts("q").leased == 0)
        assert (len(received), engine.inspect.counts("q").ready) == (2, 8)

    def test_prefetch_does_not_count(self, connection, until):
        fill(connection, 10)
        received = []
        with connection.Consumer([Queue("q")], on_message=received.append, no_ack=True, prefetch_count=1):
            until(lambda: drain_all(connection) is None and len(received) == 10)


class TestDrain:
    def test_timeouts(self, connection):
        with connection.Consumer([Queue("q")]):
            for timeout in (0, 0.05):
                started = time.monotonic()
                with pytest.raises(TimeoutError):
                    connection.drain_events(timeout=timeout)
                assert timeout <= time.monotonic() - started < timeout + 10

    def test_no_consumer(self, connection):
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.01)

    def test_none_waits(self, connection, connect):
        received = []
        other = connect()
        with connection.Consumer([Queue("q")], on_message=received.append):
            drain_all(connection)
            timer = threading.Timer(0.1, fill, (other, 1))
            timer.start()
            connection.drain_events()
            timer.join()
        assert len(received) == 1

    def test_zero_finds_what_is_there(self, connection):
        fill(connection, 1)
        received = []
        with connection.Consumer([Queue("q")], on_message=received.append):
            connection.drain_events(timeout=0)
        assert len(received) == 1

    def test_zero_finds_what_is_there_for_room_that_is_kept_waiting(self, connection, monkeypatch):
        """A free place waits as long as an ack for a second one."""
        monkeypatch.setattr(connection_module, "FIRST_LOOK_S", 60.0)
        fill(connection, 3)
        fill(connection, 1, "other")
        received = []
        with connection.Consumer([Queue("q")], on_message=received.append, prefetch_count=4) as consumer:
            while len(received) < 3:
                connection.drain_events(timeout=60)
            consumer.add_queue(Queue("other"))
            consumer.consume()
            connection.drain_events(timeout=0)
        assert len(received) == 4

    def test_wakes_at_once(self, connect, monkeypatch):
        """A message that another process publishes wakes it: it does not look by itself, as it would in an hour."""
        monkeypatch.setattr(wakeups, "CHECK_S", 3600)
        received = []
        producer = connect(ack_delay_ms=2.5).Producer()
        connection = connect(poll_interval=3600, operation_timeout=3600)
        with connection.Consumer([Queue("q")], on_message=lambda message: (received.append(1), message.ack())):
            drain_all(connection)
            for number in range(10):
                producer.publish(number, routing_key="q")
                connection.drain_events(timeout=60)
        assert len(received) == 10


def test_cancel_from_a_signal_handler(connection, until):
    """Celery's cold shutdown cancels in the main thread, wherever a signal has interrupted it."""
    fill(connection, 3)
    engine = connection.default_channel.engine
    consumer = connection.Consumer([Queue("q")], on_message=lambda _: None, prefetch_count=3)
    consumer.consume()
    connection.drain_events(timeout=60)
    until(lambda: engine.inspect.counts("q").leased == 3)
    with connection.transport.receiver.fetcher.dispatch._lock:  # interrupted here
        started = time.monotonic()
        consumer.cancel()
        assert time.monotonic() - started < 5
    until(lambda: engine.inspect.counts("q").ready == 2)
