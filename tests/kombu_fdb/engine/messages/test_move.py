"""Move, dump and restore at their seams: races with claims and with each other, and what they cost."""

import pytest
from kit.conformance.invariants import messages
from kit.conformance.queue import Bench
from kit.costs import CountingDatabase
from kit.faults import FaultyDatabase

from kombu_fdb.engine.messages import move as module
from kombu_fdb.errors import QueueError
from kombu_fdb.model import KeyLimits, Publication, StoredMessage, View
from kombu_fdb.routing.tables import QueueDeclaration

IMPORT = b"import".ljust(16)


def stored(number):
    mark = number.to_bytes(16, "big")
    state, due_ms = ("delayed", 2**41) if number % 2 else ("ready", 0)
    return mark, StoredMessage(
        "q", state, b"%d" % number, 3, due_ms, "k", number % 2 == 0, message_id=mark, task_id=f"t{number}"
    )


def fill(bench, number=3):
    for key in ("", "alice"):
        bench.engine.publisher.publish(
            [Publication("", "q", b"%d" % each, key=key, task_id=f"{key}{each}") for each in range(number)]
        )
    bench.engine.publisher.publish([Publication("", "q", b"later", due_ms=2**41, key="alice", task_id="later")])


def test_parts_of_a_move_take_what_had_come_and_leave_the_rest(bench):
    fill(bench)
    mark = bench.engine.queues.last("q")
    fill(bench, 300)
    moved = 0
    for _ in range(50):
        part, mark = bench.engine.messages.move_some("q", "other", mark)
        moved += part
        if not mark:
            break
    assert (moved, mark) == (7, b"")
    assert bench.counts("other") == (6, 1, 0)
    assert bench.counts() == (600, 1, 0)


def test_a_message_that_is_claimed_meanwhile_is_not_moved(bench):
    fill(bench)
    other, taken = bench.another(), []
    session = other.sessions.open({})
    bench.during(
        lambda: bench.engine.messages.move("q", "other"),
        lambda: taken.extend(other.messages.claim(session, ["q"], 1)),
    )
    assert len(taken) == 1
    assert bench.counts("other")[0] == 5
    assert len(messages(bench.engine)) == 7


def test_two_moves_at_once_move_each_message_once(bench):
    fill(bench)
    other = bench.another()
    bench.during(lambda: bench.engine.messages.move("q", "here", 2), lambda: other.messages.move("q", "there", 2))
    assert bench.counts("here")[0] == bench.counts("there")[0] == 2
    assert len(messages(bench.engine)) == 7


def test_two_restores_at_once_store_each_message_once(bench):
    batch = [stored(number) for number in range(4)]
    other = bench.another().transfer
    assert bench.during(lambda: bench.engine.transfer.restore(IMPORT, batch), lambda: other.restore(IMPORT, batch)) == 0
    assert bench.counts() == (2, 2, 0)


def test_a_message_moved_into_itself_is_refused(bench):
    with pytest.raises(QueueError):
        bench.engine.messages.move("q", "q")


def test_a_moved_message_is_found_and_cancelled_by_its_task(bench):
    fill(bench)
    bench.engine.messages.move("q", "other")
    assert {
        each.queue for each in bench.engine.inspect.find_task("alice1") + bench.engine.inspect.find_task("later")
    } == {"other"}
    assert len(bench.engine.messages.cancel("later")) == 1


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_dead_letter_that_is_moved_to_a_working_queue_has_its_key_and_priority_there(bench, in_parts):
    """So the limits of its key hold for it."""
    bench.put(b"a", b"b", key="k", priority=3)
    dead = bench.take()
    bench.engine.messages.reject([each.lease for each in dead])
    bench.engine.queues.limit("q", "k", KeyLimits(max_in_flight=1))
    if in_parts:
        assert bench.engine.messages.move_some("q.dead", "q", bench.engine.queues.last("q.dead"))[0] == 2
    else:
        assert bench.engine.messages.move("q.dead", "q") == 2
    bench.put(b"urgent", priority=9)
    assert [(each.key, each.payload) for each in bench.take()] == [("", b"urgent"), ("k", b"a")]


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("due_ms", [0, 2**41])
def test_the_target_caps_the_priority_of_what_is_moved_there_and_it_counts_again_elsewhere(bench, due_ms, in_parts):
    def move(source, target):
        if in_parts:
            bench.engine.messages.move_some(source, target, bench.engine.queues.last(source))
        else:
            bench.engine.messages.move(source, target)

    bench.engine.queues.declare(QueueDeclaration("few", arguments={"x-max-priority": 1}))
    bench.put(b"7", priority=7, due_ms=due_ms)
    bench.engine.publisher.publish([Publication("", "few", b"1", 1, due_ms)])
    move("q", "few")
    assert [each.priority for each in ranks(bench, "few", due_ms)] == [1, 1]
    bench.engine.publisher.publish([Publication("", "q", b"5", 5, due_ms)])
    move("few", "q")
    assert sorted((each.priority, each.message.payload) for each in ranks(bench, "q", due_ms)) == [
        (1, b"1"),
        (5, b"5"),
        (7, b"7"),
    ]


