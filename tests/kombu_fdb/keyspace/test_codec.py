"""Records come back as they were written, and unreadable ones are an error of ours."""

import dataclasses
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.records import record_of

from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import (
    CHUNK_BYTES,
    INLINE_BYTES,
    Message,
    Record,
    chunks_of,
    encode_lease,
    size_of,
)
from kombu_fdb.keyspace.layout import pack, pack_int, pack_stamp
from kombu_fdb.model import Death, DeliveryInfo
from kombu_fdb.primitives.ranges import MOST

message_ids = st.binary(min_size=16, max_size=16)
moments = st.integers(0, 2**63)
deaths = st.lists(
    st.builds(
        Death,
        queue=st.text(),
        reason=st.sampled_from(["rejected", "expired", "delivery_limit", "malformed"]),
        count=st.integers(1, 1000),
        time_ms=st.integers(0, MOST),
        exchange=st.text(),
        routing_keys=st.lists(st.text(), max_size=3).map(tuple),
        details=st.dictionaries(st.text(), st.text(), max_size=3),
        first=st.booleans(),
        since_ms=st.integers(0, MOST),
    ),
    max_size=3,
).map(tuple)


@given(
    message_ids,
    st.binary(max_size=INLINE_BYTES),
    moments,
    moments,
    st.integers(0, 0x7FFF),
    deaths,
    st.text(),
    st.integers(0, 10**9),
    st.text(max_size=60),
    st.integers(0, 9),
    st.none() | st.builds(DeliveryInfo, st.text(), st.text()),
    st.booleans(),
)
def test_records_round_trip(  # noqa: PLR0917
    message_id, payload, published, expires, count, history, key, ttr_ms, task_id, priority, info, has_been_seen
):
    written = record_of(
        message_id,
        payload,
        published_ms=published,
        expires_ms=expires,
        redeliveries=count,
        deaths=history,
        key=key,
        ttr_ms=ttr_ms,
        task_id=task_id,
        priority=priority,
    )
    value = written._replace(delivery_info=info, seen=has_been_seen).encode()
    record = Record.decode(value)
    head = (message_id, published, expires, count, 0, len(payload), payload)
    assert record == (*head, history, key, ttr_ms, task_id, priority, info, has_been_seen)
    most = 0xFFFF if value[0] == 1 else 0x7FFF
    assert Record.decode(Record.redelivered(value)) == record._replace(redeliveries=min(count + 1, most))
    assert Record.decode(Record.marked_seen(value)) == record._replace(seen=True)
    assert Record.marked_seen(Record.redelivered(value)) == Record.redelivered(Record.marked_seen(value))
    assert Record.outline(Record.marked_seen(value)).seen


def test_golden_bytes_of_version_2():
    """A message that died, and came to where it is by an exchange; what version 1 has room for is still version 1."""
    record = record_of(b"0123456789abcdef", b"hello", published_ms=1, expires_ms=2, priority=7)
    death = Death("q", "rejected", 2, 5, "ex", ("key",), first=True, since_ms=4)
    value = record._replace(delivery_info=DeliveryInfo("dlx", "dead"), deaths=(death,)).encode()
    extras = (
        b'[0,7,["dlx","dead"],{"count":2,"details":{},"exchange":"ex","first":true,"queue":"q","reason":"rejected",'
        b'"routing_keys":["key"],"since_ms":4,"time_ms":5}]'
    )
    assert value[:1] == b"\x02"
    assert value.endswith(b"0123456789abcdef" + extras + b"hello")
    for change, version in (({"first": False}, 2), ({"since_ms": 0}, 2), ({"first": False, "since_ms": 0}, 1)):
        assert record._replace(deaths=(dataclasses.replace(death, **change),)).encode()[0] == version


@pytest.mark.parametrize("info", [["dlx"], ["dlx", 5], ["dlx", "dead", "more"], [None, None]])
def test_a_delivery_info_that_is_none(info):
    head = record_of(b"0123456789abcdef", b"", published_ms=1, expires_ms=2).encode()
    extras, at = json.dumps([info]).encode(), struct.calcsize(">BHHHB")
    with pytest.raises(FormatError, match="unreadable delivery info"):
        Record.decode(head[:at] + struct.pack(">I", len(extras)) + head[at + 4 :] + extras)


places = st.tuples(st.text(max_size=8), st.integers(0, 9), st.binary(min_size=12, max_size=12))


@given(st.text(max_size=200), places, st.booleans(), st.binary(max_size=100))
def test_leases_round_trip(queue, parts, keyed, record):
    key, rank, stamp = parts
    place = (pack(key) if keyed else b"") + pack_int(rank) + pack_stamp(stamp)
    assert Message.of_lease(encode_lease(Message(queue, place, record))) == (queue, place, record)


