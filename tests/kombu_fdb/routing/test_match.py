"""Topic rules against an independent reading of RabbitMQ's documentation."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kombu_fdb.routing.tables import _parts, _topic_matches, matches

words = st.sampled_from(["a", "b", "celery", "", "a+b"])
routing_keys = st.lists(words, max_size=5).map(".".join)
binding_keys = st.lists(st.one_of(words, st.sampled_from(["*", "#"])), max_size=5).map(".".join)


def reference(binding, key):
    """Word by word: ``*`` eats one, ``#`` eats none or one and stays."""
    if not binding:
        return not key
    head, rest = binding[0], binding[1:]
    if head == "#":
        return reference(rest, key) or (bool(key) and reference(binding, key[1:]))
    return bool(key) and head in ("*", key[0]) and reference(rest, key[1:])


def split(key):
    return key.split(".") if key else []


@given(binding_keys, routing_keys)
@example("#", "")
@example("#.#.#", "a.b")
@example("a.#", "a")
@example("#.a", "a")
@example("*", "")
def test_topic(binding, key):
    assert matches("topic", binding, key) == reference(split(binding), split(key))


class Counted(str):
    """A word that counts how often it is compared."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other):
        Counted.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


@pytest.mark.parametrize(
    "binding", ["#." * 2_400 + "a", "#.a." * 1_200 + "#", "*.#." * 1_200 + "b", "#.a.a." * 800 + "#.b"]
)
def test_long_bindings_take_as_many_steps_as_words(binding):
    """Of an older store; a new one has at most 255 bytes."""
    key = tuple(Counted(word) for word in (["a"] * 127 + ["b"]))
    for words_ in (key, key[:-1]):
        Counted.compared = 0
        _topic_matches(_parts(binding), words_)
        assert Counted.compared <= 4 * (len(key) + len(binding.split(".")))


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
def test_the_tutorial(binding, key, expected):
    assert matches("topic", binding, key) is expected


@given(binding_keys, routing_keys)
def test_direct_and_fanout(binding, key):
    assert matches("direct", binding, key) == (binding == key)
    assert matches("fanout", binding, key)


def test_many_wildcards_take_no_exponential_time():
    assert not matches("topic", ".".join(["#", "a"] * 12), ".".join(["a"] * 40 + ["b"]))
