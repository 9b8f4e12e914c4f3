"""What each verb costs, exactly, and that it does not grow with what else is in the store.

Round trips are FoundationDB's: read version, each read, commit. Each writing transaction sets one commit
token and conflicts on it, against its own earlier runs.
"""

from functools import partial

import pytest
from kit.conformance.queue import Bench
from kit.costs import cost
from kit.duties import promote_all

from kombu_fdb.engine.messages import claim, overflow
from kombu_fdb.model import ClaimTerms, Publication, StoredMessage, View
from kombu_fdb.routing.tables import Exchange, QueueDeclaration

TOKEN = 1


@pytest.fixture
def bench(counted):
    bench = Bench(counted)
    bench.warm_up()
    return bench


def test_publish_reads_nothing_and_conflicts_only_with_itself(bench, counted):
    paid = cost(counted, lambda: bench.put(b"a"))
    assert (paid.point_reads, paid.range_reads, paid.conflict_keys, paid.conflict_ranges) == (0, 0, TOKEN, 0)
    assert (paid.stamps, paid.atomics, paid.sets) == (2, 1, TOKEN)  # message and bell; counter
    assert paid.round_trips == 1


def test_a_batch_pays_once_for_counter_bell_and_round_trips(bench, counted):
    paid = cost(counted, lambda: bench.engine.publisher.publish([Publication("", "q", b"a")] * 100))
    assert (paid.stamps, paid.atomics, paid.sets, paid.round_trips) == (101, 1, TOKEN, 1)


def test_publish_costs_the_same_whatever_is_bound_ready_and_keyed(bench, counted):
    def paid():
        found = []
        for one in (Publication("x", "k", b"a"), Publication("", "q", b"a"), Publication("", "q", b"a", key="new")):
            bench.engine.publisher.publish([one])  # which reads the routes, once
            found.append(cost(counted, lambda one=one: bench.engine.publisher.publish([one])))
        return found

    bench.engine.queues.declare_exchange(Exchange("x", "direct"))
    bench.engine.queues.bind("q", "x", "k")
    few = paid()
    for number in range(300):
        bench.engine.queues.bind("q", "x", f"k{number}")
        bench.put(b"a")
        bench.put(b"a", key=f"{number}")
    assert paid() == few
    assert [each.round_trips for each in few] == [3, 1, 1]


@pytest.mark.parametrize(("kind", "messages"), [("fanout", 1), ("direct", 100)])
def test_publish_to_an_exchange_reads_its_epoch_once(bench, counted, kind, messages):
    """However many messages it has: it was once for each."""
    bench.engine.queues.declare_exchange(Exchange("x", kind))
    bench.engine.queues.bind("q", "x", "k")
    batch = [Publication("x", "k", b"a")] * messages
    bench.engine.publisher.publish(batch)
    paid = cost(counted, lambda: bench.engine.publisher.publish(batch))
    assert (paid.point_reads, paid.range_reads, paid.conflict_keys, paid.round_trips) == (1, 0, TOKEN + 1, 3)
    assert (paid.stamps, paid.atomics, paid.sets) == (messages + 1, 1, TOKEN)


def test_an_event_without_a_listener_writes_nothing(bench, counted):
    bench.engine.queues.declare_exchange(Exchange("celeryev", "topic"))
    bench.engine.publisher.publish([Publication("celeryev", "worker.heartbeat", b"a")])
    paid = cost(counted, lambda: bench.engine.publisher.publish([Publication("celeryev", "worker.heartbeat", b"a")]))
    assert (paid.writes, paid.round_trips) == (0, 2)


def test_claim(bench, counted):
    bench.put(*[b"a"] * 10)
    paid = cost(counted, lambda: bench.take(8))
    assert (paid.point_reads, paid.range_reads, paid.rows) == (3, 1, 8)  # session and the queue's two marks; its head
    # the session; the queue's control; all messages, which stand side by side
    assert (paid.conflict_keys, paid.conflict_ranges, paid.clear_ranges) == (2 + TOKEN, 1, 1)
    assert (paid.clears, paid.sets, paid.atomics) == (0, 8 + TOKEN, 2)
    assert paid.round_trips == 3  # the read version; all that is read; the commit


def test_a_claim_of_several_reads_conflicts_only_with_what_it_takes(bench, counted, monkeypatch):
    monkeypatch.setattr(claim, "ROWS_PER_READ", 4)
    bench.put(*[b"a"] * 6)
    paid = cost(counted, lambda: bench.take(8))
    assert (paid.conflict_keys, paid.conflict_ranges) == (2 + TOKEN, 1)


