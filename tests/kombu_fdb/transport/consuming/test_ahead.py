"""Consumers without a prefetch: what they have ahead, and what their channel sees of it."""

import contextlib

import pytest

from kombu_fdb.model import Delivery, Lease
from kombu_fdb.transport.consuming import dispatch
from kombu_fdb.transport.consuming.dispatch import Credit, Dispatch, Subscription


class Worked:
    """A dispatch of one consumer, whose messages take their time."""

    def __init__(self, *, no_ack=False):
        self.now = 0.0
        self.dispatch = Dispatch(64, 0.01, 5.0, lambda: self.now)
        self.credit = Credit()
        self.numbers = iter(range(10_000))
        self.dispatch.add(Subscription("tag", "q", self.credit, None, None, no_ack, print, print, transient=False))

    def claim(self):
        limit = self.dispatch.plan({"q"}, self.now).limit
        found = [Delivery(Lease(b"s", next(self.numbers)), "q", b"", b"", 0, ()) for _ in range(limit)]
        self.dispatch.arriving += found
        self.dispatch.place()
        return limit

    def work_off(self, took_s, messages):
        """The most it had ahead meanwhile."""
        most = 0
        for _ in range(messages):
            hand = []
            self.claim()
            most = max(most, len(self.credit.inbox))
            assert self.dispatch.next(hand) is not None
            if self.credit.is_low(self.dispatch.window):
                self.claim()
            self.now += took_s
        return most


@pytest.mark.parametrize("no_ack", [False, True])
@pytest.mark.parametrize(("took_s", "most"), [(0.5, 1), (0.02, 5), (0.001, 64), (0.0, 64)])
def test_a_consumer_has_ahead_what_it_works_off_in_a_tenth_of_a_second(no_ack, took_s, most):
    worked = Worked(no_ack=no_ack)
    assert worked.work_off(took_s, 500) == most
    assert worked.work_off(0.5, 70) <= most
    assert worked.work_off(0.5, 10) == 1, "it has slowed down"


def test_a_consumer_without_acks_is_served_beside_one_with_a_prefetch():
    """By a claim at each message that it takes, as nothing else tells of its room."""
    worked = Worked(no_ack=True)
    worked.credit.prefetch = 2
    assert worked.work_off(0.5, 3) == 1
    assert worked.dispatch.next([]) is not None
    assert worked.credit.is_low(worked.dispatch.window)


def test_the_first_message_tells_nothing():
    worked = Worked()
    assert worked.claim() == 1


def publish(connection, number):
    for each in range(number):
        connection.default_channel.basic_publish(str(each), "", "q")


def test_slow_consumers_share_a_queue(connect, monkeypatch):
    monkeypatch.setattr(dispatch, "AHEAD_S", 1e-9)  # whatever they take, it is long
    connections = [connect() for _ in range(3)]
    publish(connections[0], 24)
    received = [[], [], []]
    for connection, mine in zip(connections, received, strict=True):
        connection.default_channel.basic_consume("q", False, mine.append)
    while sum(map(len, received)) < 24:
        for connection in connections:
            with contextlib.suppress(TimeoutError):
                connection.drain_events(timeout=0)
    assert min(map(len, received)) >= 3, [len(mine) for mine in received]


class TestSimpleQueue:
    @pytest.fixture
    def queue(self, connect, until):
        """One of ten messages was had, another one waits in the inbox, and no turn is under way, or follows by itself.

        A message that is just being claimed, or released, is in no inbox: the channel would be given the one behind it.
        """
        connection = connect(undrained_timeout=3600.0, poll_interval=3600.0)
        queue = connection.SimpleQueue("q")
        for number in range(10):
            queue.put(number)
        assert queue.get(timeout=60).payload == 0
        fetcher = connection.transport.receiver.fetcher
        until(lambda: fetcher.idle and fetcher.dispatch.waiting(queue.channel.credit, "q"))
        return queue

    def test_its_size(self, queue):
        assert queue.qsize() == 9

    def test_what_can_be_had_at_once_is_had_in_order(self, queue):
        found = [queue.get_nowait() for _ in range(9)]
        assert [message.payload for message in found] == list(range(1, 10))
        with pytest.raises(queue.Empty):
            queue.get_nowait()
        found[0].reject(requeue=True)
        assert queue.get(timeout=60).payload == 1

    def test_what_was_cleared_is_gone(self, queue):
        assert queue.clear() == 9
        with pytest.raises(queue.Empty):
            queue.get(timeout=0.1)
        assert queue.qsize() == 0

    def test_without_acks(self, queue, until):
        message = queue.channel.basic_get("q", no_ack=True)
        assert message.body == b"1"
        assert not queue.channel.qos.holds(message.delivery_tag)
        queue.channel.close()
        until(lambda: queue.channel.engine.inspect.counts("q").leased == 0)
        assert queue.channel.engine.inspect.counts("q").ready == 9, "0 and those behind 1"
