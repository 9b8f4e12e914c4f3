"""Bytes that we did not write: every decoder raises ``FormatError`` or returns what the engine can live with.

Three sources: arbitrary bytes, values of ours with some bytes changed, and JSON of odd shape.
"""

import json
from contextlib import suppress
from dataclasses import asdict

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kit.records import record_of

from kombu_fdb.engine import session
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace import codec
from kombu_fdb.keyspace.layout import has_key, pack, pack_int, pack_stamp, split_place, unpack
from kombu_fdb.model import Death, KeyLimits, QueueControl
from kombu_fdb.primitives.ranges import LONGEST_S, MOST, SLOWEST
from kombu_fdb.routing.tables import Exchange, QueueDeclaration

DEATH = Death("q", "rejected", 2, 5, "dlx", ("a", "b"), {"error": "x"})
RECORD = record_of(bytes(16), b"payload", published_ms=1, expires_ms=2, redeliveries=3, deaths=[DEATH]).encode()
RECORD_WITH_ALL = record_of(
    bytes(16), b"p", published_ms=1, expires_ms=2, deaths=[DEATH], key="k", ttr_ms=9, task_id="t", priority=3
).encode()
PLACE = pack("key") + pack_int(4) + pack_stamp(bytes(12))


def decode_lease(value):
    """And what the sweep does with its place."""
    _queue, place, record = codec.Message.of_lease(value)
    has_key(place)
    split_place(place)
    codec.Record.redelivered(record)
    codec.Record.due_from(record, 5)
    codec.Record.published_at(record, 0)
    codec.Record.known(record)
    codec.size_of(record)


def decode_record(value):
    """And what burying does with it: all of it can be written again."""
    record = codec.Record.decode(value)
    sum(death.count for death in record.deaths)
    record.encode()


def decode_limits(value):
    limits = codec.decode_limits(value)
    assert codec.decode_limits(codec.encode_settings(limits)) == limits
    if limits.rate is not None:
        assert 1 / limits.rate > 0


def decode_control(value):
    control = codec.decode_control(value)
    assert codec.decode_control(codec.encode_settings(control)) == control


def decode_beat(value):
    """Never an error: one session's beat must not hide those of all others."""
    try:
        session.consumed_of(value)
        session.beat_ms(value)
        assert session._ttl_s(value) >= 0
    except FormatError as error:
        raise AssertionError from error


def describe(value):
    assert isinstance(session.description_of(value), dict)


CONTROL = codec.encode_settings(QueueControl(every_key=KeyLimits(rate=0.5, priority=3), ageing=2.5))
LIMITS = codec.encode_settings(KeyLimits(paused=True, max_in_flight=3, capacity=4))
DECLARATION = QueueDeclaration("q", arguments={"x-expires": 5, "x-max-length": 6, "x-overflow": "drop-head"})

#: Decoders, each with a value of ours to begin with.
DECODERS = {
    "record": (decode_record, RECORD),
    "full record": (decode_record, RECORD_WITH_ALL),
    "lease": (decode_lease, codec.encode_lease(codec.Message("q", PLACE, RECORD))),
    "control": (decode_control, CONTROL),
    "limits": (decode_limits, LIMITS),
    "json": (codec.decode_json, b"[1]"),
    "amount": (codec.decode_amount, bytes(16)),
    "exchange": (lambda value: Exchange.decode("e", value), Exchange("e", "topic").encode()),
    "queue": (lambda value: QueueDeclaration.decode("q", value), DECLARATION.encode()),
    "beat": (decode_beat, bytes(10) + b'[5,"q"]' + bytes(4)),
    "session": (describe, b'{"host":"a"}'),
    "key": (unpack, PLACE),
}
decoders = pytest.mark.parametrize(("decode", "ours"), DECODERS.values(), ids=[*DECODERS])
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

#: Names of fields that are read somewhere.
KNOWN = [*asdict(QueueControl()), *asdict(KeyLimits()), *asdict(DEATH), *DECLARATION.arguments]
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.just(10**400), st.floats(), st.sampled_from(["", "q", "first", "topic"])
)