def test_a_trim_does_not_conflict_with_letters_that_come(counted):
    bench = Bench(counted, dead_length=1)
    bench.put(b"a", b"b", b"c")
    bench.engine.messages.reject([each.lease for each in bench.take() if each.lease])
    paid = cost(counted, lambda: bench.engine.dead_letters.trim_part("q.dead"))
    assert (paid.conflict_keys, paid.conflict_ranges) == (2 + TOKEN, 0)


def test_a_purge_does_not_conflict_with_messages_that_come(bench, counted):
    bench.put(b"a", b"b", b"c")
    assert cost(counted, lambda: bench.engine.queues.purge("q")).conflict_ranges == 0


def test_messages_of_two_ranks_are_two_runs(bench, counted):
    """Between them are those that have just been published with the higher priority."""
    bench.put(*[b"a"] * 4, priority=3)
    bench.put(*[b"a"] * 4, priority=5)
    paid = cost(counted, lambda: bench.take(8))
    assert (paid.conflict_keys, paid.conflict_ranges, paid.clear_ranges, paid.clears) == (2 + TOKEN, 2, 2, 0)


def test_turns_in_a_row_leave_the_ring_together(bench, counted):
    for key in "abcd":
        bench.put(b"1", b"2", b"3", key=key)
    bench.take(4)
    paid = cost(counted, lambda: bench.take(4))
    assert (paid.conflict_ranges, paid.clear_ranges) == (1, 1)  # the turns
    assert (paid.conflict_keys, paid.clears) == (2 + 4 + TOKEN, 4)  # the messages of four keys


def test_a_worker_that_is_never_idle_pays_three_round_trips_a_window(bench, counted):
    bench.put(*[b"a"] * 30)
    leases = [delivery.lease for delivery in bench.take(10)]
    claim = partial(bench.engine.messages.claim, bench.session, ["q"], 10, terms=ClaimTerms(acks=leases))
    paid = cost(counted, claim)
    assert (paid.point_reads, paid.range_reads, paid.rows, paid.round_trips) == (3, 2, 10 + 10, 3)


def test_an_empty_claim_writes_nothing(bench, counted):
    paid = cost(counted, bench.take)
    assert (paid.writes, paid.round_trips) == (0, 2)


def test_ack(bench, counted):
    bench.put(*[b"a"] * 10)
    leases = [delivery.lease for delivery in bench.take()]
    paid = cost(counted, lambda: bench.engine.messages.ack(leases))
    assert (paid.point_reads, paid.range_reads, paid.rows, paid.conflict_ranges) == (0, 1, 10, 1)
    assert (paid.clears, paid.clear_ranges, paid.sets, paid.atomics) == (0, 1, TOKEN, 1)
    assert paid.round_trips == 3  # all leases are read at once


def test_leases_in_a_row_are_settled_together(bench, counted):
    bench.put(*[b"a"] * 10)
    leases = [delivery.lease for delivery in bench.take()]
    paid = cost(counted, lambda: bench.engine.messages.ack([leases[each] for each in (5, 8, 2, 4, 3)]))
    assert (paid.point_reads, paid.range_reads, paid.rows, paid.round_trips) == (1, 1, 4, 3)
    assert (paid.conflict_keys, paid.conflict_ranges, paid.clears, paid.clear_ranges) == (1 + TOKEN, 1, 1, 1)


def test_release_and_delay(bench, counted):
    bench.put(*[b"a"] * 2)
    one, two = (delivery.lease for delivery in bench.take())
    paid = cost(counted, lambda: bench.engine.messages.release([one], counted=False))
    assert (paid.point_reads, paid.clears, paid.sets, paid.atomics, paid.stamps) == (2, 1, 1 + TOKEN, 2, 1)
    paid = cost(counted, lambda: bench.engine.messages.release([two], counted=False, due_ms=2**41))
    assert (paid.point_reads, paid.clears, paid.sets, paid.atomics, paid.stamps) == (2, 1, 1 + TOKEN, 2, 2)


