"""Routing tables of several processes, each with its cache, against a plain model of exchanges and bindings."""

from itertools import product

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase
from kit.machines import Machine, run

from kombu_fdb.errors import ExchangeNotFound, NotEquivalent
from kombu_fdb.model import Publication
from kombu_fdb.routing import tables
from kombu_fdb.routing.tables import Exchange, QueueDeclaration, matches

WORDS = ("a", "b")
ROUTING_KEYS = [".".join(words) for length in range(4) for words in product(WORDS, repeat=length)]
BINDING_KEYS = ["", "a", "a.b", "*", "#", "a.*", "*.b", "a.#", "#.b", "*.*", "#.a.#", "a.#.b", "*.#", "#.*.b"]


def keys_reached(binding):
    """All routing keys of up to three words that RabbitMQ's rules let through: put words in for the wildcards.

    https://www.rabbitmq.com/tutorials/tutorial-five-python: ``*`` is exactly one word, ``#`` zero or more.
    """
    choices = {"*": [[word] for word in WORDS], "#": [key.split(".") if key else [] for key in ROUTING_KEYS]}
    parts = [choices.get(word, [[word]]) for word in binding.split(".")] if binding else []
    return {".".join(word for part in chosen for word in part) for chosen in product(*parts)} & {*ROUTING_KEYS}


REACHED = {binding: keys_reached(binding) for binding in BINDING_KEYS}


def reaches(kind, binding, key):
    return kind == "fanout" or (binding == key if kind == "direct" else key in REACHED[binding])


processes = st.integers(0, 2)
exchanges = st.sampled_from(["e", "f", "amq.topic"])
queues = st.sampled_from(["p", "q", "r"])
kinds = st.sampled_from(["direct", "topic", "topic", "fanout"])
binding_keys = st.sampled_from(BINDING_KEYS)


class Tables(Machine):
    """Three processes. What one changes, the others know with their next look."""

    def __init__(self):
        super().__init__()
        bench = Bench(self.database)
        self.bench = bench
        self.engines = [bench.engine, bench.another(), bench.another()]
        self.kinds = {"amq.topic": "topic"}
        self.bindings = set()

    @rule(by=processes, name=st.sampled_from(["e", "f"]), kind=kinds)
    def declare(self, by, name, kind):
        if self.kinds.setdefault(name, kind) == kind:
            self.engines[by].queues.declare_exchange(Exchange(name, kind))
        else:
            with pytest.raises(NotEquivalent):
                self.engines[by].queues.declare_exchange(Exchange(name, kind))

    @rule(by=processes, queue=queues, name=exchanges, key=binding_keys)
    def bind(self, by, queue, name, key):
        if name in self.kinds:
            self.engines[by].queues.bind(queue, name, key)
            self.bindings.add((name, queue, key))
        else:
            with pytest.raises(ExchangeNotFound):
                self.engines[by].queues.bind(queue, name, key)

    @rule(by=processes, queue=queues, name=exchanges, key=binding_keys)
    def unbind(self, by, queue, name, key):
        self.engines[by].queues.unbind(queue, name, key)
        self.bindings.discard((name, queue, key))

    @rule(by=processes, number=st.integers(0, 100))
    def unbind_what_is_bound(self, by, number):
        if self.bindings:
            name, queue, key = sorted(self.bindings)[number % len(self.bindings)]
            self.unbind(by, queue, name, key)

    @rule(by=processes, queue=queues)
    def declare_and_delete_queue(self, by, queue):
        self.engines[by].queues.declare(QueueDeclaration(queue))
        self.engines[by].queues.delete(queue)
        self.bindings = {each for each in self.bindings if each[1] != queue}

    @rule(by=processes, name=st.sampled_from(["e", "f"]), if_unused=st.booleans())
    def delete_exchange(self, by, name, if_unused):
        bound = {each for each in self.bindings if each[0] == name}
        refused = if_unused and bool(bound)
        assert self.engines[by].queues.delete_exchange(name, if_unused=if_unused) is not refused
        if not refused:
            self.kinds.pop(name, None)
            self.bindings -= bound

    @rule(by=processes, name=exchanges, key=st.sampled_from(ROUTING_KEYS), publishes=st.booleans())
    def route(self, by, name, key, publishes):
        engine = self.engines[by]
        if name not in self.kinds:
            with pytest.raises(ExchangeNotFound):
                engine.inspect.route(name, key)
            return
        expected = {
            queue
            for exchange, queue, binding in self.bindings
            if exchange == name and reaches(self.kinds[name], binding, key)
        }
        reached = (
            engine.publisher.publish([Publication(name, key, b"")])[0] if publishes else engine.inspect.route(name, key)
        )
        assert sorted(reached) == sorted(expected)

    def teardown(self):
        assert set(self.bench.engine.inspect.bindings()) == self.bindings
        self.bench.clean()


@pytest.mark.parametrize(("database", "examples"), [("memory", 60), ("sqlite", 12)], indirect=["database"])
def test_tables(database, examples):
    run(Tables, database, examples=examples, steps=40)


@pytest.mark.parametrize(("binding", "number"), [("#", 15), ("*", 2), ("a.#", 7), ("", 1), ("*.#.b", 6)])
def test_the_model_knows_the_rules(binding, number):
    assert len(keys_reached(binding)) == number


