"""One exception out of a signal handler, at each line of an ack or of a bell: nothing is stuck, no thread sleeps on."""

from kit.interruption import interrupt
from kombu import Connection, Consumer, Queue

from kombu_fdb import Broker
from kombu_fdb.primitives import wakeup
from kombu_fdb.primitives.clock import random_id
from kombu_fdb.primitives.wakeup import Bell
from kombu_fdb.process import client
from kombu_fdb.testing.stores import MemoryStores
from kombu_fdb.transport import channel, unacked
from kombu_fdb.transport.consuming import dispatch

MOST_STEPS = 400


def test_an_ack_of_kombu_that_is_interrupted_anywhere_loses_no_message():
    files = {str(each.__file__) for each in (channel, client, unacked, dispatch)}
    with MemoryStores():
        url = f"fdb+memory://{random_id().hex()}"
        with Broker.open(url) as broker, Connection(url) as connection:
            for step in range(1, MOST_STEPS):
                queue = broker.queue(f"q{step}")
                with connection.SimpleQueue(queue.name) as simple:
                    simple.put("x")
                messages = []
                with Connection(url) as own, own.channel() as mine:
                    consumer = Consumer(mine, [Queue(queue.name)], on_message=messages.append)
                    consumer.consume()
                    own.drain_events(timeout=60)
                    more = interrupt(messages[0].ack, step, files)
                assert queue.stats().leased == 0, f"stuck after step {step}"
                if not more:
                    break
    assert step > 10


def test_a_bell_that_is_interrupted_anywhere_still_wakes():
    for rung in (False, True):
        for step in range(1, MOST_STEPS):
            bell = Bell()
            if rung:
                bell.ring()
            more = interrupt(bell.clear if rung else bell.ring, step, {str(wakeup.__file__)})
            bell.ring()
            assert wakeup.readable(0, bell.fileno()), f"asleep after step {step}, rung: {rung}"
            bell.clear()
            assert not wakeup.readable(0, bell.fileno()), f"awake after step {step}, rung: {rung}"
            bell.close()
            if not more:
                break
        assert step > 2


def test_connections_that_only_publish_and_are_forgotten_leave_nothing():
    with MemoryStores():
        url = f"fdb+memory://{random_id().hex()}"
        with Broker.open(url) as broker:
            connection = Connection(url)
            connection.Producer().publish("x", routing_key="q")
            assert connection.transport.store is broker._client
            del connection
            assert not broker._client.deferred_calls
