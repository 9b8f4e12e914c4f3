"""What kombu builds on a transport, as its users do: mixins, broadcasts, mailboxes, ensure, failover, pools."""

import threading
from contextlib import suppress

import pytest
from kombu import Connection, Consumer, Exchange, Queue, pools
from kombu.common import Broadcast, collect_replies, itermessages, uuid
from kombu.mixins import ConsumerMixin, ConsumerProducerMixin
from kombu.pidbox import Mailbox

from kombu_fdb.engine.facade.queues import Queues
from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.process.client import Client

WAIT_S = 60.0


class Stoppable(ConsumerMixin):
    """Runs in a thread until so many messages have come."""

    def __init__(self, connection, queue, number):
        self.connection, self.queue, self.number = connection, queue, number
        self.received = []
        self.consuming = threading.Event()

    def get_consumers(self, Consumer, channel):  # noqa: N803 - kombu's name
        self.receiver = channel.connection.receiver
        return [Consumer([self.queue], callbacks=[self.on_task])]

    def on_consume_ready(self, *args, **kwargs):
        self.consuming.set()

    def lose_connection(self):
        """Its next drain meets an error, as after the store did not answer."""
        self.receiver.fetcher.fail(ConnectionResetError("lost"))

    def on_task(self, body, message):
        self.received.append(body)
        message.ack()
        self.should_stop = len(self.received) >= self.number


def in_thread(mixin):
    thread = threading.Thread(target=mixin.run, daemon=True)
    thread.start()
    assert mixin.consuming.wait(10)
    return thread


def test_consumer_mixin_goes_on_after_a_lost_connection(connect, until):
    mixin = Stoppable(connect(), Queue("tasks"), 2)
    thread = in_thread(mixin)
    producer = connect().Producer()
    producer.publish(1, routing_key="tasks")
    until(lambda: mixin.received == [1])
    mixin.lose_connection()
    producer.publish(2, routing_key="tasks")
    thread.join(20)
    assert mixin.received == [1, 2]


class Server(Stoppable, ConsumerProducerMixin):
    """Answers each message, as kombu's example of an RPC server does."""

    def on_task(self, body, message):
        self.producer.publish(
            {"double": body["n"] * 2},
            routing_key=message.properties["reply_to"],
            correlation_id=message.properties["correlation_id"],
            retry=True,
        )
        super().on_task(body, message)


def test_consumer_producer_mixin_answers(connect):
    server = Server(connect(), Queue("rpc"), 2)
    thread = in_thread(server)
    client = connect()
    answers = Queue(uuid(), exclusive=True, auto_delete=True)
    with Consumer(client, answers, no_ack=True, callbacks=[]) as consumer:
        for number in range(2):
            client.Producer().publish(
                {"n": number}, routing_key="rpc", reply_to=answers.name, correlation_id=str(number)
            )
        got = {}
        consumer.callbacks.append(lambda body, message: got.update({message.properties["correlation_id"]: body}))
        while len(got) < 2:
            client.drain_events(timeout=60)
    assert got == {"0": {"double": 0}, "1": {"double": 2}}
    thread.join(20)
    assert not thread.is_alive()


def test_broadcast_reaches_every_consumer_and_no_later_one(connect):
    news = [Broadcast("news") for _ in range(3)]
    received = [[], [], []]
    listeners = [connect() for _ in news]
    consumers = [
        Consumer(listener, [queue], callbacks=[lambda body, message, into=into: into.append(body)], no_ack=True)
        for listener, queue, into in zip(listeners, news, received, strict=True)
    ]
    for consumer in consumers:
        consumer.consume()
    connect().Producer().publish("extra", exchange="news", routing_key="")
    for listener, into in zip(listeners, received, strict=True):
        while not into:
            listener.drain_events(timeout=60)
    assert received == [["extra"]] * 3
    latecomer = connect()
    with (
        Consumer(latecomer, [Broadcast("news")], callbacks=[lambda *_: pytest.fail("it was before")], no_ack=True),
        pytest.raises(TimeoutError),
    ):
        latecomer.drain_events(timeout=0.05)


