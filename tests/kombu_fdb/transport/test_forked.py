"""What a forked child does with the messages of its parent, which is nothing, and with what it has counted itself."""

import contextlib
import os

import pytest
from celery.signals import worker_process_shutdown
from kombu import Connection, Consumer, Producer, Queue

from kombu_fdb import Broker
from kombu_fdb.errors import ForkedError


def in_child(action):
    """Its exit status: 0 if it did it, or heard that it must not."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with contextlib.suppress(ForkedError):
                action()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def held(connection, channel):
    queue, kept = Queue("q"), []
    queue(channel).declare()
    for number in range(3):
        Producer(channel).publish(number, routing_key="q")
    with Consumer(channel, [queue], callbacks=[lambda _body, message: kept.append(message)]):
        while len(kept) < 3:
            connection.drain_events(timeout=30)
        yield kept


@pytest.mark.parametrize(
    ("action", "settled_before"),
    [
        *((action, False) for action in ("channel.close", "connection.close", "connection.collect")),
        *((action, False) for action in ("ack", "reject", "requeue", "recover")),
        *((action, True) for action in ("channel.close", "ack", "recover")),
    ],
)
def test_no_child_settles_it(connection, channel, held, action, settled_before):
    if settled_before:
        held.pop().ack()
    actions = {
        "channel.close": channel.close,
        "connection.close": connection.close,
        "connection.collect": connection.collect,
        "ack": held[0].ack,
        "reject": held[0].reject,
        "requeue": held[0].requeue,
        "recover": lambda: channel.basic_recover(requeue=True),
    }
    assert in_child(actions[action]) == 0
    counts = channel.engine.inspect.counts("q")
    assert counts.ready == 0
    assert counts.leased >= len(held)
    assert not channel.engine.inspect.peek("q.dead", 1)


def test_what_a_child_of_a_pool_has_published_is_counted_when_it_ends(tmp_path):
    url = f"fdb+sqlite:///{tmp_path}/broker.db"

    def work():
        kept = Connection(url).channel()
        Producer(kept).publish("x", routing_key="q")
        worker_process_shutdown.send(sender=None, pid=os.getpid(), exitcode=0)  # the pool goes on with os._exit

    assert in_child(work) == 0
    with Broker.open(url) as broker:
        assert broker.inspect.totals()["q"] == {"published": 1}
