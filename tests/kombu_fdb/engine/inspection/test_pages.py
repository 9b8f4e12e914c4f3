"""Pages over every store: each message once, in order, at the same cost wherever the page begins."""

import pytest
from kit.conformance.queue import Bench
from kit.costs import CountingDatabase, cost

from kombu_fdb.engine.inspection import browse
from kombu_fdb.errors import QueueError
from kombu_fdb.keyspace.codec import CHUNK_BYTES
from kombu_fdb.model import Publication, View

HOUR_MS = 3_600_000


@pytest.fixture
def counted(database):
    return CountingDatabase(database)


@pytest.fixture
def bench(counted):
    bench = Bench(counted)
    yield bench
    bench.check()
    bench.clean()


def walk(bench, state, limit=3, queue="q", **options):
    """All pages, one after the other."""
    found, after = [], b""
    while True:
        page = bench.engine.inspect.page(queue, View(state, after=after, **options), limit)
        assert len(page.messages) <= limit
        found += page.messages
        if page.following is None:
            return found
        after = page.following


def payloads(listed):
    return [each.message.payload for each in listed]


def fill(bench):
    for number in range(4):
        bench.put(b"plain %d" % number)
        bench.put(b"a %d" % number, key="a")
    bench.put(b"urgent", priority=9)
    bench.put(b"b", key="b")


READY = [b"a 0", b"a 1", b"a 2", b"a 3", b"b", b"urgent", b"plain 0", b"plain 1", b"plain 2", b"plain 3"]


def test_pages_of_ready_messages_hold_each_once_by_key_and_urgency(bench):
    fill(bench)
    bench.put(b"another queue's", queue="q2")
    for limit in (1, 3, 10, 100):
        assert payloads(walk(bench, "ready", limit)) == READY
        assert payloads(walk(bench, "ready", limit, reverse=True)) == READY[::-1]
        assert payloads(walk(bench, "ready", limit, key="a")) == READY[:4]
        assert payloads(walk(bench, "ready", limit, key="")) == READY[5:]
        assert payloads(walk(bench, "ready", limit, key="nobody's")) == []


def test_a_page_tells_what_a_record_tells(bench):
    bench.put(b"urgent", priority=7, key="a")
    (listed,) = walk(bench, "ready")
    message = listed.message
    assert (listed.priority, listed.size, listed.due_ms, message.key, message.state) == (7, 6, 0, "a", "ready")
    assert message.published_ms == bench.clock.wall_ms()


def test_delayed_ones_by_due_time(bench):
    now_ms = bench.clock.wall_ms()
    for hours in (3, 1, 2):
        bench.put(b"%d" % hours, due_ms=now_ms + hours * HOUR_MS, priority=hours)
    listed = walk(bench, "delayed", 2)
    assert [(each.message.payload, each.due_ms - now_ms, each.priority) for each in listed] == [
        (b"%d" % hours, hours * HOUR_MS, hours) for hours in (1, 2, 3)
    ]
    assert payloads(walk(bench, "delayed", 2, reverse=True)) == [b"3", b"2", b"1"]


@pytest.mark.parametrize("leases", [1, 4])
def test_leased_ones_of_one_queue_with_their_owner(bench, monkeypatch, leases):
    """However few leases are looked at for a page: each message is on one page."""
    monkeypatch.setattr(browse, "LEASES_PER_PAGE", leases)
    for number in range(6):
        bench.put(b"%d" % number, priority=number)
        bench.put(b"another queue's", queue="q2")
    bench.put(b"keyed", key="a", priority=9)
    bench.take(100, "q2", "q")
    listed = walk(bench, "leased", 2)
    assert sorted(payloads(listed)) == [b"%d" % number for number in range(6)] + [b"keyed"]
    assert {each.message.owner for each in listed} == {bench.session}
    assert sorted(each.priority for each in listed) == [0, 1, 2, 3, 4, 5, 9]
    assert sorted(payloads(walk(bench, "leased", 2, reverse=True))) == sorted(payloads(listed))


def test_a_page_reads_the_first_chunk_of_a_large_payload_and_a_position_all_of_it(bench):
    payload = bytes(range(256)) * 1000
    bench.put(payload)
    (listed,) = walk(bench, "ready")
    assert (listed.message.payload, listed.size) == (payload[:CHUNK_BYTES], len(payload))
    whole = bench.engine.inspect.read_at("q", "ready", listed.position)
    assert whole is not None
    assert whole.message.payload == payload


@pytest.mark.parametrize("state", ["ready", "delayed", "leased"])
def test_a_message_is_deleted_where_it_stands_and_nowhere_else(bench, state):
    bench.put(b"it" * 5_000, key="a", due_ms=bench.clock.wall_ms() + 1_000 if state == "delayed" else 0)
    bench.put(b"other", key="a")
    if state == "leased":
        bench.take()
    listed = next(each for each in walk(bench, state) if each.size > 5)
    delete = (listed.position, listed.message.message_id)
    assert not bench.engine.messages.delete_at("q", state, listed.position, bytes(16))
    assert not bench.engine.messages.delete_at("q2", state, *delete)
    assert bench.engine.messages.delete_at("q", state, *delete)
    assert not bench.engine.messages.delete_at("q", state, *delete)
    assert bench.engine.inspect.read_at("q", state, listed.position) is None
    assert sum(bench.counts()) == 1


