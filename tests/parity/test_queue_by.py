"""queue-by: what of its documented examples the conformance suites do not ask for, step by step."""

from __future__ import annotations

import json

import pytest

from kombu_fdb.errors import CapacityExceeded


class QueueBy:
    """The seed's interface: called with an item it adds it, called without one it returns the next."""

    def __init__(self, queue, key_function=lambda item: item["name"]) -> None:
        self.queue = queue
        self.key_function = key_function

    def __call__(self, item=None):
        if item is not None:
            return self.queue.put(json.dumps(item), key=self.key_function(item) or "")
        job = self.queue.take(0)
        if job is None:
            return None
        job.ack()
        return json.loads(job.payload)

    def push(self, name, data):
        self({"name": name, "data": data})

    def pull(self):
        item = self()
        return item and (item["name"], item["data"])

    def deref(self):
        """The snapshot, and the queues by key: the seed's notation."""
        snapshot, queues = self.queue.snapshot()
        shown = {key: [json.loads(each.payload)["data"] for each in items] for key, items in queues.items()}
        return [(each.key, json.loads(each.payload)["data"]) for each in snapshot], shown


@pytest.fixture
def queue(broker):
    return QueueBy(broker.queue("q"))


def test_third_example_with_its_internal_states(queue):
    queue.push("alice", 1)
    assert queue.deref() == ([], {"alice": [1]})
    queue.push("bob", "x")
    assert queue.deref() == ([], {"alice": [1], "bob": ["x"]})
    queue.push("alice", 2)
    assert queue.deref() == ([], {"alice": [1, 2], "bob": ["x"]})
    assert queue.pull() == ("alice", 1)
    assert queue.deref() == ([("bob", "x")], {"alice": [2]})
    queue.push("alice", 3)
    assert queue.deref() == ([("bob", "x")], {"alice": [2, 3]})
    queue.push("alice", 4)
    assert queue.deref() == ([("bob", "x")], {"alice": [2, 3, 4]})
    assert queue.pull() == ("bob", "x")
    assert queue.deref() == ([], {"alice": [2, 3, 4]})
    queue.push("bob", "y")
    assert queue.deref() == ([], {"alice": [2, 3, 4], "bob": ["y"]})
    assert queue.pull() == ("alice", 2)
    assert queue.deref() == ([("bob", "y")], {"alice": [3, 4]})
    assert queue.pull() == ("bob", "y")
    assert queue.deref() == ([], {"alice": [3, 4]})
    assert queue.pull() == ("alice", 3)
    assert queue.deref() == ([], {"alice": [4]})
    assert queue.pull() == ("alice", 4)
    assert queue.deref() == ([], {})


def test_peek_shows_the_order_of_the_pulls(queue):
    for name, data in [("alice", 1), ("alice", 2), ("alice", 3), ("bob", "x"), ("", "nil"), ("carol", 9)]:
        queue.push(name, data)
    queue.pull()
    foreseen = [(each.key, json.loads(each.payload)["data"]) for each in queue.queue.peek(100)]
    assert foreseen == [queue.pull() for _ in range(5)]


def test_max_size(broker):
    """The seed's ``(queue-by :id 1)``; the error carries the item and the current size."""
    queue = QueueBy(
        broker.declare("q", arguments={"x-max-length": 1, "x-overflow": "reject-publish"}), lambda item: str(item["id"])
    )
    queue({"id": 1})
    with pytest.raises(CapacityExceeded) as caught:
        queue({"id": 2})
    assert (json.loads(caught.value.item), caught.value.current_size, caught.value.capacity) == ({"id": 2}, 1, 1)
    assert "id" not in str(caught.value), "payloads stay out of logs"
    assert queue() == {"id": 1}
    queue({"id": 2})
    assert queue() == {"id": 2}