def test_replay(bench, counted):
    bench.put(*[b"a"] * 10)
    bench.engine.messages.reject([delivery.lease for delivery in bench.take()])
    walk = bench.engine.dead_letters.walk("q.dead")
    bench.engine.dead_letters.replay_part(walk, b"", 1)
    paid = cost(counted, lambda: bench.engine.dead_letters.replay_part(walk, b"", 4))
    assert (paid.point_reads, paid.range_reads, paid.rows) == (
        3,
        2,
        4 + 1,
    )  # is the queue there; letters, and if there are more
    assert (paid.conflict_keys, paid.conflict_ranges) == (4 + TOKEN, 0)
    assert (paid.clears, paid.stamps, paid.sets, paid.atomics) == (4, 4 + 1, TOKEN, 2)
    assert paid.round_trips == 4


def test_letters_are_looked_into_in_one_round_trip(bench, counted):
    bench.put(*(b"%d" % number + b"x" * 5000 for number in range(8)))
    bench.engine.messages.reject([delivery.lease for delivery in bench.take()])
    letters = bench.engine.dead_letters
    walk = letters.walk("q.dead", where=lambda letter: letter.payload[:1] in b"246")
    paid = cost(counted, lambda: letters.look(walk, b"", 200))
    assert (paid.round_trips, paid.point_reads) == (4, 8 + 3)  # version; letters; their payloads; those of the matches


def test_heartbeat(bench, counted):
    """What it sees of others comes in the round trip that it needs anyway."""
    paid = cost(counted, lambda: bench.engine.sessions.beat(bench.session))
    assert (paid.point_reads, paid.range_reads, paid.rows) == (2, 2, 1)  # session, promoter; the ring, what is kept
    assert (paid.conflict_keys, paid.conflict_ranges) == (1 + TOKEN, 0)
    assert (paid.writes, paid.round_trips) == (1 + TOKEN, 3)


def test_a_store_that_answers_every_commit_gets_no_tokens(bench, counted):
    counted.commit_may_be_unknown = False
    assert cost(counted, lambda: bench.put(b"a")).sets == 0


def declare(bench, **arguments):
    named = {f"x-{name.replace('_', '-')}": value for name, value in arguments.items()}
    bench.engine.queues.declare(QueueDeclaration("q", arguments=named))
    bench.put(b"the declaration is read once a second")
    bench.engine.queues.purge("q")


def test_declaring_again_costs_one_read(bench, counted):
    declaration = QueueDeclaration("q", arguments={"x-single-active-consumer": True, "x-max-length-bytes": 100})
    bench.engine.queues.declare(declaration)
    paid = cost(counted, lambda: bench.engine.queues.declare(declaration))
    assert (paid.point_reads, paid.range_reads, paid.writes) == (1, 0, 0)


def test_a_limited_queue_with_room_costs_one_read_at_publish(bench, counted):
    for arguments in ({"max_length": 3}, {"max_length_bytes": 100}, {"max_length": 3, "max_length_bytes": 100}):
        declare(bench, **arguments)
        paid = cost(counted, lambda: bench.put(b"a"))
        assert (paid.point_reads, paid.range_reads, paid.conflict_keys, paid.conflict_ranges) == (1, 0, TOKEN, 0)
        assert (paid.stamps, paid.atomics, paid.sets) == (2, 1, TOKEN)
        bench.engine.queues.purge("q")


@pytest.mark.parametrize("backlog", [10, 5_000])
def test_a_full_queue_reads_only_what_gives_way(bench, counted, backlog):
    bench.engine.publisher.publish([Publication("", "q", b"1234567890")] * backlog)
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-max-length-bytes": backlog * 10}))
    bench.engine.transactions.read(lambda work: work.routing.queue(work.tr, "q"))  # the declaration
    cost(counted, lambda: bench.put(b"1234567890" * 3))
    publish, shed = counted.transactions
    assert (publish.point_reads, publish.range_reads, publish.conflict_keys) == (1, 0, TOKEN)
    assert publish.conflict_ranges == 0
    # The key with the most messages gives way, so the backlogs of the keys are read; there are none.
    assert (shed.point_reads, shed.range_reads, shed.rows, shed.conflict_keys) == (1, 1 + 2, 1 + 3, 3 + TOKEN)
    assert (shed.clears, shed.atomics) == (3, 1)


def test_of_more_keys_than_are_compared_those_without_a_key_are_not_all_counted(bench, counted, monkeypatch):
    monkeypatch.setattr(overflow, "MOST_KEYS", 1)
    declare(bench, max_length=201)
    bench.put(b"a", key="k")
    bench.put(*[b"a"] * 200)
    assert cost(counted, lambda: bench.put(b"a")).rows == 5


