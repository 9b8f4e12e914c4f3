"""What a verb's transaction does about what is in its way."""

import pytest

from kombu_fdb.errors import FormatError, StoreFull, StoreUnavailable


def full(*, fills=False, moves=False):
    error = StoreFull()
    error.fills, error.moves = fills, moves
    return error


def refused(bench, error, times, asked):
    """What becomes of a write that a full disk refuses so many times, where room can be made."""

    def verb(work):
        asked.append("write")
        if asked.count("write") <= times:
            raise error
        return "written"

    def make_room():
        asked.append("make room")
        return True

    bench.engine.transactions.make_room = make_room
    return bench.engine.transactions.write(verb)


def test_what_a_full_disk_refused_is_written_once_there_is_room(bench):
    asked = []
    assert refused(bench, full(), 2, asked) == "written"
    assert asked == ["write", "make room", "write", "make room", "write"]


@pytest.mark.parametrize("what", [{"fills": True}, {"moves": True}, {"fills": True, "moves": True}])
def test_for_what_fills_the_disk_no_room_is_made(bench, what):
    asked = []
    with pytest.raises(StoreFull):
        refused(bench, full(**what), 1, asked)
    assert asked == ["write"]


def test_without_room_the_error_is_the_callers(bench):
    runs = []

    def verb(work):
        runs.append(1)
        raise full()

    with pytest.raises(StoreFull):
        bench.engine.transactions.write(verb)
    assert runs == [1]


@pytest.mark.parametrize(("in_a_call", "left_s", "times"), [(False, 5, 4), (True, 5, 4), (True, 1, 2)])
def test_all_runs_together_have_the_time_of_one(bench, *, in_a_call, left_s, times):
    """Others may take the room as quickly as it is made, here in two seconds: who is late runs no more.

    Nor has a write more time than is left of the call that it belongs to.
    """
    transactions, runs = bench.engine.transactions, list[int]()

    def verb(work):
        runs.append(1)
        raise full()

    def make_room():
        bench.clock.advance(2)
        return len(runs) < 9

    def call():
        bench.clock.advance(transactions.environment.call_s - left_s)
        transactions.write(verb)

    transactions.make_room = make_room
    with pytest.raises(StoreUnavailable):
        transactions.as_one(call) if in_a_call else transactions.write(verb, left_s)
    assert len(runs) == times


def test_the_moment_of_a_write_is_its_callers_if_he_gives_one(bench):
    write = bench.engine.transactions.write
    assert write(lambda work: work.now_ms, now_ms=7) == 7
    assert write(lambda work: work.now_ms) == bench.clock.wall_ms()


class Steps:
    """Two duties' steps, one of which has a message in its way."""

    def __init__(self, error):
        self.error = error
        self.tried = []

    def bad(self, work, limit):
        self.tried.append(limit)
        if limit > 1:
            raise self.error
        return limit

    def good(self, work, limit):
        return limit


@pytest.mark.parametrize("error", [FormatError("odd"), OverflowError(), KeyError(), TypeError(), ValueError()])
def test_a_step_is_halved_down_to_the_message_in_the_way_and_other_steps_are_not(bench, error):
    steps = Steps(error)
    assert bench.engine.transactions.part(steps.bad, 8) == 1
    assert steps.tried == [8, 4, 2, 1]
    assert bench.engine.transactions.part(steps.good, 8) == 8
    assert bench.engine.transactions.part(steps.bad, 8) == 1
    assert steps.tried[4:] == [2, 1]


def test_what_is_no_messages_fault_is_not_halved(bench):
    steps = Steps(RuntimeError("a bug"))
    with pytest.raises(RuntimeError):
        bench.engine.transactions.part(steps.bad, 8)
    assert steps.tried == [8]
