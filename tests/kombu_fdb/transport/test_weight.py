"""How much of our code a message passes: `make bench` measures what it costs, this keeps it from growing unnoticed."""

import math
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from kombu import Queue

import kombu_fdb
from kombu_fdb.transport.batch import KOMBU_HAS_BATCHES
from kombu_fdb.transport.consuming import receiver

ROOT = f"{Path(kombu_fdb.__file__).parent}{os.sep}"
HEADERS = {"id": "1", "task": "shop.pay", "lang": "py", "argsrepr": "()", "kwargsrepr": "{}", "retries": 0, "eta": None}
#: Calls into our functions, and files that these stand in. A change that passes fewer lowers them. How many a consumed
#: message passes depends a little on which thread claims it, so of that it is the most.
PUBLISHED, CONSUMED = (54, 14), (86, 30)
#: As many as one claim takes.
WINDOW = 8
ROUNDS = 25


@pytest.fixture
def url(tmp_path):
    return f"fdb+sqlite:///{tmp_path}/b.db"


def passed(act):
    """In this thread."""
    calls = Counter()

    def count(frame, event, _argument):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            calls[frame.f_code.co_filename] += 1

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls.total(), len(calls)


@pytest.fixture
def producer(connection):
    connection.default_channel.queue_declare("q")
    return connection.Producer()


def publish(producer, **headers):
    producer.publish([[], {}, {}], routing_key="q", headers={**HEADERS, **headers}, correlation_id="1")


def test_what_a_published_task_passes(producer):
    publish(producer)
    # Once a second the totals are stored, and the queue's declaration is read again.
    calls, files = PUBLISHED
    more = not KOMBU_HAS_BATCHES  # then the channel looks for a batch
    assert min(passed(lambda: publish(producer)) for _ in range(5)) == (calls + more, files + more)


def test_a_large_number_in_a_header_passes_no_more(producer):
    """Its message was encoded twice."""

    def least(number):
        return min(passed(lambda: publish(producer, order=number)) for _ in range(5))

    assert least(-(2**63)) == least(4_294_967_296) == least(1)


def test_what_a_consumed_task_passes(connection, producer, monkeypatch):
    """Delivered and acknowledged, by the thread that drains, which claims it, too."""
    monkeypatch.setattr(receiver, "SLOW_S", math.inf)  # else a drain on a busy machine leaves it to another thread
    left = 0
    for _ in range((2 + ROUNDS) * WINDOW):
        publish(producer)

    def receive(message):
        nonlocal left
        message.ack()
        left -= 1

    def drain():
        nonlocal left
        left = WINDOW
        while left:
            connection.drain_events(timeout=10)

    with connection.Consumer(Queue("q"), on_message=receive, prefetch_count=WINDOW, auto_declare=False):
        drain(), drain()
        # A few of them are claimed by the thread that waits when none comes, or end with what is done once a second.
        found = [passed(drain) for _ in range(ROUNDS)]
    # Some of them are claimed by the thread that waits when none comes.
    calls, files = min(each for each in found if each[1] > CONSUMED[1] // 2)
    assert calls // WINDOW <= CONSUMED[0]
    assert files <= CONSUMED[1]