def fields(inner):
    return st.dictionaries(st.sampled_from(KNOWN), inner, max_size=5)


odd_json = st.recursive(scalars, lambda inner: st.one_of(st.lists(inner, max_size=5), fields(inner)), max_leaves=8)


def harmless(decode, value):
    with suppress(FormatError):
        decode(value)


@decoders
@quick
@given(value=st.binary(max_size=120))
@example(b"[" * 100_000)
@example(b"")
def test_arbitrary_bytes(decode, ours, value):
    decode(ours)
    harmless(decode, value)


@decoders
@quick
@given(data=st.data())
def test_values_of_ours_with_some_bytes_changed(decode, ours, data):
    value = bytearray(ours)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(value)))
        value[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    harmless(decode, bytes(value))


def with_extras(extras):
    """A record whose extras are these."""
    record = record_of(bytes(16), b"", published_ms=1, expires_ms=2).encode()
    return record[:11] + len(extras).to_bytes(4, "big") + record[15:] + extras


def as_it_is(value):
    return value


#: How a JSON value gets into what is decoded.
PLACES = {
    "extras": (decode_record, with_extras),
    "control": (decode_control, as_it_is),
    "limits": (decode_limits, as_it_is),
    "exchange": (lambda value: Exchange.decode("e", value), as_it_is),
    "queue": (lambda value: QueueDeclaration.decode("q", value), as_it_is),
    "beat": (decode_beat, lambda value: bytes(10) + value + bytes(4)),
    "session": (describe, as_it_is),
}


@pytest.mark.parametrize(("decode", "put"), PLACES.values(), ids=[*PLACES])
@quick
@given(value=odd_json)
def test_json_of_odd_shape(decode, put, value):
    harmless(decode, put(json.dumps(value).encode()))


@quick
@given(base=st.sampled_from([CONTROL, LIMITS, codec.encode_json(asdict(DEATH))]), data=st.data())
def test_one_field_of_an_odd_type(base, data):
    value = json.loads(base)
    value[data.draw(st.sampled_from([*value, "unheard-of"]))] = data.draw(odd_json)
    odd = json.dumps(value).encode()
    for decode in (decode_control, decode_limits):
        harmless(decode, odd)
    harmless(decode_record, with_extras(b"[5," + odd + b"]"))


IMPOSSIBLE = [{"weight": 0}, {"rate": 0}, {"rate": float("nan")}, {"burst": -1}, {"priority": 10}]


@pytest.mark.parametrize("limits", IMPOSSIBLE)
def test_limits_that_can_not_have_been_set(limits):
    """The fair ring divides by a rate, and goes on by a weight."""
    with pytest.raises(FormatError):
        codec.decode_limits(json.dumps(limits).encode())
    assert codec.limits_of(json.dumps(limits).encode()) == KeyLimits(paused=True), "hands out nothing"
    control = codec.control_of(json.dumps({"every_key": limits}).encode())
    assert control == QueueControl(paused=True, limited=True), "nor does the queue"


def test_a_control_with_a_field_of_a_newer_version_is_a_pause():
    newer = json.dumps({**asdict(QueueControl(paused=True)), "drained": True}).encode()
    assert codec.control_of(newer).paused


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        ({"rate": float("inf")}, KeyLimits(rate=MOST)),
        ({"rate": 1e-17}, KeyLimits(rate=SLOWEST)),
        ({"max_in_flight": 10**20, "weight": 10**400}, KeyLimits(max_in_flight=MOST, weight=MOST)),
    ],
)
def test_limits_that_were_let_in_before_there_were_ranges(stored, read):
    assert codec.decode_limits(json.dumps(stored).encode()) == read
    control = json.dumps({"paused": True, "every_key": stored, "ageing": float("inf")}).encode()
    assert codec.decode_control(control) == QueueControl(paused=True, every_key=read, ageing=LONGEST_S)
