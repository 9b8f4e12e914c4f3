"""The wire format, and what it reads out of headers (envelope.py, timing.py; research/interfaces.md A3, A4)."""

from __future__ import annotations

import uuid
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kombu_fdb.errors import FormatError
from kombu_fdb.model import Death, Delivery, Lease
from kombu_fdb.transport.envelope import encode, open_delivery
from kombu_fdb.transport.timing import due_ms, expiry

NOW_MS = 1_800_000_000_000


def message(body: Any = b"", headers: Any = None, **properties: Any) -> dict[str, Any]:
    return {
        "body": body,
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": headers or {},
        "properties": {"delivery_info": {}, **properties},
    }


def delivery(payload: bytes, redeliveries: int = 0, deaths: tuple[Death, ...] = ()) -> Delivery:
    return Delivery(Lease(b"s", 1), "q", payload, b"id", redeliveries, deaths)


def there_and_back(**what: Any) -> dict[str, Any]:
    return open_delivery(delivery(encode(message(**what), "e", "k", now_ms=NOW_MS).payload), 7, "tag")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
).filter(lambda value: not isinstance(value, dict) or value.keys() != {"__type__", "__value__"})


@given(body=st.binary(), headers=st.dictionaries(st.text(), json_values, max_size=4))
def test_round_trip(body: bytes, headers: dict[str, Any]) -> None:
    for name in ("x-delivery-count", "x-death"):
        headers.pop(name, None)
    found = there_and_back(body=body, headers=headers)
    assert (found["body"], found["headers"]) == (body, headers)


def test_types_of_kombu() -> None:
    headers = {
        "uuid": uuid.uuid4(),
        "time": datetime.now(UTC),
        "decimal": Decimal("1.5"),
        "bytes": b"\xff\x00",
        "like ours": {"__type__": "not known"},
    }
    assert there_and_back(headers=headers)["headers"] == headers


def test_delivery_info() -> None:
    found = there_and_back(delivery_tag="the publisher's", body_encoding="base64")
    assert found["properties"] == {
        "delivery_tag": 7,
        "delivery_info": {
            "exchange": "e",
            "routing_key": "k",
            "queue": "q",
            "redelivered": False,
            "consumer_tag": "tag",
        },
    }


def test_redelivered_and_dead() -> None:
    deaths = (Death("b", "expired", 2, NOW_MS), Death("a", "rejected", 1, NOW_MS, "e", ("k",), {"error": "x"}))
    payload = encode(message(), "e", "k", now_ms=NOW_MS).payload
    headers = open_delivery(delivery(payload, 3, deaths), 1)["headers"]
    assert headers["x-delivery-count"] == 3
    assert [entry["queue"] for entry in headers["x-death"]] == ["b", "a"]
    assert headers["x-death"][1]["routing-keys"] == ["k"]
    assert (headers["x-first-death-queue"], headers["x-last-death-queue"]) == ("a", "b")


@given(st.binary())
def test_foreign_bytes_are_a_format_error(payload: bytes) -> None:
    with pytest.raises(FormatError):
        open_delivery(delivery(payload), 1)


@given(st.data())
def test_damaged_bytes_are_a_format_error_or_a_message(data: st.DataObject) -> None:
    payload = bytearray(encode(message(b"body", {"a": 1}), "e", "k", now_ms=NOW_MS).payload)
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(payload[: data.draw(st.integers(0, len(payload)))])
    with suppress(FormatError):
        assert open_delivery(delivery(cut), 1)["properties"]["delivery_tag"] == 1


@pytest.mark.parametrize("body", [5, 1.5, [1], {"a": 1}])
def test_a_body_that_is_no_body(body: Any) -> None:
    with pytest.raises(TypeError):
        encode(message(body), "", "q", now_ms=NOW_MS)


@pytest.mark.parametrize(
    ("priority", "expected"), [(0, 0), (9, 9), (5, 5), (-3, 0), (99, 9), (None, 0), ("7", 7), ("high", 0)]
)
def test_priority(priority: Any, expected: int) -> None:
    assert encode(message(priority=priority), "", "q", now_ms=NOW_MS).priority == expected
    assert encode(message(priority=priority), "", "q", now_ms=NOW_MS, most_urgent_is_zero=True).priority == 9 - expected


IN_A_MINUTE = datetime.fromtimestamp(NOW_MS / 1000, UTC) + timedelta(minutes=1)


@pytest.mark.parametrize(
    ("headers", "properties", "expected"),
    [
        ({}, {}, 0),
        ({"task": "t", "eta": IN_A_MINUTE.isoformat()}, {}, NOW_MS + 60_000),
        ({"task": "t", "eta": IN_A_MINUTE.replace(tzinfo=None).isoformat()}, {}, NOW_MS + 60_000),
        ({"task": "t", "eta": (IN_A_MINUTE - timedelta(hours=1)).isoformat()}, {}, 0),
        ({"task": "t", "eta": "soon"}, {}, 0),
        ({"task": "t", "eta": None}, {}, 0),
        ({"eta": IN_A_MINUTE.isoformat()}, {}, 0),
        ({"x-delay": 1500}, {}, NOW_MS + 1500),
        ({"x-delay": "1500"}, {}, NOW_MS + 1500),
        ({"x-delay": -5}, {}, 0),
        ({"x-delay": "never"}, {}, 0),
        ({"x-delay": float("inf")}, {}, 0),
        ({}, {"DelaySeconds": 2}, NOW_MS + 2000),
        ({"DelaySeconds": 0.5}, {}, NOW_MS + 500),
        ({"x-delay": 100, "task": "t", "eta": IN_A_MINUTE.isoformat()}, {}, NOW_MS + 60_000),
    ],
)
def test_due(headers: Any, properties: Any, expected: int) -> None:
    assert due_ms(headers, properties, NOW_MS) == expected


@pytest.mark.parametrize(
    ("headers", "properties", "expected"),
    [
        ({}, {}, (None, 0)),
        ({}, {"expiration": "1500"}, (1500, 0)),
        ({}, {"expiration": "0"}, (0, 0)),
        ({}, {"expiration": "often"}, (None, 0)),
        ({"task": "t", "expires": IN_A_MINUTE.isoformat()}, {"expiration": "60000"}, (None, NOW_MS + 60_000)),
        ({"task": "t", "expires": "nonsense"}, {"expiration": "60000"}, (60_000, 0)),
        ({"expires": 1_800_000_060.0}, {"expiration": "5"}, (5, 0)),
    ],
)
def test_expiry(headers: Any, properties: Any, expected: Any) -> None:
    assert expiry(headers, properties) == expected


def test_never_a_part_of_a_millisecond_early() -> None:
    eta = (IN_A_MINUTE + timedelta(microseconds=1)).isoformat()
    assert due_ms({"task": "t", "eta": eta}, {}, NOW_MS) == NOW_MS + 60_001
