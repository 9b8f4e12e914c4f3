"""The bookkeeping of consumers and credit, without threads and store."""

import pytest
from kit.interruption import interrupt, runs_handlers

from kombu_fdb.model import Delivery, Lease
from kombu_fdb.transport.consuming import dispatch as dispatch_module
from kombu_fdb.transport.consuming.dispatch import Arrival, Credit, Dispatch, Subscription

GROUP_S = 0.002
PATIENCE_S = 5.0
HAND_OUT = frozenset([str(dispatch_module.__file__)])


class Channel:
    """All of it that is looked at here."""

    def __init__(self, prefetch=0):
        self.credit = Credit()
        self.credit.prefetch = prefetch


def subscription(channel, queue="q", **options):
    settings = {"no_ack": False, "transient": False, **options}
    return Subscription(
        f"{queue}-{id(settings)}",
        queue,
        channel.credit,
        ack=print,
        open=None,
        callback=print,
        on_cancel=print,
        **settings,
    )


def deliveries(number, queue="q", first=0):
    return [Delivery(Lease(b"s", first + each), queue, b"", b"", 0, ()) for each in range(number)]


def place(dispatch, found):
    """The leases of those for which none has room."""
    dispatch.arriving += found
    dispatch.place()
    return withdrawn(dispatch)


def withdrawn(dispatch):
    leases = dispatch.to_release()
    dispatch.released(leases)
    return leases


@pytest.fixture
def dispatch():
    return Dispatch(window=10, group_s=GROUP_S, patience_s=PATIENCE_S)


def test_claims_only_hungry_queues(dispatch):
    one = Channel(4)
    dispatch.add(subscription(one, "a"))
    dispatch.add(subscription(one, "b"))
    assert dispatch.plan(set(), 0).queues == []
    assert dispatch.plan({"b", "unknown"}, 0).queues == ["b"]


def test_waiting_and_held_take_room(dispatch):
    one = Channel(4)
    dispatch.add(subscription(one))
    assert dispatch.plan({"q"}, 0).limit == 4
    assert place(dispatch, deliveries(4)) == []
    assert dispatch.plan({"q"}, 0).queues == []
    for _ in range(4):
        assert dispatch.next([])
    assert dispatch.next([]) is None
    assert dispatch.plan({"q"}, 0).queues == []
    for _ in range(3):
        one.credit.held.leases.popitem()
    assert dispatch.plan({"q"}, 0).limit == 3


def test_a_single_place_waits_for_others(dispatch):
    one = Channel(8)
    dispatch.add(subscription(one))
    place(dispatch, deliveries(7))
    plan = dispatch.plan({"q"}, 100.0, 100.0)
    assert plan.queues == []
    assert plan.again_s == pytest.approx(GROUP_S)
    assert dispatch.plan({"q"}, 100.0 + GROUP_S).limit == 1


def test_a_place_that_was_free_before_a_message_came_does_not_wait(dispatch):
    one = Channel(8)
    dispatch.add(subscription(one))
    place(dispatch, deliveries(7))
    assert dispatch.plan(set(), 100.0, 100.0).queues == []
    assert dispatch.plan({"q"}, 101.0).limit == 1


def test_a_single_place_waits_from_the_ack_that_made_it(dispatch):
    one = Channel(8)
    dispatch.add(subscription(one))
    place(dispatch, deliveries(7))
    plan = dispatch.plan({"q"}, 100.0, 100.0 - GROUP_S / 2)
    assert plan.queues == []
    assert plan.again_s == pytest.approx(GROUP_S / 2)
    assert dispatch.plan({"q"}, 100.0 + GROUP_S / 2, 100.0).limit == 1


@pytest.mark.parametrize("prefetch", [1, 2])
def test_a_small_prefetch_never_waits(dispatch, prefetch):
    one = Channel(prefetch)
    dispatch.add(subscription(one))
    place(dispatch, deliveries(prefetch - 1))
    assert dispatch.plan({"q"}, 0).limit == 1


def test_without_limit_the_window_bounds(dispatch):
    one = Channel()
    one.credit._ahead = 100  # it is that fast
    dispatch.add(subscription(one))
    assert dispatch.plan({"q"}, 0).limit == 10
    place(dispatch, deliveries(6))
    assert dispatch.plan({"q"}, 0).queues == [], "more than half of it waits"
    dispatch.next([])
    assert dispatch.plan({"q"}, 0).limit == 5


def test_a_full_channel_does_not_block_another(dispatch):
    tasks, control = Channel(2), Channel()
    dispatch.add(subscription(tasks, "tasks"))
    dispatch.add(subscription(control, "control", no_ack=True, transient=True))
    place(dispatch, deliveries(2, "tasks"))
    plan = dispatch.plan({"tasks", "control"}, 0)
    assert (plan.queues, plan.leaseless) == (["control"], {"control"})
    place(dispatch, deliveries(1, "control", 5))
    assert {arrival.delivery.queue for arrival in (dispatch.next([]), dispatch.next([]))} == {"tasks", "control"}


