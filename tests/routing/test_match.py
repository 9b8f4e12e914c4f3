"""Topic rules against an independent reading of RabbitMQ's documentation."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kombu_fdb.routing.match import matches

words = st.sampled_from(["a", "b", "celery", "", "a+b"])
routing_keys = st.lists(words, max_size=5).map(".".join)
binding_keys = st.lists(st.one_of(words, st.sampled_from(["*", "#"])), max_size=5).map(".".join)


def reference(binding: list[str], key: list[str]) -> bool:
    """Word by word: ``*`` eats one, ``#`` eats none or one and stays."""
    if not binding:
        return not key
    head, rest = binding[0], binding[1:]
    if head == "#":
        return reference(rest, key) or (bool(key) and reference(binding, key[1:]))
    return bool(key) and head in ("*", key[0]) and reference(rest, key[1:])


def split(key: str) -> list[str]:
    return key.split(".") if key else []


@given(binding_keys, routing_keys)
@example("#", "")
@example("#.#.#", "a.b")
@example("a.#", "a")
@example("#.a", "a")
@example("*", "")
def test_topic(binding: str, key: str) -> None:
    assert matches("topic", binding, key) == reference(split(binding), split(key))


@pytest.mark.parametrize(
    ("binding", "key", "expected"),
    [  # the examples of https://www.rabbitmq.com/tutorials/tutorial-five-python
        ("*.orange.*", "quick.orange.rabbit", True),
        ("*.*.rabbit", "quick.orange.rabbit", True),
        ("lazy.#", "lazy.orange.elephant", True),
        ("*.orange.*", "quick.orange.fox", True),
        ("lazy.#", "lazy.brown.fox", True),
        ("*.orange.*", "quick.brown.fox", False),
        ("*.orange.*", "orange", False),
        ("*.orange.*", "quick.orange.new.rabbit", False),
        ("lazy.#", "lazy.orange.new.rabbit", True),
    ],
)
def test_the_tutorial(binding: str, key: str, expected: bool) -> None:
    assert matches("topic", binding, key) is expected


@given(routing_keys, routing_keys)
def test_direct_and_fanout(binding: str, key: str) -> None:
    assert matches("direct", binding, key) == (binding == key)
    assert matches("fanout", binding, key)


def test_many_wildcards_take_no_exponential_time() -> None:
    assert not matches("topic", ".".join(["#", "a"] * 12), ".".join(["a"] * 40 + ["b"]))
