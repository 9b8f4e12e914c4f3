"""Each queue argument at the edges of what it accepts, and the name that a misspelt one is like."""

import pytest
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase

from kombu_fdb import InvalidArgument
from kombu_fdb.engine.topology import ARGUMENT_KINDS, check
from kombu_fdb.primitives.ranges import MOST
from kombu_fdb.routing.tables import Exchange, QueueDeclaration

EDGES = {
    "x-message-ttl": (0, MOST),
    "x-expires": (1, MOST),
    "x-max-length": (0, MOST),
    "x-max-length-bytes": (0, MOST),
    "x-delivery-limit": (-MOST, MOST),
    "x-max-priority": (0, 255),
    "x-consumer-timeout": (1, MOST),
    "x-fair-ageing": (1, MOST),
}


def declared(**arguments):
    check(QueueDeclaration("q", arguments={name.replace("_", "-"): value for name, value in arguments.items()}))


@pytest.mark.parametrize("name", EDGES)
def test_the_edges_are_accepted_and_what_is_beyond_is_not(name):
    least, most = EDGES[name]
    for value in (least, most):
        declared(**{name: value})
    for value in (least - 1, most + 1, True, 1.5, "1", b"1"):
        with pytest.raises(InvalidArgument, match="unusable queue argument") as raised:
            declared(**{name: value})
        assert raised.value.fix.startswith(f"{name} is a whole number of ")
        assert raised.value.attributes[name] == value


def test_there_are_no_other_numbers():
    assert {name for name, kind in ARGUMENT_KINDS.items() if kind.what.startswith("a whole number")} == EDGES.keys()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("x-max-lenght", "x-max-length"),
        ("x-mesage-ttl", "x-message-ttl"),
        ("x-fair-agein", "x-fair-ageing"),
        ("x-fair-anything", "x-fair-ageing"),
        ("x-fair-", "x-fair-ageing"),
    ],
)
def test_a_misspelt_name_is_told_what_it_is_like(given, meant):
    with pytest.raises(InvalidArgument, match="unknown queue argument") as raised:
        declared(**{given: 1})
    assert raised.value.fix == f"Did you mean {meant}?"
    assert raised.value.queue == "q"


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        ({"x-overflow": "explode"}, "drop-head, reject-publish or reject-publish-dlx"),
        ({"x-overflow": ["drop-head"]}, "drop-head"),
        ({"x-dead-letter-exchange": 5}, "a text"),
        ({"x-dead-letter-routing-key": "k"}, "Set the exchange too"),
        ({"x-single-active-consumer": "true"}, "true or false"),
    ],
)
def test_a_senseless_argument_names_its_mend_and_changes_nothing(arguments, fix):
    engine, before = Bench(FaultyDatabase()).engine, QueueDeclaration("q", arguments={"x-max-length": 3})
    engine.queues.declare(before)
    with pytest.raises(InvalidArgument, match=fix):
        engine.queues.declare(QueueDeclaration("q", arguments=arguments))
    assert engine.inspect.queue("q") == before


@pytest.mark.parametrize("name", ["x-priority", "x-queue-mode", "my-argument", "x"])
def test_what_others_know_is_kept_and_not_acted_upon(name):
    declared(**{name: object()})


@pytest.mark.parametrize("flag", ["durable", "exclusive", "auto_delete"])
def test_a_queues_flags_are_true_or_false(flag):
    flags = {flag: "no"}
    with pytest.raises(InvalidArgument, match=f"{flag} must be true or false"):
        check(QueueDeclaration("q", **flags))


@pytest.mark.parametrize("flag", ["durable", "auto_delete"])
def test_an_exchanges_flags_are_true_or_false(flag):
    flags = {flag: "no"}
    with pytest.raises(InvalidArgument, match=f"{flag} must be true or false"):
        Bench(FaultyDatabase()).engine.queues.declare_exchange(Exchange("e", "direct", **flags))