def ranks(bench, queue, due_ms):
    return bench.engine.inspect.page(queue, View("delayed" if due_ms else "ready"), 10).messages


def test_dead_letters_moved_among_dead_letters_stay_in_order_and_keep_their_priority(bench):
    for priority in (3, 9):
        bench.put(b"%d" % priority, priority=priority)
        bench.engine.messages.reject([each.lease for each in bench.take()])
    bench.engine.messages.move("q.dead", "other.dead")
    assert [each.payload for each in bench.engine.inspect.peek("other.dead", 2)] == [b"3", b"9"]
    bench.engine.messages.move("other.dead", "q")
    assert [each.payload for each in bench.take()] == [b"9", b"3"]


def test_nothing_is_moved_to_a_name_that_no_queue_can_have(bench):
    fill(bench)
    for name in ("\u00fc" * 128, "x" * 256):
        with pytest.raises(QueueError, match="too long"):
            bench.engine.messages.move("q", name)
        with pytest.raises(QueueError, match="too long"):
            bench.engine.messages.move_some("q", name, bench.engine.queues.last("q"))
    assert bench.engine.messages.move("q", "x" * 255 + ".dead") == 7


def test_a_key_that_was_emptied_by_a_move_has_its_turn_again(bench):
    fill(bench)
    (first,) = bench.take(1)
    bench.engine.messages.move("q", "other")
    bench.engine.publisher.publish([Publication("", "q", b"new", key="alice")])
    assert [each.payload for each in bench.take(5)] == [b"new"]
    assert bench.engine.messages.ack([first.lease]) == [True]


def test_a_move_takes_as_much_as_a_transaction_holds(bench, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 10)
    fill(bench)
    assert bench.engine.messages.move("q", "other") == 7


@pytest.mark.parametrize("backlog", [0, 1_000])
def test_what_a_move_costs_does_not_grow_with_the_queues(backlog):
    counted = CountingDatabase(FaultyDatabase())
    bench = Bench(counted)
    for queue in ("q", "other"):
        bench.engine.publisher.publish([Publication("", queue, b"x")] * (backlog + 1))
    counted.reset()
    assert bench.engine.messages.move("q", "other", 1) == 1
    paid = counted.total()
    assert (paid.range_reads, paid.point_reads, paid.conflict_keys, paid.conflict_ranges) == (3, 0, 2, 0)
    assert paid.round_trips == 3


def test_dump_and_restore_give_the_same_order_back(bench):
    for number in range(60):
        key = ["", "zoe", "adam"][number % 3]
        bench.engine.publisher.publish([Publication("", "q", b"%d" % number, key=key, priority=number % 2)])
    before = list(bench.engine.transfer.dump("q"))
    bench.engine.queues.purge("q")
    bench.engine.transfer.restore(IMPORT, [(each.message_id, each) for each in before])
    assert list(bench.engine.transfer.dump("q")) == before


def test_a_finished_import_leaves_no_marks_however_often_it_is_finished(bench):
    transfer = bench.engine.transfer
    assert transfer.finished(IMPORT) is None
    transfer.restore(IMPORT, [stored(number) for number in range(4)])
    for _ in range(2):
        transfer.finish(IMPORT, {"messages": 4})
    assert transfer.finished(IMPORT) == {"messages": 4}
    keys = bench.engine.keys
    assert bench.engine.transactions.read(lambda work: work.tr.get_range(*keys.all_imported(IMPORT))) == []


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5, 9])
def test_no_more_are_moved_than_asked_for_in_however_many_parts(bench, monkeypatch, limit):
    monkeypatch.setattr(module, "MESSAGES_PER_TRANSACTION", 2)
    bench.put(*(b"%d" % number for number in range(7)))
    assert bench.engine.messages.move("q", "other", limit) == min(limit, 7)
    assert bench.counts("other")[0] == min(limit, 7)
