"""Where the fairness key of a message comes from, and what it does for a tenant in Celery's terms."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Consumer, Producer, Queue

from kombu_fdb.errors import OptionError
from kombu_fdb.transport.fairkey import key_reader


def by_customer(task: str, args: Any, kwargs: Any, headers: Any) -> Any:
    return kwargs.get("customer") or (args[0] if task == "shop.order" else None)


def failing(*_: Any) -> str:
    raise RuntimeError("a bug")


def task(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"headers": {"task": "shop.order"}, "properties": {}, "body": [list(args), kwargs, {}], "content-type": None}


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ({}, ""),
        ({"headers": {"fair_key": "acme"}}, "acme"),
        ({"headers": {"fair_key": 7}}, "7"),
        ({"headers": {"fair_key": ""}, "properties": {"MessageGroupId": "g"}}, ""),
        ({"properties": {"MessageGroupId": "g"}}, "g"),
        ({"headers": {"MessageGroupId": "g"}}, "g"),
    ],
)
def test_explicit_keys(message: dict[str, Any], key: str) -> None:
    assert key_reader(None)(message) == key


def test_another_header() -> None:
    read = key_reader("tenant")
    assert read({"headers": {"tenant": "acme"}}) == "acme"
    assert read({"headers": {"tenant": "acme", "fair_key": "other"}}) == "other"
    assert read({"headers": {}}) == ""


def test_a_function_of_the_task() -> None:
    read = key_reader(f"{__name__}:by_customer")
    assert read(task(1, customer="acme")) == "acme"
    assert read(task("first")) == "first"
    body = '[[], {"customer": "acme"}, {}]'
    encoded = {**task(), "body": body, "content-type": "application/json", "content-encoding": "utf-8"}
    assert read(encoded) == "acme"


def test_a_function_that_fails_does_not_stop_the_publish(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert key_reader(f"{__name__}:failing")(task(1)) == ""
    assert "without a key" in caplog.text


@pytest.mark.parametrize("option", ["no.such.module:key", f"{__name__}:nothing", f"{__name__}:pytestmark_"])
def test_a_function_that_is_not_there(option: str) -> None:
    with pytest.raises(OptionError, match=r"package\.module:function"):
        key_reader(option)


def test_a_noisy_tenant_delays_a_quiet_one_by_one_turn(tmp_path: Path) -> None:
    """Through kombu: 300 messages of one key, then one of another, which comes second."""
    with Connection(f"fdb+sqlite:///{tmp_path}/broker.db") as connection:
        channel = connection.channel()
        queue = Queue("jobs")(channel)
        queue.declare()
        producer = Producer(channel)
        with producer.batch():
            for number in range(300):
                producer.publish(number, routing_key="jobs", headers={"fair_key": "noisy"})
        producer.publish("quiet", routing_key="jobs", headers={"fair_key": "quiet"})
        seen: list[Any] = []

        def on_message(message: Any) -> None:
            seen.append(message.payload)
            message.ack()

        with Consumer(channel, [queue], on_message=on_message):
            while len(seen) < 3:
                connection.drain_events(timeout=10)
        queue.delete()
    assert "quiet" in seen[:2]


def test_a_function_in_the_transport_options(tmp_path: Path) -> None:
    options = {"fair_key": "no.such.module:key"}
    with pytest.raises(OptionError), Connection(f"fdb+sqlite:///{tmp_path}/b.db", transport_options=options) as broken:
        broken.connect()
