"""What kombu's own integration suite (t/integration/common.py) asks of every broker, over our stores."""

import copy
import pickle
import threading
import time

import pytest
from kombu import Exchange, Producer, Queue


def publish_all(channel, exchange, *bodies, **options):
    producer = Producer(channel, auto_declare=False)
    for body in bodies:
        producer.publish(body, exchange=exchange, **options)


def bodies_of(channel, *queues):
    """Take everything."""
    found = []
    for queue in queues:
        while (message := queue(channel).get(no_ack=True)) is not None:
            found.append(message.payload)
    return found


class TestBasic:
    def test_publish_consume(self, connection, drain):
        queue, received = Queue("q"), []

        def callback(body, message):
            received.append((body, message.content_type, message.content_encoding, message.headers))
            message.ack()

        connection.Producer().publish(
            {"hello": "world"}, routing_key="q", declare=[queue], headers={"k": "v", "n": 1, "none": None}
        )
        with connection.Consumer([queue], callbacks=[callback], accept=["json"]):
            drain(connection, received, 1)
        assert received == [({"hello": "world"}, "application/json", "utf-8", {"k": "v", "n": 1, "none": None})]

    @pytest.mark.parametrize(
        ("body", "options", "expected"),
        [
            ("text ünd mehr", {"content_type": "text/plain", "content_encoding": "utf-8"}, "text ünd mehr"),
            (b"\x00\xff raw", {"content_type": "application/data", "content_encoding": "binary"}, b"\x00\xff raw"),
            (b"", {"content_type": "application/data", "content_encoding": "binary"}, b""),
            (memoryview(b"view"), {"content_type": "application/data", "content_encoding": "binary"}, b"view"),
            ({"a": [1, None]}, {"compression": "gzip"}, {"a": [1, None]}),
            ({"a": (1, 2)}, {"serializer": "pickle"}, {"a": (1, 2)}),
            ("x" * 300_000, {"serializer": "json"}, "x" * 300_000),
        ],
        ids=["str", "bytes", "empty", "memoryview", "compressed", "pickle", "large"],
    )
    def test_bodies(self, connection, body, options, expected):
        connection.Producer().publish(body, routing_key="q", **options)
        message = Queue("q")(connection.default_channel).get(
            accept=["pickle", "json", "application/data", "text/plain"]
        )
        assert message.decode() == expected
        message.ack()

    def test_simple_queue(self, connection):
        with connection.SimpleQueue("simple") as queue:
            queue.put({"n": 1}, headers={"k": "v"})
            queue.put({"n": 2})
            assert queue.qsize() == 2
            message = queue.get(timeout=5)
            assert (message.payload, message.headers["k"]) == ({"n": 1}, "v")
            message.ack()
            second = queue.get(timeout=5)
            second.ack()
            with pytest.raises(queue.Empty):
                queue.get(block=False)
            with pytest.raises(queue.Empty):
                queue.get(timeout=0.05)
            queue.put({"n": 3})
            until_ready = queue.get(timeout=5)
            until_ready.requeue()
            assert queue.get(timeout=5).payload == {"n": 3}


class TestExchanges:
    def test_one_connection_consumes_two_queues_of_a_topic(self, connection, drain):
        """The base class gives both copies one delivery tag, and loses one of them."""
        exchange = Exchange("t", "topic")
        queues = [Queue(name, exchange, routing_key="#") for name in ("a", "b")]
        messages = []
        with connection.Consumer(queues, on_message=messages.append):
            publish_all(connection.default_channel, exchange, 1, routing_key="k")
            drain(connection, messages, 2)
            assert len({message.delivery_tag for message in messages}) == 2
            for message in messages:
                message.ack()
        assert bodies_of(connection.default_channel, *queues) == []


class TestTimeToLive:
    def test_message_ttl(self, connection, until):
        channel = connection.default_channel
        publish_all(channel, "", "short", routing_key="q", expiration=0.05)
        publish_all(channel, "", "limited", routing_key="q", expiration=0.05, headers={"x-ttr": 60_000})
        publish_all(channel, "", "long", routing_key="q", expiration=60)
        until(lambda: time.time() > started + 0.06) if (started := time.time()) else None
        assert bodies_of(channel, Queue("q")) == ["long"]


class TestPriority:
    def test_redis_order(self, connect):
        channel = connect(priority_order="redis").default_channel
        for priority in (9, 0, 5):
            publish_all(channel, "", priority, routing_key="q", priority=priority)
        assert bodies_of(channel, Queue("q")) == [0, 5, 9]


class TestMessages:
    def get(self, connection):
        return Queue("q")(connection.default_channel).get()

    def test_requeue(self, connection):
        for number in (1, 2):
            connection.Producer().publish(number, routing_key="q")
        first = self.get(connection)
        assert not first.delivery_info["redelivered"]
        first.requeue()
        again = self.get(connection)
        assert again.payload == 1, "back at its place"
        assert again.delivery_info["redelivered"]
        assert again.delivery_tag != first.delivery_tag
        assert again.headers["x-delivery-count"] == 1

    def test_ack_multiple(self, connection):
        for number in range(3):
            connection.Producer().publish(number, routing_key="q")
        messages = [self.get(connection) for _ in range(3)]
        messages[1].ack(multiple=True)
        assert len(connection.default_channel.qos) == 1
        connection.default_channel.basic_recover(requeue=True)
        again = self.get(connection)
        assert again.payload == 2
        assert self.get(connection) is None
        connection.default_channel.basic_ack(0, multiple=True)
        assert len(connection.default_channel.qos) == 0


class TestConnections:
    def test_clone_copy_and_pickle(self, connection):
        connection.Producer().publish("x", routing_key="q")
        for number, again in enumerate(
            (connection.clone(), copy.copy(connection), pickle.loads(pickle.dumps(connection)))
        ):
            with again:
                message = Queue("q")(again.default_channel).get()
                assert message.payload == ("x" if number == 0 else number - 1)
                message.ack()
                again.Producer().publish(number, routing_key="q")

    def test_publish_from_many_threads(self, connection):
        channel = connection.default_channel

        def publish(thread):
            for number in range(20):
                Producer(channel, auto_declare=False).publish([thread, number], routing_key="q")

        threads = [threading.Thread(target=publish, args=(thread,)) for thread in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = bodies_of(channel, Queue("q"))
        assert sorted(found) == [[thread, number] for thread in range(5) for number in range(20)]
        for thread_number in range(5):
            assert [body for body in found if body[0] == thread_number] == sorted(
                body for body in found if body[0] == thread_number
            )
