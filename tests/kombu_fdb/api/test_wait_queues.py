"""Takers who stand in a wait queue (``combiner_client.py``): what they leave, and what they must not miss."""

from collections.abc import Callable

import pytest
from kit.processes import until

from kombu_fdb import Broker
from kombu_fdb.api import consumer
from kombu_fdb.engine.scheduling import wait_queue
from kombu_fdb.model import Demand
from kombu_fdb.primitives.wakeup import Bell
from kombu_fdb.process.client import Client
from kombu_fdb.settings.location import locate, parse_url
from kombu_fdb.settings.options import Options
from kombu_fdb.testing.stores import MemoryStores

#: Less than it takes until an unattended demand is given up (``process/client_session.py``).
PATIENCE_S = 60.0

Processes = Callable[[], Broker]


@pytest.fixture
def process():
    """Each has a session of its own, and knows that q is contested."""
    options = Options(poll_interval=3600.0)
    clients = []

    def another():
        clients.append(Client(locate(parse_url("fdb+memory://lines"), options), options))
        broker = Broker(clients[-1])
        broker.connection.contention.contest(["q"])
        return broker

    with MemoryStores():
        yield another
        for client in clients:
            client.close()


def combiner(broker):
    """How many rows there are in lines."""
    engine = broker.connection.engine
    return len(engine.transactions.read(lambda work: work.tr.get_range(*engine.keys.all_wait_queues)))


def demands(broker):
    engine = broker.connection.engine
    return len(engine.transactions.read(lambda work: work.tr.get_range(*engine.keys.all_demands)))


def test_takes_leave_no_rows(process):
    broker = process()
    queue = broker.queue("q")
    for _ in range(10):
        queue.put("a")
        job = queue.take(timeout=PATIENCE_S)
        assert job is not None
        job.ack()
        assert queue.take(timeout=0.001) is None
    until(lambda: combiner(broker) == 0)
    assert demands(broker) <= 2, "the last ones go with the next, or with the session"


def test_any_number_may_be_asked_for(process):
    queue = process().queue("q")
    queue.put_many(["a", "b"])
    jobs = queue.take_many(10**12, timeout=PATIENCE_S)
    assert [job.payload for job in jobs] == [b"a", b"b"]


def test_who_waits_in_the_wait_queue_is_served_there_when_it_is_not_contested_any_more(process, threads):
    """Another thread of its connection has found no competitor there."""
    theirs, ours = process(), process()
    first = theirs.connection.engine
    demand = Demand(wait_queue.name(["q"]), first.sessions.open({}), first.messages.reserve(), 1)
    first.messages.join(demand)
    taken = threads.submit(ours.queue("q").take, PATIENCE_S)
    until(lambda: combiner(ours) == 2)
    ours.connection.contention._contested.clear()
    ours.queue("q").put_many(["a", "b"])
    sight, _ = first.messages.look(demand)
    first.messages.serve(demand, ["q"], sight.waiting)
    job = taken.result()
    assert job is not None
    assert job.payload == b"b"
    job.ack()


def test_a_take_that_is_interrupted_in_its_sleep_waits_no_longer(process, monkeypatch):
    broker = process()
    first = broker.connection.engine
    first.messages.join(Demand(wait_queue.name(["q"]), first.sessions.open({}), first.messages.reserve(), 1))
    monkeypatch.setattr(consumer, "Bell", InterruptedBell)
    with pytest.raises(KeyboardInterrupt):
        broker.queue("q").take(timeout=PATIENCE_S)
    until(lambda: combiner(broker) == 1)


class InterruptedBell(Bell):
    def wait(self, timeout_s):
        raise KeyboardInterrupt


def test_what_is_granted_as_the_time_runs_out_is_taken(process, monkeypatch):
    theirs, ours = process(), process()
    first = theirs.connection.engine
    demand = Demand(wait_queue.name(["q"]), first.sessions.open({}), first.messages.reserve(), 1)
    first.messages.join(demand)

    def grant_and_end(take, bell, _stopped):
        if combiner(ours) < 2:
            consumer.disarm(take.arm(bell.ring))
            return True
        theirs.queue("q").put_many(["a", "b"])
        first.messages.serve(demand, ["q"], first.messages.look(demand)[0].waiting)
        return False

    monkeypatch.setattr(consumer, "_sleep", grant_and_end)
    job = ours.queue("q").take(timeout=PATIENCE_S)
    assert job is not None
    assert job.payload == b"b"
    job.ack()