def test_bindings_are_matched_before_the_transaction_and_once(monkeypatch):
    database = FaultyDatabase()
    bench = Bench(database)
    bench.engine.queues.declare_exchange(Exchange("e", "topic"))
    for number in range(3):
        bench.engine.queues.bind(f"q{number}", "e", f"#.{number}.#")
    matched = []

    def spy(kind, binding, key):
        matched.append((key, database.open_transactions > 0))
        return matches(kind, binding, key)

    monkeypatch.setattr(tables, "matches", spy)

    def publish(key):
        return bench.engine.publisher.publish([Publication("e", key, b"")])

    assert publish("a.1") == [["q1"]]
    assert matched == [("a.1", True)] * 3, "who knows no tables reads them in the transaction"
    assert publish("b.2") == [["q2"]]
    assert matched[3:] == [("b.2", False)] * 3
    assert publish("b.2") == [["q2"]]
    assert len(matched) == 6, "what has been matched is remembered"
    bench.engine.queues.bind("q0", "e", "b.*")
    assert sorted(*publish("b.2")) == ["q0", "q2"]


@pytest.mark.parametrize(("kind", "key", "most"), [("topic", "#", 10), ("fanout", "bound", 1)])
def test_routes_are_remembered_within_bounds(monkeypatch, kind, key, most):
    """A fanout is matched once for all keys."""
    monkeypatch.setattr(tables, "MOST_ROUTES", 10)
    bench = Bench(FaultyDatabase())
    bench.engine.queues.declare_exchange(Exchange("e", kind))
    bench.engine.queues.bind("q", "e", key)
    for number in range(25):
        assert bench.engine.inspect.route("e", f"k{number}") == ["q"]
    assert 0 < len(bench.engine.transactions.routing._loaded["e"].routes) <= most


def test_exchanges_are_remembered_within_bounds(monkeypatch):
    """A publisher that misspells them, or names one for each reply, does not fill memory."""
    monkeypatch.setattr(tables, "MOST_EXCHANGES", 10)
    bench = Bench(FaultyDatabase())
    for number in range(25):
        with pytest.raises(ExchangeNotFound):
            bench.engine.inspect.route(f"no-such-{number}", "k")
    assert len(bench.engine.transactions.routing._loaded) <= 10


def test_no_message_comes_to_a_queue_that_was_deleted_before_it():
    """Else it would stand in the next one with that name."""
    bench = Bench(FaultyDatabase())
    bench.engine.queues.declare_exchange(Exchange("e", "direct"))
    bench.engine.queues.declare(QueueDeclaration("q"))
    bench.engine.queues.bind("q", "e", "k")
    other = bench.another()
    deleted = []

    def publish_late(work):
        queues = work.routing.route(work.tr, "e", "k")
        if not deleted:
            deleted.append(True)
            other.queues.delete("q")
        for queue in queues:
            work.tr.set(work.keys.fair(queue), b"")
        return queues

    assert bench.engine.transactions.write(publish_late) == []


def with_alternate(name, alternate):
    return Exchange(name, "direct", arguments={"alternate-exchange": alternate})


@pytest.mark.parametrize(
    ("alternates", "reached"),
    [
        ({"e": "f", "f": "g"}, ["q"]),
        ({"e": "f", "f": "e"}, []),
        ({"e": "e"}, []),
        ({"e": "not there"}, []),
        ({"e": "f", "f": ""}, []),
    ],
    ids=["a chain", "a circle", "itself", "not there", "none"],
)
def test_what_reaches_no_queue_goes_to_the_alternate_exchange(alternates, reached):
    """https://www.rabbitmq.com/docs/ae"""
    bench = Bench(FaultyDatabase())
    for name, alternate in alternates.items():
        bench.engine.queues.declare_exchange(with_alternate(name, alternate))
    bench.engine.queues.declare_exchange(Exchange("g", "fanout"))
    bench.engine.queues.bind("q", "g", "")
    assert bench.engine.publisher.publish([Publication("e", "k", b"")]) == [reached]
    bench.engine.queues.bind("nearer", "e", "k")
    assert bench.engine.publisher.publish([Publication("e", "k", b"")]) == [["nearer"]]


def test_an_alternate_exchange_counts_from_its_commit_on():
    bench = Bench(FaultyDatabase())
    other = bench.another()
    bench.engine.queues.declare_exchange(with_alternate("e", "late"))
    assert bench.engine.inspect.route("e", "k") == []
    other.queues.declare_exchange(Exchange("late", "fanout"))
    other.queues.bind("q", "late", "")
    assert bench.engine.inspect.route("e", "k") == ["q"]
    other.queues.delete_exchange("late")
    assert bench.engine.inspect.route("e", "k") == []


@pytest.mark.parametrize("ttl_ms", [2**64, -1])
def test_a_time_to_live_that_no_queue_can_be_declared_with_stops_no_claim(ttl_ms):
    """An older version, or another program, has stored it for a queue of dead letters."""
    bench = Bench(FaultyDatabase())
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "late"}
    bench.engine.queues.declare(QueueDeclaration("q", arguments=arguments))
    late = QueueDeclaration("late", arguments={"x-message-ttl": ttl_ms})
    bench.write(lambda tr: tr.set(bench.engine.keys.queue("late"), late.encode()))
    bench.put(b"expired", ttl_ms=0)
    bench.put(b"good")
    assert bench.payloads() == [b"good"]
    assert bench.payloads(1, "late") == [b"expired"] * (ttl_ms > 0)
