"""``Producer.batch()`` (research/interfaces.md A8)."""

from functools import partial
from threading import Thread

import pytest
from amqp.exceptions import PreconditionFailed
from kombu import Connection, Exchange, Producer, Queue
from kombu.transport.virtual.base import UndeliverableWarning

from kombu_fdb.engine.messages.publish import BATCH_BYTES, split_batch
from kombu_fdb.errors import CommitUnknown, OptionError
from kombu_fdb.transport import BatchPublishError, Transport, batched
from kombu_fdb.transport import batch as batch_module
from kombu_fdb.transport.batch import (
    DEFAULT_BATCH_SIZE,
    KOMBU_HAS_BATCHES,
    BatchKeepingChannel,
    batched_atomically,
    batched_into,
)

KEEPERS = ["producer", "channel"] if KOMBU_HAS_BATCHES else ["channel"]


@pytest.fixture(autouse=True, params=KEEPERS)
def batches(request, monkeypatch):
    """Who keeps them: kombu's producer, since 5.7, or our channel for an older kombu."""
    if request.param == "channel":
        monkeypatch.delattr(Producer, "batch", raising=False)
        monkeypatch.setattr(Transport, "Channel", BatchKeepingChannel)
    return request.param


@pytest.fixture
def producer(connection):
    return connection.Producer(auto_declare=False)


def size(producer, queue="q"):
    return int(producer.channel._size(queue))


def test_supported(producer, batches):
    if batches == "channel":
        assert isinstance(producer.channel, BatchKeepingChannel)
        return
    assert producer.supports_batch_publish
    assert producer.channel
    assert producer.supports_batch_publish


def test_all_at_once_at_the_end(producer):
    with batched(producer):
        for number in range(10):
            producer.publish(number, routing_key="q")
        assert size(producer) == 0
    assert size(producer) == 10
    assert [producer.channel.basic_get("q").payload for _ in range(10)] == list(range(10))


def test_one_transaction(producer, monkeypatch):
    calls = []
    engine = producer.channel.engine
    publish = engine.publisher.publish
    monkeypatch.setattr(
        engine.publisher, "publish", lambda messages, **_: (calls.append(len(messages)), publish(messages))[1]
    )
    with batched(producer):
        for number in range(100):
            producer.publish(number, routing_key="q")
    assert calls == [100]


def test_max_size_counts_copies(connection, producer):
    exchange = Exchange("f", "fanout")
    for name in ("a", "b"):
        Queue(name, exchange)(connection.default_channel).declare()
    with batched(producer, max_size=4):
        for number in range(3):
            producer.publish(number, exchange="f")
        assert size(producer, "a") == 2
        producer.publish(3, exchange="f")
        assert size(producer, "a") == 4


def test_flush(producer):
    with batched(producer) as batch:
        producer.publish(1, routing_key="q")
        batch.flush()
        assert size(producer) == 1
        batch.flush()


def test_nested_contexts_share_the_outermost(producer):
    with batched(producer):
        with batched(producer, max_size=1):
            producer.publish(1, routing_key="q")
        assert size(producer) == 0
    assert size(producer) == 1


def test_exception_discards(producer):
    with pytest.raises(ZeroDivisionError), batched(producer):
        producer.publish(1, routing_key="q")
        raise ZeroDivisionError
    assert size(producer) == 0
    producer.publish(2, routing_key="q")
    assert size(producer) == 1


def test_an_exception_in_a_nested_context_discards_all(producer):
    with batched(producer):
        producer.publish(1, routing_key="q")
        with pytest.raises(ZeroDivisionError), batched(producer):
            raise ZeroDivisionError
        with pytest.raises(RuntimeError, match="aborted"):
            producer.publish(2, routing_key="q")
    assert size(producer) == 0


def test_other_threads_publish_at_once(producer):
    with batched(producer):
        other = Thread(target=lambda: producer.publish(1, routing_key="q"))
        other.start()
        other.join()
        assert size(producer) == 1


def test_a_batch_that_a_thread_left_open_is_no_later_threads(producer):
    """A later thread may have the number of one that has ended: its messages were never stored."""
    left = batched(producer)

    def publish():
        producer.publish(1, routing_key="q")

    for act in (left.__enter__, *[publish] * 20):
        thread = Thread(target=act)
        thread.start()
        thread.join()
    assert size(producer) == 20


def test_a_kind_of_batch_is_its_threads(producer, monkeypatch):
    monkeypatch.setattr(batch_module, "split_batch", partial(split_batch, most=(2, BATCH_BYTES)))

    def publish(number):
        with batched(producer):
            for each in range(number):
                producer.publish(each, routing_key="q")

    with batched_atomically(producer):
        other = Thread(target=publish, args=(5,))
        other.start()
        other.join()
        assert size(producer) == 5
        publish(2)
    assert size(producer) == 7