@pytest.mark.parametrize("size", [0, INLINE_BYTES, INLINE_BYTES + 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES])
def test_chunks_join_to_the_payload(size):
    payload = bytes(range(256)) * (size // 256 + 1)
    payload = payload[:size]
    chunks = chunks_of(payload)
    record = Record.decode(record_of(bytes(16), payload, published_ms=0, expires_ms=0).encode())
    assert record.chunks == len(chunks)
    assert record.size == size
    assert (b"".join(chunks) or record.payload) == payload


def test_golden_bytes():
    """A change here is a change of the store's format: raise ``FORMAT_VERSION`` and say how old stores are read."""
    value = record_of(b"0123456789abcdef", b"hello", published_ms=1, expires_ms=2, redeliveries=3).encode()
    assert value.hex() == (
        "01000300000000000000000000000005000000000000000100000000000000023031323334353637383961626364656668656c6c6f"
    )
    seen_by_one = value[:1].replace(b"\x01", b"\x02") + b"\x80" + value[2:]
    assert Record.marked_seen(value) == Record.decode(value)._replace(seen=True).encode() == seen_by_one
    assert encode_lease(Message("q", b"PLACE", b"RECORD")) == b"\x01\x00\x01\x00\x05qPLACERECORD"


@pytest.mark.parametrize(("numbers", "ttr_ms", "priority"), [([], 0, 0), ([1500], 1500, 0), ([1500, 7], 1500, 7)])
def test_extras_as_they_were_written_before_dead_letters_kept_their_priority(numbers, ttr_ms, priority):
    death = {"queue": "q", "reason": "rejected", "count": 1, "time_ms": 5, "exchange": "", "routing_keys": ["q.dead"]}
    head = record_of(bytes(16), b"", published_ms=1, expires_ms=2).encode()
    extras = json.dumps([*numbers, {**death, "details": {"error": "x"}}]).encode()
    at = struct.calcsize(">BHHHB")
    record = Record.decode(head[:at] + struct.pack(">I", len(extras)) + head[at + 4 :] + extras)
    assert (record.ttr_ms, record.priority, record.deaths[0].details) == (ttr_ms, priority, {"error": "x"})


#: A record as version 3 may write it: number, redeliveries, chunks; lengths of key, task id and what follows; size,
#: moments, id, key, task id; the rest is its own affair.
HEAD = bytes.fromhex("03 0003 0001 0003 04 00000009 0001e240 0000000000000007 0000000000000008")
NEWER = HEAD + b"i" * 16 + b"keytask?!"


def test_what_every_version_of_a_record_keeps():
    """Golden bytes: an older process reads this much of each record to come, for ever."""
    assert Record.is_newer(NEWER)
    outline = Record.outline(NEWER)
    assert outline == Record(b"i" * 16, 7, 8, 3, 1, 123_456, b"", (), "key", task_id="task")
    assert (size_of(NEWER), Record.published_at(NEWER, 0)) == (123_456, 7)
    assert (Record.known(NEWER).key, Record.known(NEWER).task_id) == ("key", "task")
    assert Record.outline(Record.redelivered(NEWER)) == outline._replace(redeliveries=4)
    assert Record.outline(Record.due_from(NEWER, 99)) == outline._replace(published_ms=99)
    assert Record.redelivered(NEWER)[-2:] == b"?!"
    no_record = b"\x00" * 99
    assert Record.due_from(no_record, 99) == no_record
    with pytest.raises(FormatError, match=r"newer celery-fdb.*Upgrade celery-fdb in this process"):
        Record.decode(NEWER)


def test_what_every_version_of_a_lease_keeps():
    place = pack("key") + pack_int(4) + pack_stamp(bytes(12))
    lease = b"\x02\x00\x01\x00" + bytes([len(place)]) + b"q" + place + b"?!"
    assert Message.of_lease(lease, newer=True)[:2] == ("q", place)
    with pytest.raises(FormatError, match=r"newer celery-fdb.*Upgrade celery-fdb in this process"):
        Message.of_lease(lease)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\x03",
        b"\x03garbage",
        b"\x00" + NEWER[1:],
        b"\x20" + NEWER[1:],
        b'{"some": "text", "that": "is", "as": "long as the head of a record"}',
        NEWER[:5] + b"\xff" + NEWER[6:],
        NEWER.replace(b"key", b"k\xffy"),
        record_of(bytes(16), b"ours", published_ms=1, expires_ms=0).encode(),
    ],
)
def test_what_is_no_newer_record(value):
    assert not Record.is_newer(value)
