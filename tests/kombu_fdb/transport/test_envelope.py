"""The wire format, and what it reads out of headers (envelope.py, timing.py; research/interfaces.md A3, A4)."""

import json
import uuid
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu.utils.json import register_type

from kombu_fdb.errors import FormatError, InvalidArgument
from kombu_fdb.keyspace.codec import PAYLOAD_HEAD, PAYLOAD_VERSION
from kombu_fdb.model import Death, Delivery, Lease
from kombu_fdb.primitives.ranges import LATEST_MS
from kombu_fdb.transport import envelope
from kombu_fdb.transport.envelope import due_ms, encode, open_delivery, payload_of, ttl_ms, without_deaths

NOW_MS = 1_800_000_000_000


def message(body=b"", headers=None, **properties):
    return {
        "body": body,
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": headers or {},
        "properties": {"delivery_info": {}, **properties},
    }


def delivery(payload, redeliveries=0, deaths=()):
    return Delivery(Lease(b"s", 1), "q", payload, b"id", redeliveries, deaths)


def there_and_back(**what):
    return open_delivery(delivery(encode(message(**what), "e", "k", now_ms=NOW_MS).payload), 7, "tag")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
).filter(lambda value: not isinstance(value, dict) or value.keys() != {"__type__", "__value__"})


#: Of headers that we never read: Hypothesis knows the names in our modules, and what they may not be.
names = st.text().map(lambda text: f"h{text}")


@given(body=st.binary(), headers=st.dictionaries(names, json_values, max_size=4))
def test_round_trip(body, headers):
    found = there_and_back(body=body, headers=headers)
    assert (found["body"], found["headers"]) == (body, headers)


#: With what has no place in a template, and with names that could be taken for one.
odd_values = json_values | st.floats() | st.tuples(json_values) | st.uuids() | st.datetimes() | st.decimals()


@given(headers=st.lists(st.dictionaries(names, odd_values, max_size=4), min_size=1, max_size=3), repeated=st.booleans())
def test_a_prepared_message_has_the_bytes_of_any_other(headers, repeated):
    """``payload_of`` knows no templates."""
    for each in headers * (1 + repeated):
        same = message("body %s", each, reply_to="%s", delivery_tag=5)
        assert encode(same, "100%", "%(k)s", now_ms=NOW_MS).payload == payload_of(same, "100%", "%(k)s")


@pytest.mark.parametrize(
    "odd", [2**63, [2**63], {"a": {"b": -(2**63) - 1}}, (10**400,)], ids=lambda each: str(each)[:20]
)
def test_a_number_that_is_too_long_is_found_where_short_ones_were(odd):
    encode(message(headers={"n": 1, "l": [1], "d": {"a": {"b": 1}}}), "", "q", now_ms=NOW_MS)
    for name in ("n", "l", "d"):
        with pytest.raises(InvalidArgument, match="64 bits"):
            encode(message(headers={"n": 1, "l": [1], "d": {"a": {"b": 1}}, name: odd}), "", "q", now_ms=NOW_MS)


def test_few_shapes_are_remembered(monkeypatch):
    monkeypatch.setattr(envelope, "MOST_SHAPES", 3)
    monkeypatch.setattr(envelope, "_shapes", {})
    for number in range(10):
        encode(message(headers={f"header-{number}": 1}), "", "q", now_ms=NOW_MS)
        assert len(envelope._shapes) <= 3


def test_types_of_kombu():
    headers = {
        "uuid": uuid.uuid4(),
        "time": datetime.now(UTC),
        "decimal": Decimal("1.5"),
        "bytes": b"\xff\x00",
        "like ours": {"__type__": "not known"},
    }
    assert there_and_back(headers=headers)["headers"] == headers


def test_delivery_info():
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


def test_a_property_that_is_none_is_not_there():
    """Published by a template for its names, and by no template for a header of an uncommon type."""
    for headers in ({}, {"price": Decimal("1.5")}):
        payload = encode(message(headers=headers, correlation_id=None), "e", "k", now_ms=NOW_MS).payload
        assert "correlation_id" not in open_delivery(delivery(payload), 1)["properties"]


def test_a_key_that_no_header_names_stands_in_the_delivery():
    for headers, told in (({}, "acme"), ({"fair_key": "acme"}, None)):
        payload = encode(message(headers=headers), "e", "k", now_ms=NOW_MS).payload
        found = open_delivery(delivery(payload)._replace(key="acme"), 1)
        assert found["properties"]["delivery_info"].get("fair_key") == told


