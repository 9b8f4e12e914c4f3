"""What a forked child does with the messages of its parent: nothing."""

from __future__ import annotations

import contextlib
import os

import pytest
from kombu import Consumer, Producer, Queue

from kombu_fdb.errors import ForkedError


def in_child(action) -> int:
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


@pytest.mark.parametrize("settled_before", [False, True])
@pytest.mark.parametrize(
    "action", ["channel.close", "connection.close", "connection.release", "ack", "reject", "requeue", "recover"]
)
def test_no_child_settles_it(connection, channel, held, action, settled_before):
    if settled_before:
        held.pop().ack()
    actions = {
        "channel.close": channel.close,
        "connection.close": connection.close,
        "connection.release": connection.release,
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
