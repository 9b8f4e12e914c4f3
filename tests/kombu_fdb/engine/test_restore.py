"""An import: each message once, however often one tries; its marks, and what is left of them."""

import pytest
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase

from kombu_fdb.engine import transfer
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import INLINE_BYTES


@pytest.fixture
def source():
    return Bench(FaultyDatabase(), task_ids=True)


def marked(source):
    return [(b"%d" % number, message) for number, message in enumerate(source.engine.transfer.dump("q"))]


def marks(bench, import_id):
    return len(bench.engine.upkeep.rows(bench.engine.keys.all_imported(import_id)))


def test_a_second_try_stores_what_is_missing(bench, source):
    source.put(b"a", b"b", b"c")
    messages = marked(source)
    assert bench.engine.transfer.restore(b"one", messages[:2]) == 2
    assert bench.payloads() == [b"a", b"b"], "one that was consumed does not come again"
    assert bench.engine.transfer.restore(b"one", messages) == 1
    assert bench.payloads() == [b"c"]
    assert bench.engine.transfer.restore(b"one", messages) == 0


def test_one_that_still_tries_when_another_has_finished_stores_nothing(bench, source):
    """The marks are cleared by then."""
    source.put(b"a", b"b", b"c")
    messages = marked(source)
    slow = bench.another()
    assert bench.engine.transfer.restore(b"one", messages) == 3
    bench.engine.transfer.finish(b"one", {})
    assert slow.transfer.restore(b"one", messages) == 0
    assert bench.payloads() == [b"a", b"b", b"c"]


def test_the_marks_of_a_finished_import_are_cleared_in_parts_and_no_other_s(bench, source, monkeypatch):
    monkeypatch.setattr(transfer, "MARKS_PER_TRANSACTION", 2)
    source.put(*[b"x"] * 9)
    messages = marked(source)
    bench.engine.transfer.restore(b"one", messages[:5])
    bench.engine.transfer.restore(b"two", messages[5:])
    assert bench.engine.transfer.finished(b"one") is None, "it is under way"
    bench.work(lambda work: transfer.finish(work, b"one", {"messages": 5}))
    cursor = bench.engine.transfer.forget_marks_part()
    assert (marks(bench, b"one"), marks(bench, b"two")) == (3, 4)
    bench.write(lambda tr: tr.set(bench.engine.keys.every_imported[1][:-1] + b"\xf0", b"not written by us"))
    while cursor:
        cursor = bench.engine.transfer.forget_marks_part(cursor)
    assert (marks(bench, b"one"), marks(bench, b"two")) == (0, 4)
    bench.engine.transfer.finish(b"two", {"messages": 4})
    assert (marks(bench, b"one"), marks(bench, b"two")) == (0, 0)
    assert bench.engine.transfer.finished(b"one") == {"messages": 5}


def test_one_whose_chunks_would_fall_upon_another_s_gets_an_id_of_its_own(bench):
    large = b"x" * (INLINE_BYTES + 1)
    bench.put(large)
    (before,) = bench.engine.inspect.peek("q", 1)
    copied = marked(bench)
    assert copied[0][1].message_id == before.message_id
    assert bench.engine.transfer.restore(b"one", copied) == 1
    one, other = bench.take()
    assert one.message_id == before.message_id != other.message_id
    bench.engine.messages.ack([one.lease])
    assert other.payload == large
    bench.engine.messages.release([other.lease], counted=False)
    assert bench.payloads() == [large]


def test_one_that_falls_upon_nothing_keeps_its_id_and_its_place(bench, source):
    source.put(b"x" * (INLINE_BYTES + 1), key="alice", priority=4)
    source.put(b"delayed", due_ms=source.clock.wall_ms() + 60_000, key="alice", priority=2)
    there = marked(source)
    assert bench.engine.transfer.restore(b"one", there) == 2
    assert bench.counts() == (1, 1, 0)
    assert [message for _, message in marked(bench)] == [message for _, message in there]
    assert bench.engine.inspect.keys_of("q")["alice"].ready == 1


@pytest.mark.parametrize("value", [b"5", b"[]", b'"done"', b"{"])
def test_a_note_that_cannot_be_read_is_not_taken_for_an_answer(bench, value):
    bench.write(lambda tr: tr.set(bench.engine.keys.import_(b"one"), value))
    with pytest.raises(FormatError):
        bench.engine.transfer.finished(b"one")
