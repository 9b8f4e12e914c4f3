"""What an encoder accepts its decoder reads, and what can't be read again is not accepted."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.records import record_of

from celery_fdb.operations import transfer
from celery_fdb.results import chords, records
from celery_fdb.results.chords import Chord
from kombu_fdb.engine.messages import publish
from kombu_fdb.engine.messages.publish import check_publication
from kombu_fdb.engine.scheduling.limit_changes import check_control, check_limits
from kombu_fdb.errors import FormatError, InvalidArgument, QueueError
from kombu_fdb.keyspace import codec
from kombu_fdb.keyspace.layout import Keyspace, pack, pack_int, pack_stamp, split_place, unpack
from kombu_fdb.model import Death, KeyLimits, Publication, QueueControl, StoredMessage
from kombu_fdb.primitives.ranges import LATEST_MS, LONGEST_MS, MOST
from kombu_fdb.routing.tables import Exchange, QueueDeclaration

numbers = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.just(10**400))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
moments, durations, counts = st.integers(0, LATEST_MS), st.integers(0, LONGEST_MS), st.integers(0, MOST)
deaths = st.lists(
    st.builds(Death, texts, texts, counts, counts, texts, st.lists(texts).map(tuple), st.dictionaries(texts, texts)),
    max_size=3,
).map(tuple)
stamps = st.binary(min_size=12, max_size=12)
ids = st.binary(min_size=16, max_size=16)
KEYS = Keyspace("d")
quick = settings(deadline=None, max_examples=200)


@quick
@given(st.lists(st.one_of(st.integers(-1, 2**70), st.text(), st.binary())))
def test_elements_of_a_key(elements):
    with suppress(FormatError):
        packed = pack(*elements)
        assert unpack(packed) == tuple(elements)


@given(texts.filter(bool), st.integers(0, 9), stamps)
def test_places(key, priority, stamp):
    rank = KEYS.rank(priority)
    assert split_place(rank + pack_stamp(stamp)) == ("", rank)
    assert split_place(pack(key) + rank + pack_stamp(stamp)) == (key, rank)
    assert KEYS.split_ring("q", KEYS.ring_entry("q", rank, 5, stamp, key)) == (rank, 5, stamp, key)
    assert KEYS.split_arrival(KEYS.arrival("q", key, rank)) == (key, rank)
    assert KEYS.split_freed(KEYS.freed("q", key)) == key


@quick
@given(moments, st.integers(0, 9), stamps)
def test_delayed(due_ms, priority, stamp):
    key = KEYS.delayed_prefix("q", due_ms, KEYS.rank(priority)) + stamp
    assert KEYS.split_delayed("q", key) == (due_ms, KEYS.rank(priority))


@quick
@given(st.builds(KeyLimits, st.booleans(), *[numbers] * 6))
def test_limits(limits):
    try:
        check_limits(limits)
    except InvalidArgument:
        return
    assert codec.decode_limits(codec.encode_settings(limits)) == limits


@quick
@given(st.builds(QueueControl, st.booleans(), st.sampled_from(["next", "first", "x"]), ageing=numbers))
def test_control(control):
    try:
        check_control(control)
    except InvalidArgument:
        return
    assert codec.decode_control(codec.encode_settings(control)) == control


@quick
@given(st.data())
def test_records_of_publications(data):
    names = ("priority", "due_ms", "ttl_ms", "expires_ms", "ttr_ms", "dedup_window_ms", "once_window_ms")
    odd = {name: data.draw(st.one_of(numbers, durations)) for name in data.draw(st.lists(st.sampled_from(names)))}
    publication = Publication("", "q", b"", key=data.draw(st.text()), task_id=data.draw(st.text()))._replace(**odd)
    try:
        check_publication(publication)
    except (InvalidArgument, QueueError):
        return
    record = codec.Record.decode(
        record_of(
            bytes(16),
            b"",
            published_ms=0,
            expires_ms=publication.expires_ms,
            key=publication.key,
            ttr_ms=publication.ttr_ms,
            task_id=publication.task_id,
            priority=publication.priority,
        ).encode()
    )
    assert (record.expires_ms, record.ttr_ms, record.key) == (
        publication.expires_ms,
        publication.ttr_ms,
        publication.key,
    )
    pack_int(publication.due_ms + (publication.ttl_ms or 0) + publication.dedup_window_ms)


@quick
@given(
    st.builds(
        StoredMessage,
        *(texts, st.sampled_from(["ready", "delayed"]), st.binary(), st.integers(0, 9), moments, texts, st.booleans()),
        *(ids, moments, moments, st.integers(0, 65_535), counts, texts, deaths, st.integers(0, 9), st.booleans()),
    )
)
def test_an_exported_message(message):
    assert transfer._decode(transfer._line(message), 1) == message


@pytest.mark.parametrize(
    "entry",
    [
        Exchange("e", "topic", True, False, {"a": [1]}),
        QueueDeclaration("q", True, False, True, {"x-expires": 5}),
        ("binding", {"exchange": "e", "queue": "q", "routing_key": "a.#"}),
        ("control", {"queue": "q", "control": QueueControl(paused=True, every_key=KeyLimits(rate=0.5), ageing=2.0)}),
        ("limits", {"queue": "q", "key": "k", "limits": KeyLimits(capacity=0)}),
        ("dedup", {"exchange": "e", "routing_key": "k", "dedup_id": "d", "end_ms": 5}),
    ],
    ids=lambda entry: entry[0] if isinstance(entry, tuple) else type(entry).__name__,
)
def test_an_exported_entry(entry):
    assert transfer._decode(transfer._line(entry), 1) == entry


class Written:
    """What a transaction was told to set."""

    def __init__(self):
        self.rows = {}

    def set(self, key, value):
        self.rows[key] = value


@given(texts, st.binary(), moments)
def test_results(state, payload, expires_ms):
    tr = Written()
    records.write(tr, b"k", state, payload, expires_ms=expires_ms)
    assert records.decode(tr.rows[b"k"])[:3] == (state, payload, expires_ms)


@given(
    st.builds(
        Chord,
        *(moments, moments, moments, st.none() | counts, st.lists(texts).map(tuple)),
        st.none() | st.tuples(st.integers(0, 2**63), texts),
    )
)
def test_chords(chord):
    tr = Written()
    chords._write(tr, records.ResultKeys("d"), "g", chord)
    assert [chords._decode(value) for value in tr.rows.values()] == [chord]


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_decoded_or_refused(value):
    for decode in (records.decode, chords._decode, codec.decode_round, codec.decode_count, publish.decode_end):
        with suppress(FormatError):
            decode(value)