def test_a_message_that_moved_is_not_where_it_was(bench):
    bench.put(b"a")
    (listed,) = walk(bench, "ready")
    bench.take()
    assert bench.engine.inspect.read_at("q", "ready", listed.position) is None
    assert not bench.engine.messages.delete_at("q", "ready", listed.position, listed.message.message_id)


def test_a_tasks_messages_are_listed_wherever_they_are(bench):
    later_ms = bench.clock.wall_ms() + HOUR_MS
    for queue, properties in (("q", {}), ("q", {"key": "a"}), ("r", {"due_ms": later_ms}), ("leased", {"key": "b"})):
        bench.put(b"mine", queue=queue, task_id="t", **properties)
        bench.put(b"other", queue=queue, task_id="u", **properties)
    bench.take(9, "leased")
    listed = bench.engine.inspect.list_task("t")
    assert sorted((each.message.queue, each.message.state, each.message.key) for each in listed) == [
        ("leased", "leased", "b"),
        ("q", "ready", ""),
        ("q", "ready", "a"),
        ("r", "delayed", ""),
    ]
    for each in listed:
        found = bench.engine.inspect.read_at(each.message.queue, each.message.state, each.position)
        assert found is not None
        assert found.message.payload == b"mine"
    assert bench.engine.inspect.list_task("nobody's") == []


@pytest.mark.parametrize("key", ["", "a"])
def test_a_dead_letter_is_replayed_from_where_it_stands(bench, key):
    bench.put(b"a", b"b", key=key)
    bench.engine.messages.reject([each.lease for each in bench.take()])
    first, second = walk(bench, "ready", queue="q.dead")
    replay = (first.position, first.message.message_id)
    assert bench.engine.dead_letters.replay_at("q.dead", second.position, first.message.message_id) is None
    assert bench.engine.dead_letters.replay_at("q.dead", *replay) == "q"
    assert bench.engine.dead_letters.replay_at("q.dead", *replay) is None
    assert payloads(walk(bench, "ready")) == [b"a"]
    assert payloads(walk(bench, "ready", queue="q.dead")) == [b"b"]
    (delivery,) = bench.take()
    assert delivery.deaths[0].reason == "rejected"
    assert bench.counts("q.dead") == (1, 0, 0)


def test_what_never_died_is_not_replayed(bench):
    bench.put(b"a")
    (listed,) = walk(bench, "ready")
    with pytest.raises(QueueError, match="not a dead letter"):
        bench.engine.dead_letters.replay_at("q", listed.position, listed.message.message_id)
    assert bench.counts() == (1, 0, 0)


@pytest.mark.parametrize("state", ["ready", "delayed", "leased"])
def test_a_made_up_position_leads_nowhere(bench, state):
    fill(bench)
    bench.put(b"another queue's", queue="r")
    bench.take(1, "r")
    for position in (b"\x00", b"\xff" * 40, b"\x02", b"\x02x\x00", b"nonsense"):
        assert bench.engine.inspect.read_at("q", state, position) is None
        page = bench.engine.inspect.page("q", View(state, after=position), 3)
        assert all(each.message.queue == "q" for each in page.messages)


def test_an_unreadable_message_is_shown_as_its_bytes(bench):
    fill(bench)
    keys = bench.engine.keys
    (broken,) = (each for each in walk(bench, "ready") if each.message.payload == b"urgent")
    key, old = (
        keys.at("q", broken.position),
        bench.engine.transactions.read(lambda work: work.tr.get(keys.at("q", broken.position))),
    )
    bench.write(lambda tr: tr.set(key, b"garbage"))
    assert b"garbage" in payloads(walk(bench, "ready"))
    bench.write(lambda tr: tr.set(key, old))


# -- cost --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("database", ["memory"], indirect=True)  # counted above the store
@pytest.mark.parametrize("backlog", [200, 10_000, pytest.param(100_000, marks=pytest.mark.scale)])
def test_every_page_costs_the_same_in_a_queue_of_any_length(bench, counted, backlog):
    for state, due_ms in (("ready", 0), ("delayed", 2**41)):
        for start in range(0, backlog, 2_000):
            number = min(2_000, backlog - start)
            bench.engine.publisher.publish([Publication("", "q", b"%d" % start, due_ms=due_ms)] * number)
        first, last = (bench.engine.inspect.page("q", View(state, reverse=reverse), 50) for reverse in (False, True))
        middle = first
        for reverse, after in ((False, b""), (False, first.following), (False, last.following), (True, last.following)):
            assert after is not None
            paid = cost(
                counted, lambda s=state, a=after, r=reverse: bench.engine.inspect.page("q", View(s, None, a, r), 50)
            )
            assert (paid.rows, paid.point_reads, paid.conflict_keys, paid.writes) == (51, 0, 0, 0) or (
                after == last.following and not reverse and paid.rows == 49
            )
        position = middle.messages[-1].position
        paid = cost(counted, lambda s=state, p=position: bench.engine.inspect.read_at("q", s, p))
        assert (paid.point_reads, paid.rows, paid.round_trips) == (1, 0, 2)
    bench.engine.queues.purge("q")