def test_a_queue_with_one_active_consumer_costs_its_claims_one_read(bench, counted):
    declare(bench, single_active_consumer=True, consumer_timeout=1000)
    other = bench.engine.sessions.open({})

    def claim(session):
        return [
            each.lease
            for each in bench.engine.messages.claim(session, ["q"], 8, terms=ClaimTerms(consumers={"q": "tag"}))
        ]

    claim(bench.session)
    bench.put(*[b"a"] * 10)
    paid = cost(counted, lambda: claim(bench.session))
    assert (paid.point_reads, paid.range_reads, paid.rows, paid.round_trips) == (3 + 1, 1, 8, 3 + 1)
    assert (paid.conflict_keys, paid.conflict_ranges, paid.clear_ranges) == (2 + 1 + TOKEN, 1, 1)
    assert (paid.clears, paid.sets, paid.atomics) == (0, 8 + TOKEN, 2)
    paid = cost(counted, lambda: claim(other))
    assert (paid.point_reads, paid.range_reads, paid.writes, paid.round_trips) == (4, 1, 0, 3)


def test_ageing_reads_a_window_of_each_priority_in_one_round_trip(bench, counted):
    bench.engine.queues.change_control("q", ageing=1.0)
    for priority in (0, 9):
        bench.put(*[b"a"] * 10, priority=priority)
    paid = cost(counted, lambda: bench.take(8))
    # The first window of all is read before it is known that there is ageing.
    assert (paid.point_reads, paid.range_reads, paid.rows, paid.round_trips) == (3, 1 + 10, 8 + 16, 4)
    assert paid.conflict_ranges == 0  # each message is a key


@pytest.mark.parametrize("backlog", [0, 20_000])
def test_costs_do_not_grow_with_the_backlog(bench, counted, backlog):
    """Ready, delayed and leased messages in other places are never read."""
    for start in range(0, backlog, 2000):
        for due_ms in (0, 2**41):
            bench.engine.publisher.publish([Publication("", "q", b"%d" % start, due_ms=due_ms)] * 2000)
    bench.put(b"a", b"b", priority=9)
    claimed = []
    assert cost(counted, lambda: bench.put(b"c")).round_trips == 1
    paid = cost(counted, lambda: claimed.extend(delivery.lease for delivery in bench.take(2)))
    assert (paid.rows, paid.round_trips, paid.conflict_keys, paid.conflict_ranges) == (2, 3, 2 + TOKEN, 1)
    paid = cost(counted, lambda: bench.engine.messages.ack(claimed))
    assert (paid.rows, paid.round_trips) == (2, 3)
    paid = cost(counted, lambda: promote_all(bench.engine))
    assert paid.rows == (2 if backlog else 0)  # which queues wait; the head of one


def test_a_task_id_costs_one_write_at_each_end(bench, counted):
    publications = [Publication("", "q", b"a", task_id=f"t{number}") for number in range(10)]
    paid = cost(counted, lambda: bench.engine.publisher.publish(publications))
    assert (paid.point_reads, paid.range_reads, paid.conflict_keys, paid.conflict_ranges) == (0, 0, TOKEN, 0)
    assert (paid.stamps, paid.atomics, paid.sets, paid.round_trips) == (10 + 10 + 1, 1, TOKEN, 1)
    leases = []
    paid = cost(counted, lambda: leases.extend(delivery.lease for delivery in bench.take()))
    assert (paid.clear_ranges, paid.clears, paid.sets, paid.round_trips) == (1, 0, 10 + TOKEN, 3)
    paid = cost(counted, lambda: bench.engine.messages.ack(leases))
    assert (paid.clear_ranges, paid.clears, paid.sets, paid.atomics, paid.round_trips) == (1, 10, TOKEN, 1, 3)


@pytest.mark.parametrize("backlog", [0, 20_000])
def test_cancelling_reads_the_tasks_own_messages_only(bench, counted, backlog):
    for start in range(0, backlog, 2000):
        bench.engine.publisher.publish(
            [Publication("", "q", b"%d" % start, task_id=f"{start}-{n}") for n in range(2000)]
        )
    bench.engine.publisher.publish([Publication("", "q", b"a", task_id="t"), Publication("", "p", b"a", task_id="t")])
    paid = cost(counted, lambda: bench.engine.inspect.find_task("t"))
    assert (paid.rows, paid.point_reads, paid.round_trips) == (2, 2, 3)
    paid = cost(counted, lambda: bench.engine.messages.cancel("t"))
    assert (paid.rows, paid.point_reads, paid.clears, paid.round_trips) == (2, 2, 2 + 2, 4)


