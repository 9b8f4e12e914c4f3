"""BOUNDED: no public call takes longer than it promises, whatever the store does, however many transactions it makes.

Each call is made again and again, in a store that goes on as ever for a while and then has every answer wait until the
last moment, or none come (``kit/late.py``): after none of the call's transactions, after the first, and so on.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import pytest
from amqp.exceptions import NotFound
from kit.faces import Driven, Loop
from kit.late import Lateness, late_store
from kombu import Connection, Producer
from kombu.transport.virtual.base import UndeliverableWarning

from kombu_fdb import Broker, Job, KeyLimits, KombuFDBError, aio
from kombu_fdb.api.broker import Inspection, Topology, Transfer
from kombu_fdb.api.consumer import Consumer
from kombu_fdb.api.dead_letters import DeadLetters
from kombu_fdb.api.queue import Queue
from kombu_fdb.model import QueueControl
from kombu_fdb.process.client import Client
from kombu_fdb.routing.tables import Exchange, QueueDeclaration
from kombu_fdb.settings.location import locate, parse_url
from kombu_fdb.settings.options import Options
from kombu_fdb.store.retry import ENDING_S
from kombu_fdb.transport.batch import BatchPublishError
from kombu_fdb.transport.errors import CONNECTION_ERRORS

OPERATION_S = 1_000.0
PUBLISH_S = 3_000.0
CONNECT_S = 500.0
#: What a call is told to wait for jobs or messages.
WAIT_S = 2.0
#: What is no answer of the store's: pauses, a first look.
SLACK_S = 3.0
#: Transactions that no call exceeds.
MOST = 60
URLS = (f"fdb+memory://late{number}" for number in count())
OPTIONS = {
    "operation_timeout": OPERATION_S,
    "publish_timeout": PUBLISH_S,
    "connect_timeout": CONNECT_S,
    "session_ttl": 86_400.0,
    "undrained_timeout": 3_600.0,
    "poll_interval": 3_600.0,
}


class Stage:
    """A broker with something in every place. ``contested``: its takes stand in a wait queue."""

    def __init__(self, *, contested=False, suspects=0):
        options = Options(**OPTIONS)
        self.url = next(URLS)
        self.opened = []
        self.client = Client(locate(parse_url(self.url), options), options)
        self.broker = Broker(self.client)
        jobs = self.jobs = self.broker.queue("jobs")
        jobs.put_many(["dead", "mine", *map(str, range(5))], key="alice")
        jobs.take(0).bury(error="no")
        self.job = jobs.take(0)
        self.broker.declare("bound")
        self.broker.topology.declare_exchange(Exchange("x"))
        self.broker.topology.bind("bound", "x", "k")
        self.broker.queue("empty").put("a", task_id="task")
        self.broker.cancel("task")
        self.letters = jobs.dead_letters
        self.job_id, self.mark = jobs.peek()[0].message_id, jobs.mark()
        self.spot, self.letter = (self.broker.queue(each).page(1).messages[0].spot for each in ("jobs", "jobs.dead"))
        self.dumped = [(b"mark", each) for each in self.broker.transfer.dump("jobs")]
        self.client_session = self.client.session()
        if contested:
            for queues in (["jobs"], ["empty"], ["jobs", "empty"]):
                self.broker.connection.contention.contest(queues)
        for _ in range(suspects):
            self.client_session._suspect(self.broker.connection.engine.messages.reserve())

    def close(self):
        for broker in (self.broker, *self.opened):
            broker.close()
        self.client.close()


class Call(NamedTuple):
    """``most_s``: what it promises. ``walks``: part by part, each of which is bounded as a call is."""

    do: Callable[[Any], object]
    most_s: float = OPERATION_S
    walks: bool = False


def _in_block(stage, error=None):
    with suppress(ZeroDivisionError), stage.job:
        if error is not None:
            raise error


CALLS = {
    "Broker.open": Call(lambda s: s.opened.append(Broker.open(s.url, **OPTIONS)), CONNECT_S),
    "Broker.declare": Call(lambda s: s.broker.declare("other")),
    "Broker.queues": Call(lambda s: s.broker.queues()),
    "Broker.find": Call(lambda s: s.broker.find("task")),
    "Broker.spots": Call(lambda s: s.broker.spots("task")),
    "Broker.cancel": Call(lambda s: s.broker.cancel("task"), walks=True),
    "Broker.take": Call(lambda s: s.broker.take(["jobs", "empty"], WAIT_S), OPERATION_S + WAIT_S),
    "Broker.take_many": Call(lambda s: s.broker.take_many(["empty"], 5, WAIT_S), OPERATION_S + WAIT_S),
    "Queue.put": Call(lambda s: s.jobs.put("a", key="bob", dedup_id="a"), PUBLISH_S),
    "Queue.put_many": Call(lambda s: s.jobs.put_many(["a", "b"]), PUBLISH_S, walks=True),
    "Queue.take": Call(lambda s: s.broker.queue("empty").take(WAIT_S), OPERATION_S + WAIT_S),
    "Queue.take_many": Call(lambda s: s.jobs.take_many(2, 0)),
    "Consumer.__next__": Call(
        lambda s: next(s.broker.queue("empty").consume(timeout=WAIT_S), None), OPERATION_S + WAIT_S
    ),
    "Queue.stats": Call(lambda s: s.jobs.stats()),
    "Queue.count": Call(lambda s: s.jobs.count()),
    "Queue.keys": Call(lambda s: s.jobs.keys()),
    "Queue.peek": Call(lambda s: s.jobs.peek(5)),
    "Queue.page": Call(lambda s: s.jobs.page()),
    "Queue.each": Call(lambda s: list(s.jobs.each()), walks=True),
    "Queue.at": Call(lambda s: s.jobs.at(s.spot)),
    "Queue.find": Call(lambda s: s.jobs.find(s.job_id), walks=True),
    "Queue.consumers": Call(lambda s: s.jobs.consumers()),
    "Queue.snapshot": Call(lambda s: s.jobs.snapshot()),
    "Queue.declaration": Call(lambda s: s.jobs.declaration()),
    "Queue.pause": Call(lambda s: s.jobs.pause("alice"), walks=True),
    "Queue.resume": Call(lambda s: s.jobs.resume(), walks=True),
    "Queue.limit": Call(lambda s: s.jobs.limit("alice", max_in_flight=1), walks=True),
    "Queue.limits": Call(lambda s: s.jobs.limits("alice")),
    "Queue.unlimit": Call(lambda s: s.jobs.unlimit("alice"), walks=True),
    "Queue.limit_every_key": Call(lambda s: s.jobs.limit_every_key(rate=1), walks=True),
    "Queue.control": Call(lambda s: s.jobs.control(newcomer="first"), walks=True),
    "Queue.reset_control": Call(lambda s: s.jobs.reset_control(), walks=True),
    "Queue.move": Call(lambda s: s.jobs.move("bound"), walks=True),
    "Queue.move_part": Call(lambda s: s.jobs.move_part("bound", s.mark)),
    "Queue.delete": Call(lambda s: s.jobs.delete(s.job_id), walks=True),
    "Queue.reschedule": Call(lambda s: s.jobs.reschedule(s.spot, 5)),
    "Queue.purge": Call(lambda s: s.jobs.purge(), walks=True),
    "Queue.mark": Call(lambda s: s.jobs.mark()),
    "Queue.purge_part": Call(lambda s: s.jobs.purge_part()),
    "Queue.drop": Call(lambda s: s.broker.queue("bound").drop(), walks=True),
    "Job.ack": Call(lambda s: s.job.ack()),
    "Job.release": Call(lambda s: s.job.release(1)),
    "Job.bury": Call(lambda s: s.job.bury(error="no")),
    "Job.extend": Call(lambda s: s.job.extend()),
    "Job.__exit__": Call(lambda s: _in_block(s, ZeroDivisionError)),
    "DeadLetters.count": Call(lambda s: s.letters.count(by="key"), walks=True),
    "DeadLetters.list": Call(lambda s: s.letters.list(), walks=True),
    "DeadLetters.get": Call(lambda s: s.letters.get(s.job_id), walks=True),
    "DeadLetters.each": Call(lambda s: list(s.letters.each()), walks=True),
    "DeadLetters.replay": Call(lambda s: s.letters.replay(), walks=True),
    "DeadLetters.discard": Call(lambda s: s.letters.discard(), walks=True),
    "DeadLetters.replay_changed": Call(lambda s: s.letters.replay_changed(s.letter, b"new")),
    "DeadLetters.replay_part": Call(lambda s: s.letters.replay_part()),
    "DeadLetters.discard_part": Call(lambda s: s.letters.discard_part()),
    "Inspection.facts": Call(lambda s: s.broker.inspect.facts(["jobs", "bound"]), walks=True),
    "Inspection.sessions": Call(lambda s: s.broker.inspect.sessions(held=True)),
    "Inspection.totals": Call(lambda s: s.broker.inspect.totals()),
    "Inspection.key_totals": Call(lambda s: s.broker.inspect.key_totals(), walks=True),
    "Inspection.samples": Call(lambda s: s.broker.inspect.samples("hour")),
    "Inspection.set_aside": Call(lambda s: s.broker.inspect.set_aside()),
    "Topology.exchanges": Call(lambda s: s.broker.topology.exchanges()),
    "Topology.bindings": Call(lambda s: s.broker.topology.bindings()),
    "Topology.route": Call(lambda s: s.broker.topology.route("x", "k")),
    "Topology.declare_exchange": Call(lambda s: s.broker.topology.declare_exchange(Exchange("y"))),
    "Topology.delete_exchange": Call(lambda s: s.broker.topology.delete_exchange("x")),
    "Topology.bind": Call(lambda s: s.broker.topology.bind("jobs", "x", "k")),
    "Topology.unbind": Call(lambda s: s.broker.topology.unbind("bound", "x", "k")),
    "Transfer.dump": Call(lambda s: list(s.broker.transfer.dump("jobs")), walks=True),
    "Transfer.dedups": Call(lambda s: list(s.broker.transfer.dedups()), walks=True),
    "Transfer.restore": Call(lambda s: s.broker.transfer.restore(b"id", s.dumped), PUBLISH_S),
    "Transfer.restore_dedups": Call(lambda s: s.broker.transfer.restore_dedups([("", "jobs", "a", 2**41)])),
    "Transfer.restore_queue": Call(lambda s: s.broker.transfer.restore_queue(QueueDeclaration("other"))),
    "Transfer.restore_control": Call(lambda s: s.broker.transfer.restore_control("jobs", QueueControl()), walks=True),
    "Transfer.restore_limits": Call(
        lambda s: s.broker.transfer.restore_limits("jobs", "alice", KeyLimits()), walks=True
    ),
    "Transfer.restore_binding": Call(lambda s: s.broker.transfer.restore_binding("jobs", "x", "k")),
    "Transfer.finished": Call(lambda s: s.broker.transfer.finished(b"id")),
    "Transfer.finish": Call(lambda s: s.broker.transfer.finish(b"id", {}), walks=True),
}

#: Those that ask the store for nothing, or are another call by another name.
ELSEWHERE = {
    "Broker.close": "among the ENDS",
    "Broker.on": "opens nothing",
    "Broker.of": "opens nothing",
    "Broker.queue": "asks nothing",
    "Broker.dead_letters": "asks nothing",
    "Broker.consume": "asks nothing",
    "Queue.consume": "asks nothing",
    "Consumer.stop": "asks nothing",
}
KINDS = (Broker, Queue, Consumer, Job, DeadLetters, Inspection, Topology, Transfer)


def test_no_public_call_is_left_out():
    verbs = {
        f"{kind.__name__}.{name}"
        for kind in KINDS
        for name, member in inspect.getmembers(kind, callable)
        if not name.startswith("_")
    }
    assert verbs - CALLS.keys() == ELSEWHERE.keys()
    assert {name for name in CALLS if name.rpartition(".")[2][:2] != "__"} <= verbs


def measure(store, prepare, call, lateness, after):
    """How long it took. ``store.begun`` tells of how many transactions it consisted."""
    store.turn(None)
    stage = prepare()
    store.turn(lateness, after=after)
    began = store.monotonic()
    with suppress(
        KombuFDBError, BatchPublishError, *CONNECTION_ERRORS
    ):  # that it did not answer, or a moment too late for the rest
        call.do(stage)
    took_s, begun = store.monotonic() - began, store.begun
    store.turn(None)
    stage.close()
    store.begun = begun
    return took_s


def overdue(store, prepare, call):
    """In which weather it broke its promise."""
    found = []
    measure(store, prepare, call, None, 0)
    number = store.begun
    assert 0 < number < MOST
    for lateness in Lateness:
        if call.walks and lateness is Lateness.LATE:
            continue
        for after in range(number):
            took_s = measure(store, prepare, call, lateness, after)
            if took_s > call.most_s + SLACK_S:
                found.append(f"{took_s:.0f} s, not {call.most_s:.0f}: {lateness.value} after {after} transactions")
    return found


class Awaited(Stage):
    """The same through the other face."""

    def __init__(self):
        super().__init__(contested=True, suspects=3)
        self.loop = Loop()
        self.sync = self.broker
        self.broker = Driven(aio.Broker(self.sync), self.loop)
        self.jobs = self.broker.queue("jobs")
        self.job = self.jobs.take(0)

    def close(self):
        super().close()
        self.loop.close()


# -- Kombu's --------------------------------------------------------------------------------------------------------


class Connected:
    """A connection with a channel that holds a message, and may consume."""

    def __init__(self, *, consumes="", suspects=0, **options):
        self.connection = Connection(next(URLS), transport_options={**OPTIONS, **options}, connect_timeout=CONNECT_S)
        self.transport = self.connection.transport
        self.channel = channel = self.connection.default_channel
        channel.exchange_declare("x")
        channel.queue_declare("q")
        channel.queue_bind("q", "x", "k")
        channel.queue_declare("empty")
        for body in ("held", "a", "b"):
            channel.basic_publish(channel.prepare_message(body), "x", "k")
        self.message = channel.basic_get("q")
        self.client = channel.client
        for _ in range(suspects):
            self.client.session()._suspect(channel.engine.messages.reserve())
        self.got = []
        if consumes:
            channel.basic_consume(consumes, False, self.got.append, "tag")

    def drain(self):
        with suppress(TimeoutError):
            self.connection.drain_events(timeout=WAIT_S)

    def close(self):
        self.connection.close()
        self.client.close()


def _batch(stage):
    producer = Producer(stage.channel)
    with producer.batch():
        for body in "ab":
            producer.publish(body, exchange="x", routing_key="k")


def _publish_unroutable(stage):
    with warnings.catch_warnings(category=UndeliverableWarning, action="ignore"):
        stage.channel.basic_publish(stage.channel.prepare_message("a"), "x", "other")


def _consume_undeclared(stage):
    with suppress(NotFound):
        stage.channel.basic_consume("none", False, stage.got.append)


VERBS = {
    "exchange_declare": Call(lambda s: s.channel.exchange_declare("y")),
    "exchange_declare, passive": Call(lambda s: s.channel.exchange_declare("x", passive=True)),
    "exchange_delete": Call(lambda s: s.channel.exchange_delete("x")),
    "get_exchanges": Call(lambda s: s.channel.get_exchanges()),
    "get_table": Call(lambda s: s.channel.get_table("x")),
    "list_bindings": Call(lambda s: list(s.channel.list_bindings())),
    "typeof": Call(lambda s: s.channel.typeof("x")),
    "queue_declare": Call(lambda s: s.channel.queue_declare("other")),
    "queue_declare, passive": Call(lambda s: s.channel.queue_declare("q", passive=True)),
    "queue_declare, exclusive": Call(lambda s: s.channel.queue_declare(exclusive=True)),
    "queue_delete": Call(lambda s: s.channel.queue_delete("q"), walks=True),
    "queue_bind": Call(lambda s: s.channel.queue_bind("empty", "x", "k")),
    "queue_unbind": Call(lambda s: s.channel.queue_unbind("q", "x", "k")),
    "queue_purge": Call(lambda s: s.channel.queue_purge("q"), walks=True),
    "after_reply_message_received": Call(lambda s: s.channel.after_reply_message_received("q"), walks=True),
    "basic_publish": Call(lambda s: s.channel.basic_publish(s.channel.prepare_message("a"), "x", "k"), PUBLISH_S),
    "basic_publish, timeout": Call(
        lambda s: s.channel.basic_publish(s.channel.prepare_message("a"), "x", "k", timeout=OPERATION_S)
    ),
    "basic_publish, unroutable": Call(_publish_unroutable, 2 * PUBLISH_S),  # a second one, to the deadletter_queue
    "batch": Call(_batch, PUBLISH_S, walks=True),
    "basic_get": Call(lambda s: s.channel.basic_get("q")),
    "basic_get, no_ack": Call(lambda s: s.channel.basic_get("q", no_ack=True)),
    "basic_get, empty": Call(lambda s: s.channel.basic_get("empty")),
    "basic_consume": Call(lambda s: s.channel.basic_consume("q", False, s.got.append)),
    "basic_consume, undeclared": Call(_consume_undeclared),
    "basic_ack": Call(lambda s: s.message.ack()),
    "basic_reject": Call(lambda s: s.message.reject()),
    "basic_reject, requeue": Call(lambda s: s.message.requeue()),
    "basic_recover": Call(lambda s: s.channel.basic_recover(requeue=True)),
    "drain_events": Call(lambda s: s.drain(), OPERATION_S + WAIT_S),
    "connect": Call(lambda s: s.transport.establish_connection(), CONNECT_S),
}


def _connected(name):
    consumes = "empty" if name == "drain_events" else ""
    options = {"deadletter_queue": "q"} if "unroutable" in name else {}
    return partial(Connected, suspects=3, consumes=consumes, **options)


# -- ends ------------------------------------------------------------------------------------------------------------


class Ending(Connected):
    """With two consumers, and messages in every state."""

    def __init__(self):
        super().__init__(suspects=1)
        self.broker = Broker(self.client)
        self.broker.queue("jobs").put_many("abc")
        self.jobs = self.broker.take_many(["jobs"], 2, 0)
        self.client.acks.append(self.jobs.pop().lease)
        self.channel.queue_declare(exclusive=True)
        for queue in ("q", "empty"):
            self.channel.basic_consume(queue, False, self.got.append)
        while not self.got:
            self.connection.drain_events(timeout=WAIT_S)
        self.channel.client.attempted.update(self.channel.qos._held.leases.values())

    def close(self):
        self.broker.close()
        super().close()


ENDS = {
    "Broker.close": Call(lambda s: s.broker.close(), ENDING_S, walks=True),
    "Channel.close": Call(lambda s: s.channel.close(), ENDING_S, walks=True),
    "Connection.close": Call(lambda s: s.connection.close(), ENDING_S, walks=True),
    "Client.close": Call(lambda s: s.client.close(), ENDING_S, walks=True),
}


# -- all of them -----------------------------------------------------------------------------------------------------

TAKES = [name for name in CALLS if "take" in name or "next" in name]
CLUSTER, FILE = False, True
#: Where writers take turns no take stands in a wait queue; and there a drain asks the store, not the receiver.
NET = [
    *[("alone", CLUSTER, Stage, CALLS, name) for name in CALLS if name not in TAKES],
    *[("alone", where, partial(Stage, suspects=3), CALLS, name) for where in (CLUSTER, FILE) for name in TAKES],
    *[("contested", CLUSTER, partial(Stage, contested=True, suspects=3), CALLS, name) for name in TAKES],
    *[("awaited", CLUSTER, Awaited, CALLS, name) for name in CALLS if name in TAKES or name.startswith("Job.")],
    *[("Kombu", FILE if name == "drain_events" else CLUSTER, _connected(name), VERBS, name) for name in VERBS],
    *[("end", where, Ending, ENDS, name) for where in (CLUSTER, FILE) for name in ENDS],
]


@pytest.mark.parametrize(
    ("turns", "prepare", "call"),
    [
        pytest.param(turns, prepare, table[name], id=f"{name}-{how}-{'file' if turns else 'cluster'}")
        for how, turns, prepare, table, name in NET
    ],
)
def test_a_call_ends_in_time(monkeypatch, turns, prepare, call):
    with late_store(monkeypatch, writers_take_turns=turns) as store:
        assert overdue(store, prepare, call) == []