def test_redelivered_and_dead():
    deaths = (Death("b", "expired", 2, NOW_MS), Death("a", "rejected", 1, NOW_MS, "e", ("k",), {"error": "x"}))
    payload = encode(message(), "e", "k", now_ms=NOW_MS).payload
    headers = open_delivery(delivery(payload, 3, deaths), 1)["headers"]
    assert headers["x-delivery-count"] == 3
    assert [entry["queue"] for entry in headers["x-death"]] == ["b", "a"]
    assert headers["x-death"][1]["routing-keys"] == ["k"]
    assert (headers["x-first-death-queue"], headers["x-last-death-queue"]) == ("a", "b")


def test_the_time_of_a_death_is_that_of_the_first_one_of_its_kind():
    """Recorded from RabbitMQ 3.10, where a second one changes the count only."""
    deaths = (Death("a", "rejected", 2, NOW_MS + 9_000, since_ms=NOW_MS), Death("b", "expired", 1, NOW_MS + 5_000))
    headers = open_delivery(delivery(encode(message(), "e", "k", now_ms=NOW_MS).payload, 3, deaths), 1)["headers"]
    assert [entry["time"] - NOW_MS // 1000 for entry in headers["x-death"]] == [0, 5]


def test_an_expiration_is_over_with_the_first_death():
    payload = encode({"body": "b", "properties": {"expiration": "5"}}, "e", "k", now_ms=NOW_MS).payload
    deaths = (Death("b", "rejected", 1, NOW_MS), Death("a", "expired", 1, NOW_MS, first=True))
    opened = open_delivery(delivery(payload, 0, deaths), 1)
    assert "expiration" not in opened["properties"]
    assert [entry.get("original-expiration") for entry in opened["headers"]["x-death"]] == [None, "5"]
    assert open_delivery(delivery(payload), 1)["properties"]["expiration"] == "5"


@given(st.binary())
def test_foreign_bytes_are_a_format_error(payload):
    with pytest.raises(FormatError):
        open_delivery(delivery(payload), 1)


@given(st.data())
def test_damaged_bytes_are_a_format_error_or_a_message(data):
    payload = bytearray(encode(message(b"body", {"a": 1}), "e", "k", now_ms=NOW_MS).payload)
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(payload[: data.draw(st.integers(0, len(payload)))])
    with suppress(FormatError):
        assert open_delivery(delivery(cut), 1)["properties"]["delivery_tag"] == 1


@pytest.mark.parametrize("body", [5, 1.5, [1], {"a": 1}])
def test_a_body_that_is_no_body(body):
    with pytest.raises(TypeError):
        encode(message(body), "", "q", now_ms=NOW_MS)


@pytest.mark.parametrize(("priority", "expected"), [(0, 0), (9, 9), (5, 5), (99, 9), (255, 9), (None, 0), ("7", 7)])
def test_priority(priority, expected):
    assert encode(message(priority=priority), "", "q", now_ms=NOW_MS).priority == expected
    assert encode(message(priority=priority), "", "q", now_ms=NOW_MS, most_urgent_is_zero=True).priority == 9 - expected


IN_A_MINUTE = datetime.fromtimestamp(NOW_MS / 1000, UTC) + timedelta(minutes=1)


@pytest.mark.parametrize(
    ("headers", "properties", "expected"),
    [
        ({}, {}, 0),
        ({"task": "t", "eta": IN_A_MINUTE.isoformat()}, {}, NOW_MS + 60_000),
        ({"task": "t", "eta": IN_A_MINUTE.replace(tzinfo=None).isoformat()}, {}, NOW_MS + 60_000),
        ({"task": "t", "eta": (IN_A_MINUTE - timedelta(hours=1)).isoformat()}, {}, NOW_MS - 59 * 60_000),
        ({"task": "t", "eta": "1969-12-31T23:59:59+00:00"}, {}, 0),
        ({"task": "t", "eta": None}, {}, 0),
        ({"eta": IN_A_MINUTE.isoformat()}, {}, 0),
        ({"x-delay": 1500}, {}, NOW_MS + 1500),
        ({"x-delay": "1500"}, {}, NOW_MS + 1500),
        ({"x-delay": -5}, {}, NOW_MS - 5),
        ({"x-delay": None, "DelaySeconds": None}, {"DelaySeconds": None}, 0),
        ({}, {"DelaySeconds": 2}, NOW_MS + 2000),
        ({"DelaySeconds": 0.5}, {}, NOW_MS + 500),
        ({"x-delay": 100, "task": "t", "eta": IN_A_MINUTE.isoformat()}, {}, NOW_MS + 60_000),
    ],
)
def test_due(headers, properties, expected):
    assert due_ms(headers, properties, NOW_MS) == expected


def test_a_moment_at_the_end_of_time():
    last = "9999-12-31T23:59:59.999999-14:00"
    assert due_ms({"task": "t", "eta": last}, {}, NOW_MS) == LATEST_MS


#: What kombu's decoders of types, each by its own error, make nothing of; and what they do understand.
NO_VALUES = ({"hex": 5}, {"nonsense": 1}, 5, None, [1], "\ud800", "no such", {"hex": "x" * 32}, {"int": -1})
UNDERSTOOD = [("bytes", "no such"), ("base64", "no such"), ("decimal", 5)]


@pytest.mark.parametrize("kind", ["uuid", "bytes", "base64", "datetime", "date", "time", "decimal", "no such type"])
def test_what_looks_like_an_encoded_type_and_is_none_is_delivered_as_it_is(kind):
    for impostor in [{"__type__": kind, "__value__": value} for value in NO_VALUES if (kind, value) not in UNDERSTOOD]:
        with pytest.raises(InvalidArgument):
            there_and_back(headers=impostor)
        for headers in ({"a": impostor}, {"a": [{"b": impostor}]}):
            found = there_and_back(headers=headers, body=b"")["headers"]
            assert found == headers or kind == "base64", found


class Odd:
    """A type that an application has registered."""


def test_a_decoder_of_the_application_that_fails_ends_no_worker():
    def broken(_):
        raise RuntimeError

    register_type(Odd, "odd", lambda _: 1, broken)
    assert there_and_back(headers={"a": Odd()})["headers"] == {"a": {"__type__": "odd", "__value__": 1}}


@pytest.mark.parametrize("value", [None, 5, "\ud800", [1], {"a": 1}, True])
def test_meta_of_the_wrong_types_is_a_format_error_or_a_message(value):
    for place in range(6):
        meta = ["text/plain", "utf-8", {}, {"body_encoding": "base64"}, "e", "k"]
        meta[place] = value
        text = json.dumps(meta).encode()
        with suppress(FormatError):
            found = open_delivery(delivery(PAYLOAD_HEAD.pack(PAYLOAD_VERSION, len(text)) + text + b"body"), 1)
            assert isinstance(found["properties"]["delivery_info"]["exchange"], str)
            assert "body_encoding" not in found["properties"]
            assert found["content-type"] is None or isinstance(found["content-type"], str)


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ({"headers": {"a": nested(100_000)}}, "JSON"),
        ({"body": "\ud800"}, "body"),
        ({"headers": {"id": "\ud800", "task": "t"}}, "task id"),
        ({"message_id": "\ud800"}, "task id"),
    ],
)
def test_what_can_not_be_written_down_is_refused_by_its_name(what, match):
    with pytest.raises(InvalidArgument, match=match):
        encode(message(**what), "", "q", now_ms=NOW_MS)