def test_a_batch_of_another_kind_does_not_take_the_messages(producer):
    """They were part of the outer one: stored though a transaction was dropped, or in several, though atomic."""
    for is_begun in (False, True):
        with batched(producer):
            if is_begun:
                producer.publish(1, routing_key="q")
            for inner in (batched_atomically(producer), batched_into(producer, object())):
                with pytest.raises(OptionError, match="producer of another"), inner:
                    producer.publish(2, routing_key="q")
            producer.publish(3, routing_key="q")
    assert [producer.channel.basic_get("q").payload for _ in range(size(producer))] == [3, 1, 3]


def test_a_kind_of_batch_is_its_producers(connection, producer, batches):
    """A channel's other producers made batches of the same kind, and ended it before this one had made its own."""
    if batches == "channel":
        pytest.skip("before kombu 5.7 a batch takes what all producers of its channel publish")
    other = connection.Producer(auto_declare=False)
    with batched_atomically(producer):
        with batched(other, max_size=2):
            other.publish(1, routing_key="q")
            other.publish(2, routing_key="q")
            assert size(other) == 2
        with batched_atomically(other):
            other.publish(3, routing_key="q")
        producer.publish(4, routing_key="q")
        for _ in range(DEFAULT_BATCH_SIZE):
            producer.publish(5, routing_key="q")
        assert size(producer) == 3
    assert size(producer) == DEFAULT_BATCH_SIZE + 4


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_vanished_exchange_is_declared_with_the_next_message(producer, when):
    def publish():
        queue, policy = Queue("q", Exchange("e"), "k"), {"max_retries": 1}
        producer.publish(1, "k", exchange="e", declare=[queue], retry=True, retry_policy=policy)

    publish()
    if when == "meanwhile":
        with pytest.raises(BatchPublishError, match="no such exchange"), batched(producer):
            publish()
            producer.channel.exchange_delete("e")
    else:
        producer.channel.exchange_delete("e")
    with batched(producer):
        publish()
    assert size(producer) == 2


def test_what_reaches_no_queue_goes_where_it_is_said(connect):
    connection = connect(deadletter_queue="lost")
    connection.default_channel.exchange_declare("e", "direct")
    producer = connection.Producer(auto_declare=False)
    with pytest.warns(UndeliverableWarning), batched(producer):
        producer.publish(1, exchange="e", routing_key="nowhere")
    assert size(producer, "lost") == 1


def test_a_broker_without_batches_publishes_at_once(batches):
    with Connection("memory://") as connection:
        channel = connection.default_channel
        Queue("q")(channel).declare()
        channel._purge("q")
        with batched(connection.Producer(auto_declare=False)) as batch:
            connection.Producer(auto_declare=False).publish(1, routing_key="q")
            assert channel._size("q") == 1
            assert batch is None or batches == "producer"


def test_an_exchange_that_vanishes_before_the_flush_is_declared_again(producer):
    queue = Queue("q", Exchange("e"), "k")
    with pytest.raises(BatchPublishError), batched(producer):
        producer.publish(1, exchange="e", routing_key="k", declare=[queue])
        producer.channel.exchange_delete("e")
    producer.publish(2, exchange="e", routing_key="k", declare=[queue])
    assert size(producer) == 1


def test_large_batches(producer):
    with batched(producer, max_size=100):
        for _ in range(20):
            producer.publish("x" * 1_000_000, routing_key="q")
    assert size(producer) == 20


def test_too_large_a_message_spoils_nothing(connect):
    producer = connect(max_message_size=5000).Producer(auto_declare=False)
    with batched(producer):
        producer.publish(1, routing_key="q")
        with pytest.raises(PreconditionFailed):
            producer.publish("x" * 6000, routing_key="q")
        producer.publish(2, routing_key="q")
    assert size(producer) == 2


def test_failure_is_uncertain_and_final(producer, monkeypatch):
    engine = producer.channel.engine

    def fail(*_, **__):
        raise CommitUnknown(in_flight=True)

    with pytest.raises(BatchPublishError), batched(producer) as batch:
        producer.publish(1, routing_key="q")
        with monkeypatch.context() as patch:
            patch.setattr(engine.publisher, "publish", fail)
            with pytest.raises(BatchPublishError) as caught:
                batch.flush()
            assert isinstance(caught.value.__cause__, CommitUnknown)
        producer.publish(2, routing_key="q")
    assert size(producer) == 0


def test_unroutable(connection):
    returned = []
    connection.default_channel.exchange_declare("e", "direct")
    producer = connection.Producer(auto_declare=False, on_return=lambda *arguments: returned.append(arguments))
    with batched(producer):
        producer.publish(1, exchange="e", routing_key="nowhere", mandatory=True)
        producer.publish(2, routing_key="q")
        assert returned == []
    assert len(returned) == 1
    assert size(producer) == 1
