"""``x-single-active-consumer`` is added to a queue, or removed, while the queue has consumers."""

import pytest
from kit.conformance.consumer import Consumer
from kit.processes import until
from kombu import Connection

from kombu_fdb.routing.tables import QueueDeclaration

#: Makes a client, and so a session, of its own in this process.
ANOTHER_PROCESS = {"ack_delay_ms": 2.5}


class Listener:
    """A consumer of "q" on a channel of its own, which holds one message at a time."""

    def __init__(self, connection):
        self.connection = connection
        self.channel = connection.channel()
        self.channel.basic_qos(0, 1, False)
        self.held = []
        self.channel.basic_consume("q", False, self.held.append, "tag")

    @property
    def bodies(self):
        drain(self.connection)
        return [int(message.body) for message in self.held]

    def ack(self):
        self.held[-1].ack()


def drain(connection):
    """Until nothing comes any more, and nothing is under way."""
    while True:
        try:
            connection.drain_events(timeout=0.01)
        except TimeoutError:
            if connection.transport.receiver.fetcher.idle:
                return


def declare(connection, *, single):
    arguments = {"x-single-active-consumer": True} if single else {}
    connection.default_channel.queue_declare("q", durable=True, arguments=arguments)


def publish(connection, *bodies):
    for body in bodies:
        connection.default_channel.basic_publish(str(body), "", "q")


@pytest.fixture
def connect(any_store):
    opened = []

    def connect(**options):
        opened.append(Connection(any_store, transport_options={"poll_interval": 0.2, **options}))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


def test_of_two_processes_one_is_served_from_then_on(connect):
    """ONE-ACTIVE."""
    operator = connect(ack_delay_ms=3.5)
    declare(operator, single=False)
    listeners = [Listener(connect()), Listener(connect(**ANOTHER_PROCESS))]
    assert [each.bodies for each in listeners] == [[], []]
    declare(operator, single=True)
    publish(operator, *range(4))
    until(lambda: any(each.bodies for each in listeners))
    active, other = sorted(listeners, key=lambda each: not each.held)
    active.ack()
    until(lambda: active.bodies == [0, 1])
    assert other.bodies == []
    active.connection.close()
    until(lambda: other.bodies == [1])
    other.ack()
    until(lambda: other.bodies == [1, 2])


def test_of_two_channels_one_is_served_from_then_on(connect):
    connection = connect()
    declare(connection, single=False)
    listeners = [Listener(connection), Listener(connection)]
    publish(connection, 0, 1)
    until(lambda: sorted(listeners[0].bodies + listeners[1].bodies) == [0, 1])
    for each in listeners:
        each.ack()
    declare(connection, single=True)
    publish(connection, 2, 3)
    until(lambda: any(len(each.bodies) == 2 for each in listeners))
    active, other = sorted(listeners, key=lambda each: -len(each.held))
    assert (active.bodies[1:], other.bodies[1:]) == ([2], [])
    active.ack()
    until(lambda: active.bodies[1:] == [2, 3])


def test_where_it_is_removed_the_others_are_served_though_the_active_one_is_full(connect):
    connection = connect()
    declare(connection, single=True)
    listeners = [Listener(connection), Listener(connection)]
    publish(connection, 0, 1)
    until(lambda: listeners[0].bodies == [0])
    assert listeners[1].bodies == []
    declare(connection, single=False)
    until(lambda: listeners[1].bodies == [1])


def test_its_line_ends(bench):
    """Each claims for itself when it has come to the front, and the wait queue of their other queue goes on."""
    bench.engine.queues.declare(QueueDeclaration("q"))
    consumers = [Consumer(bench, ["q", "r"], contested=True) for _ in range(3)]
    for each in consumers:
        each.turn()
        assert each.transport.fetcher._claiming.combiner.in_wait_queue
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-single-active-consumer": True}))
    bench.put(*[b""] * 20)
    served = {number: list[str]() for number in range(3)}
    for round_ in range(60):
        for number, each in enumerate(consumers):
            each.turn()
            served[number] += each.settle()
        if round_ == 30:
            bench.put(*[b""] * 30, queue="r")
        bench.clock.advance(0.1)
    assert [served[number].count("q") for number in range(3)] in ([20, 0, 0], [0, 20, 0], [0, 0, 20])
    assert sum(each.count("r") for each in served.values()) == 30
    assert all("q" not in each.transport.fetcher.dispatch.shared for each in consumers)