def test_a_mailbox_asks_all_and_one(connect, until):
    mailbox = Mailbox("control", type="fanout")
    stop = threading.Event()
    threads = []
    for name in ("a", "b"):
        connection = connect()
        node = mailbox(connection).Node(name, state={"name": name}, channel=connection.default_channel)
        node.handlers["whoami"] = lambda state, **_: state["name"]
        consumer = node.listen()
        threads.append(threading.Thread(target=_drain, args=(connection, stop), daemon=True))
        assert consumer.queues
    for thread in threads:
        thread.start()
    client = mailbox(connect())
    try:
        assert sorted(client.multi_call("whoami", timeout=5, limit=2), key=str) == [{"a": "a"}, {"b": "b"}]
        assert client.call(["b"], "whoami", timeout=5) == [{"b": "b"}]
        assert client.call(["nobody"], "whoami", timeout=0.1) == []
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)


def _drain(connection, stop):
    while not stop.is_set():
        try:
            connection.drain_events(timeout=0.05)
        except TimeoutError:
            continue


def test_collect_replies_and_itermessages(connect):
    connection = connect()
    queue = Queue("answers")
    for number in range(3):
        connection.Producer().publish(number, routing_key="answers", declare=[queue])
    channel = connection.default_channel
    messages = itermessages(connection, channel, queue, limit=1, timeout=10, no_ack=True)
    assert [body for body, _ in messages] == [0], "and what was claimed beyond the limit is not lost"
    assert list(collect_replies(connection, channel, queue, limit=2, timeout=10)) == [1, 2]
    assert channel.engine.inspect.queue("answers") is None, "kombu deletes a reply queue"


# -- connections -------------------------------------------------------------------------------------------------------


def test_pools_of_kombu(url, connect):
    connection = Connection(url, transport_options={"session_ttl": 5.0, "sweep_interval": 0.5})
    try:
        with pools.producers[connection].acquire(block=True) as producer:
            producer.publish("pooled", routing_key="q")
        with pools.connections[connection].acquire(block=True) as pooled:
            message = pooled.SimpleQueue("q").get(timeout=10)
            assert message.payload == "pooled"
            message.ack()
            pooled.close()
    finally:
        pools.reset()
        connection.close()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("underway", [False, True])
def test_a_mailbox_is_opened_again_as_the_store_answers(connect, monkeypatch, underway, fails):
    """The consumer of the lost connection ends then, too: between declare and consume, it took the queue along.

    ``underway``: in another thread, which has begun with it, and may fail. ``fails``: so does another call.
    """
    run_deferred = Client._run_deferred
    for early in ("nudge", "_run_deferred"):  # by the duties thread, which makes the calls once a second, too
        monkeypatch.setattr(Client, early, lambda _client: None)
    lost, found = connect(), connect()
    queue = Queue("one.pidbox", Exchange("pidbox", "fanout"), auto_delete=True)
    lost.Consumer([queue], on_message=print).consume()
    client = found.default_channel.connection.store
    client.suspected = True
    if fails:
        client.later(lambda: 1 // 0)  # another call, which fails for a reason of its own
    lost.close()
    bound = queue(found.default_channel)
    declare = threading.Thread(target=bound.queue_declare)
    if underway:
        begun, go_on, remove = threading.Event(), threading.Event(), Queues.remove_consumer

        def wait(*arguments):
            monkeypatch.setattr(Queues, "remove_consumer", remove)
            begun.set()
            assert go_on.wait(WAIT_S)
            if fails:
                raise StoreUnavailable("not yet")
            remove(*arguments)

        def run():
            with suppress(StoreUnavailable, ZeroDivisionError):
                run_deferred(client)

        monkeypatch.setattr(Queues, "remove_consumer", wait)
        other = threading.Thread(target=run)
        other.start()
        assert begun.wait(WAIT_S)
        declare.start()
        declare.join(0.1)  # without the wait for the other thread, it is through by then
        go_on.set()
        other.join(WAIT_S)
    else:
        declare.start()
    declare.join(WAIT_S)
    with suppress(ZeroDivisionError):
        run_deferred(client)
    bound.queue_bind()
    found.Consumer([bound], on_message=print, auto_declare=False).consume()
