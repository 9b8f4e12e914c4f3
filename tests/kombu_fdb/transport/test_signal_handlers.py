"""A signal handler that uses the broker while its own thread is inside it: it works, or is refused, and nothing hangs.

A trace function stands for the handler: it runs where Python would run one, between two lines of the same thread.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from kombu import Consumer, Queue

import kombu_fdb
from kombu_fdb.engine.metrics import totals
from kombu_fdb.errors import StoreError

ROOT = f"{Path(kombu_fdb.__file__).parent}{os.sep}"
DEADLINE_S = 60.0
#: A handler that waited for its own thread would do so for longer than the test.
PATIENCE = {"operation_timeout": 3600.0}


class Handler:
    """Calls ``act`` at each line of the broker's that a call passes, and keeps what became of it."""

    def __init__(self, act):
        self._act = act
        self.done = 0
        self.refused = []
        self.at = ""

    def run(self, call):
        failures = []

        def traced():
            sys.settrace(self._enter)
            try:
                call()
            except BaseException as error:
                failures.append(error)
            finally:
                sys.settrace(None)

        thread = threading.Thread(target=traced, daemon=True)
        thread.start()
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), f"it hangs after a handler at {self.at}"
        if failures:
            raise failures[0]

    def _enter(self, frame, _event, _argument):
        return self._strike if frame.f_code.co_filename.startswith(ROOT) else None

    def _strike(self, frame, event, _argument):
        if event == "line":
            self.at = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
            try:
                self._act()
                self.done += 1
            except StoreError as error:
                self.refused.append(error)
        return self._strike


@pytest.fixture
def url(tmp_path):
    return f"fdb+sqlite:///{tmp_path}/b.db"


@pytest.fixture
def connection(connect):
    return connect(**PATIENCE)


@pytest.fixture(autouse=True)
def totals_are_due(monkeypatch):
    """At each transaction, not once a second."""
    monkeypatch.setattr(totals, "INTERVAL_S", 0.0)


def depth(connection, queue):
    return connection.default_channel.queue_declare(queue, passive=True).message_count


def publisher(connection, queue):
    producer = connection.Producer()
    connection.default_channel.queue_declare(queue)
    return lambda: producer.publish("x", routing_key=queue, headers={"fair_key": "a"})


def check(handler, least):
    assert handler.done > least
    assert all("would wait for itself" in str(each) for each in handler.refused)


def test_one_that_publishes_while_a_publish_runs(connection):
    outer, handler = publisher(connection, "q"), Handler(publisher(connection, "from-handler"))
    outer()
    handler.run(outer)
    check(handler, 100)
    assert handler.refused  # between taking the right to write and giving it back
    assert depth(connection, "q") == 2
    assert depth(connection, "from-handler") == handler.done


@pytest.mark.parametrize("connection_of_its_own", [False, True])
def test_one_that_publishes_while_messages_are_consumed(connect, connection, connection_of_its_own):
    outer = publisher(connection, "q")
    for _ in range(3):
        outer()
    got = []

    def receive(body, message):
        message.ack()
        got.append(body)

    handler = Handler(publisher(connect(**PATIENCE) if connection_of_its_own else connection, "from-handler"))
    with Consumer(connection, [Queue("q")], callbacks=[receive], auto_declare=False):
        handler.run(lambda: [connection.drain_events(timeout=DEADLINE_S) for _ in range(3)])
    check(handler, 100)
    assert got == ["x"] * 3
    connection.transport.store.flush_acks()
    assert depth(connection, "q") == 0
    assert depth(connection, "from-handler") == handler.done


def test_one_that_drains_while_its_thread_drains(connection):
    """It gets messages, or is refused; each message is delivered once."""
    outer, got = publisher(connection, "q"), list[Any]()
    for _ in range(200):
        outer()

    def receive(_body, message):
        got.append(message.delivery_tag)
        message.ack()

    def drain():
        connection.drain_events(timeout=DEADLINE_S)

    handler = Handler(lambda: drain() if len(got) < 150 else None)
    with Consumer(connection, [Queue("q")], callbacks=[receive], auto_declare=False, prefetch_count=4):
        handler.run(drain)
        check(handler, 100)
        while len(got) < 200:
            drain()
    assert len(set(got)) == 200