@pytest.mark.parametrize(
    "entry", [5, {"queue": 5}, {"time": float("inf")}, {"routing-keys": 5}, {"routing-keys": [5]}, {"x": uuid.uuid4()}]
)
def test_an_invented_history_is_none(entry):
    real = {"queue": "q", "reason": "r", "count": 1, "time": 5, "exchange": "", "routing-keys": []}
    invented = {**real, **entry} if isinstance(entry, dict) else entry
    assert without_deaths({"a": 1, "x-death": [invented]}) == ({"a": 1}, ())
    assert without_deaths({"x-death": [real]})[1] == (Death("q", "r", 1, 5_000),)


@pytest.mark.parametrize(
    ("headers", "properties", "expected"),
    [
        ({}, {}, None),
        ({}, {"expiration": "1500"}, 1500),
        ({}, {"expiration": "0"}, 0),
        ({"task": "t", "expires": None}, {"expiration": "60000"}, 60_000),
        # Celery sets both: a worker has to be given the task, so that it can say REVOKED.
        ({"task": "t", "expires": IN_A_MINUTE.isoformat()}, {"expiration": "60000"}, None),
        ({"task": "t", "expires": "nonsense"}, {"expiration": "0"}, None),
        ({"expires": 1_800_000_060.0}, {"expiration": "5"}, 5),
    ],
)
def test_time_to_live(headers, properties, expected):
    assert ttl_ms(headers, properties) == expected


def test_never_a_part_of_a_millisecond_early():
    eta = (IN_A_MINUTE + timedelta(microseconds=1)).isoformat()
    assert due_ms({"task": "t", "eta": eta}, {}, NOW_MS) == NOW_MS + 60_001