def test_a_dedup_id_costs_one_read_and_two_writes(bench, counted):
    batch = [Publication("", "q", b"a", dedup_id=f"d{number}", dedup_window_ms=1000) for number in range(10)]
    paid = cost(counted, lambda: bench.engine.publisher.publish(batch))
    assert (paid.point_reads, paid.range_reads, paid.conflict_keys, paid.sets) == (10, 0, 10 + TOKEN, 2 * 10 + TOKEN)
    assert paid.round_trips == 3
    paid = cost(counted, lambda: bench.engine.publisher.publish(batch))
    assert (paid.point_reads, paid.writes, paid.round_trips) == (10, 0, 2)


def test_a_second_id_costs_the_same_again_and_no_round_trip(bench, counted):
    ids = {"dedup_window_ms": 1000, "once_window_ms": 1000}
    batch = [Publication("", "q", b"a", dedup_id=f"d{n}", once_id=f"o{n}", **ids) for n in range(10)]
    paid = cost(counted, lambda: bench.engine.publisher.publish(batch))
    assert (paid.point_reads, paid.range_reads, paid.conflict_keys, paid.sets) == (20, 0, 20 + TOKEN, 4 * 10 + TOKEN)
    assert paid.round_trips == 3


def test_the_marks_of_an_import_are_cleared_without_a_conflict(bench, counted):
    bench.engine.transfer.restore(b"one", [(b"mark", StoredMessage("q", "ready", b"a", 0))])
    paid = cost(counted, lambda: bench.engine.transfer.finish(b"one", {}))
    assert (paid.clear_ranges, paid.conflict_keys, paid.conflict_ranges) == (1, paid.commits * TOKEN, 0)


def test_many_limited_keys_are_asked_for_together(bench, counted):
    """Two round trips for 64 of them, not two for each; a message of each is claimed."""
    bench.engine.queues.change_control("q", every_key={"max_in_flight": 1})
    trips = []
    for number in (10, 200):
        for key in range(number):
            bench.put(b"x", b"y", key=f"{number}/{key}")
        claimed = []
        paid = cost(counted, lambda most=number, taken=claimed: taken.extend(bench.take(most)))
        assert len(claimed) == number
        trips.append(paid.round_trips)
    assert trips[1] < trips[0] + 15


@pytest.mark.parametrize("others", [0, 1_000])
def test_rescheduling_costs_the_same_in_a_queue_of_any_length(bench, counted, others):
    bench.put(*[b"x"] * (others + 1))
    (seen,) = bench.engine.inspect.page("q", View("ready"), 1).messages
    paid = cost(counted, lambda: bench.engine.messages.reschedule("q", seen.spot, 2**41, payload=b"y"))
    assert (paid.point_reads, paid.range_reads, paid.rows, paid.round_trips) == (1, 0, 0, 3)
    assert (paid.clears, paid.clear_ranges, paid.stamps) == (1, 0, 2)  # its row; the new one, and the duties' bell
    assert (paid.conflict_keys, paid.conflict_ranges) == (2 + TOKEN, 0)  # its row, read and taken


@pytest.mark.parametrize("number", [600, 6_000])
def test_a_part_of_a_purge_costs_the_same_in_a_queue_of_any_length(bench, counted, number):
    for _ in range(number // 600):
        bench.put(*[b"x"] * 600)
    _purged, mark = bench.engine.queues.purge_some("q")
    paid = cost(counted, lambda: bench.engine.queues.purge_some("q", mark))
    assert (paid.rows, paid.range_reads, paid.commits) == (500 if number > 600 else 100, 1, 1)


@pytest.mark.parametrize("number", [30, 3_000])
@pytest.mark.parametrize("prefix", ["", "b"])
def test_a_page_of_keys_costs_what_it_shows(bench, counted, number, prefix):
    keys = [f"{letter}{each}" for letter in "abc" for each in range(number // 3)]
    bench.engine.publisher.publish([Publication("", "q", b"x", key=key) for key in keys])
    paid = cost(counted, lambda: bench.engine.inspect.key_page("q", limit=5, prefix=prefix))
    assert (paid.rows, paid.range_reads, paid.round_trips, paid.commits) == (5, 3, 2, 0)
