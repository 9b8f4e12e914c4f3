"""Where the fairness key of a message comes from, and what it does for a tenant in Celery's terms."""

import logging
import pickle
from pathlib import Path

import pytest
from kombu import Connection, Consumer, Producer, Queue
from kombu.serialization import disable_insecure_serializers, enable_insecure_serializers

from kombu_fdb.errors import InvalidArgument
from kombu_fdb.transport import batched
from kombu_fdb.transport.fairkey import key_reader


def by_customer(task, args, kwargs, headers):
    return kwargs.get("customer") or (args[0] if task == "shop.order" else None)


def failing(*_):
    raise RuntimeError("a bug")


def task(*args, **kwargs):
    return {"headers": {"task": "shop.order"}, "properties": {}, "body": [list(args), kwargs, {}], "content-type": None}


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ({}, ""),
        ({"headers": {"fair_key": "acme"}}, "acme"),
        ({"headers": {"fair_key": ""}, "properties": {"MessageGroupId": "g"}}, ""),
        ({"properties": {"MessageGroupId": "g"}}, "g"),
        ({"headers": {"MessageGroupId": "g"}}, "g"),
    ],
)
def test_explicit_keys(message, key):
    assert key_reader(None)(message) == key


def test_another_header():
    read = key_reader("tenant")
    assert read({"headers": {"tenant": "acme"}}) == "acme"
    assert read({"headers": {"tenant": "acme", "fair_key": "other"}}) == "other"
    assert read({"headers": {}}) == ""
    assert read({"headers": {"tenant": 7}}) == "7"
    with pytest.raises(InvalidArgument, match="tenant"):
        read({"headers": {"tenant": [7]}})


def test_a_function_of_the_task():
    read = key_reader(f"{__name__}:by_customer")
    assert read(task(1, customer="acme")) == "acme"
    assert read(task("first")) == "first"
    body = '[[], {"customer": "acme"}, {}]'
    encoded = {**task(), "body": body, "content-type": "application/json", "content-encoding": "utf-8"}
    assert read(encoded) == "acme"


def test_a_function_that_fails_does_not_stop_the_publish(caplog):
    with caplog.at_level(logging.ERROR):
        assert key_reader(f"{__name__}:failing")(task(1)) == ""
    assert "without a key" in caplog.text


class Trap:
    """Leaves a mark where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize(
    "kind", ["application/x-python-serialize", "pickle", "application/x-yaml", "application/x-bad"]
)
@pytest.mark.parametrize("compression", [None, "application/x-gzip"])
def test_a_forwarder_decodes_nothing_but_json(tmp_path, kind, compression, caplog):
    """Whatever the process has enabled for bodies of its own: it republishes what others made."""
    sprung = tmp_path / "sprung"
    yaml = f"!!python/object/apply:os.mkdir [{sprung}]".encode()
    body = yaml if "yaml" in kind else pickle.dumps(([Trap(sprung)], {"customer": "acme"}, {}))
    message = {**task(), "body": body, "content-type": kind, "content-encoding": "binary"}
    message["headers"] = {"task": "shop.order", "compression": compression}
    read = key_reader(f"{__name__}:by_customer")
    enable_insecure_serializers()
    try:
        assert [read(message), read(message)] == ["", ""]
        assert read({**message, "headers": {**message["headers"], "fair_key": "acme"}}) == "acme"
    finally:
        disable_insecure_serializers()
    assert not sprung.exists()
    assert "failed" not in caplog.text


def test_a_pickled_task_is_forwarded_through_a_connection(tmp_path):
    options = {"fair_key": f"{__name__}:by_customer"}
    url = f"fdb+sqlite:///{tmp_path}/broker.db"
    with Connection(url, transport_options=options) as connection:
        producer = connection.Producer(serializer=None)
        queue = Queue("jobs")(connection)
        queue.declare()
        body = pickle.dumps(([Trap(tmp_path / "sprung")], {}, {}))
        headers = {"task": "shop.order"}
        kind = "application/x-python-serialize"
        producer.publish(body, "jobs", headers=headers, content_type=kind, content_encoding="binary")
        received = queue.get()
        producer.publish(
            received.body, "jobs", headers=headers, content_type=received.content_type, content_encoding="binary"
        )
        assert queue.get().body == body
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("option", ["no.such.module:key", f"{__name__}:nothing", f"{__name__}:pytestmark_"])
def test_a_function_that_is_not_there(option):
    with pytest.raises(InvalidArgument, match=r"package\.module:function"):
        key_reader(option)


def test_a_noisy_tenant_delays_a_quiet_one_by_one_turn(tmp_path):
    """Through kombu: 300 messages of one key, then one of another, which comes second."""
    with Connection(f"fdb+sqlite:///{tmp_path}/broker.db") as connection:
        channel = connection.channel()
        queue = Queue("jobs")(channel)
        queue.declare()
        producer = Producer(channel)
        with batched(producer):
            for number in range(300):
                producer.publish(number, routing_key="jobs", headers={"fair_key": "noisy"})
        producer.publish("quiet", routing_key="jobs", headers={"fair_key": "quiet"})
        seen = []

        def on_message(message):
            seen.append(message.payload)
            message.ack()

        with Consumer(channel, [queue], on_message=on_message):
            while len(seen) < 3:
                connection.drain_events(timeout=60)
        queue.delete()
    assert "quiet" in seen[:2]


def test_a_function_in_the_transport_options(tmp_path):
    options = {"fair_key": "no.such.module:key"}
    with (
        pytest.raises(InvalidArgument),
        Connection(f"fdb+sqlite:///{tmp_path}/b.db", transport_options=options) as broken,
    ):
        broken.connect()