def test_leaseless_only_if_all_consumers_are(dispatch):
    one = Channel()
    dispatch.add(subscription(one, no_ack=True, transient=True))
    assert dispatch.plan({"q"}, 0).leaseless == {"q"}
    dispatch.add(subscription(one, no_ack=False, transient=True))
    assert dispatch.plan({"q"}, 0).leaseless == set()


def test_queues_take_turns(dispatch):
    one = Channel()
    for queue in "abc":
        dispatch.add(subscription(one, queue))
    firsts = []
    for _ in range(6):
        firsts += {dispatch.plan({"a", "b", "c"}, 0).queues[0] for _ in range(3)}
        dispatch.end_turn(firsts[-1])
    assert firsts == ["a", "b", "c", "a", "b", "c"], "who looks at a plan twice has not had two turns"


def test_queues_take_turns_whichever_channel_has_room(dispatch):
    """A channel of one queue and one of two take turns: the other queue used to be the first never, or always."""
    two, one = Channel(), Channel()
    dispatch.add(subscription(two, "a"))
    dispatch.add(subscription(two, "b"))
    dispatch.add(subscription(one, "a"))
    firsts = []
    for number in range(12):
        firsts.append(dispatch.plan({"a"} if number % 2 else {"a", "b"}, 0).queues[0])
        dispatch.end_turn(firsts[-1])
    assert firsts[::2].count("b") >= 5


def test_removed_consumer_leaves_its_messages(dispatch):
    one = Channel()
    first, second = subscription(one), subscription(one)
    dispatch.add(first)
    dispatch.add(second)
    place(dispatch, deliveries(4))
    dispatch.remove(first)
    assert len(withdrawn(dispatch)) == 2
    dispatch.remove(first)
    assert withdrawn(dispatch) == []
    assert len(one.credit.inbox) == 2
    dispatch.remove(second)
    assert len(withdrawn(dispatch)) == 2
    assert len(place(dispatch, deliveries(1, first=9))) == 1, "no home"


def test_lost_session(dispatch):
    one = Channel()
    dispatch.add(subscription(one))
    place(dispatch, deliveries(2))
    dispatch.drop_session(b"other")
    assert len(one.credit.inbox) == 2
    dispatch.drop_session(b"s")
    assert len(one.credit.inbox) == 0


def test_a_hand_out_that_is_interrupted_after_its_session_was_lost(dispatch):
    one, hand = Channel(), list[Arrival]()
    dispatch.add(subscription(one))
    place(dispatch, deliveries(1))
    dispatch.next(hand)
    dispatch.drop_session(b"s")
    assert dispatch.return_undelivered(hand[0]) is None
    assert (len(one.credit.inbox), len(one.credit.held)) == (0, 0), "another session has it"
    place(dispatch, [Delivery(Lease(b"next", 1), "q", b"", b"", 0, ())])
    dispatch.next(hand)
    assert dispatch.return_undelivered(hand[1]) is None
    assert len(one.credit.inbox) == 1


def test_a_message_that_was_taken_out_of_the_store_does_not_end_with_its_session(dispatch):
    """No other consumer can have it."""
    one, hand = Channel(), list[Arrival]()
    dispatch.add(subscription(one, no_ack=True, transient=True))
    place(dispatch, [each._replace(leased=False) for each in deliveries(1)])
    dispatch.next(hand)
    dispatch.drop_session(b"s")
    assert dispatch.return_undelivered(hand[0]) is None
    assert len(one.credit.inbox) == 1


def test_closed(dispatch):
    one = Channel()
    dispatch.add(subscription(one))
    place(dispatch, deliveries(2))
    dispatch.close()
    assert len(withdrawn(dispatch)) == 2
    assert len(place(dispatch, deliveries(3))) == 3
    assert dispatch.next([]) is None


def test_no_more_than_there_are_free_slots():
    dispatch, channel = Dispatch(64, 0.002, PATIENCE_S), Channel(prefetch=8)
    dispatch.add(subscription(channel))
    assert channel.credit.limit_slots(2)
    assert dispatch.plan({"q"}, 0).limit == 2
    place(dispatch, deliveries(1))
    assert dispatch.plan({"q"}, 0).limit == 1, "a claimed message takes its slot"
    assert dispatch.next([]) is not None
    assert dispatch.plan({"q"}, 0).limit == 1, "and keeps it when it was handed out"
    assert channel.credit.limit_slots(2), "one is free again"
    assert dispatch.plan({"q"}, 0).limit == 2


def test_a_hand_out_that_is_interrupted_anywhere_leaves_the_credit_as_it_was(dispatch):
    one, line = Channel(), 0
    dispatch.add(subscription(one))
    one.credit.limit_slots(3)
    place(dispatch, deliveries(2))
    where = "yes"
    while where:
        line += 1
        hand = []
        where = interrupt(lambda: dispatch.next(hand), line, HAND_OUT, strikes=runs_handlers)  # noqa: B023
        for arrival in hand:
            dispatch.return_undelivered(arrival)
        assert (len(one.credit.inbox), len(one.credit.held)) == (2, 0), where
        assert dispatch.plan({"q"}, 0).limit == 1, where
    assert line > 8
