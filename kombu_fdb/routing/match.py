"""Which routing keys a binding matches. Pure. Rules: https://www.rabbitmq.com/tutorials/amqp-concepts#exchanges.

* direct: the keys are equal.
* fanout: always.
* topic: words separated by dots; in the binding ``*`` stands for exactly one word, ``#`` for any number, also none.
"""

from __future__ import annotations

from functools import lru_cache

__all__ = ["EXCHANGE_TYPES", "matches"]

EXCHANGE_TYPES = frozenset({"direct", "fanout", "topic"})


def matches(exchange_type: str, binding_key: str, routing_key: str) -> bool:
    """Whether a message with ``routing_key`` reaches a queue bound with ``binding_key``."""
    if exchange_type == "fanout":
        return True
    if exchange_type == "direct" or ("*" not in binding_key and "#" not in binding_key):
        return binding_key == routing_key
    return _topic_matches(_words(binding_key), _words(routing_key))


@lru_cache(4096)
def _words(key: str) -> tuple[str, ...]:
    """RabbitMQ: the empty key has no word."""
    return tuple(key.split(".")) if key else ()


def _topic_matches(binding: tuple[str, ...], key: tuple[str, ...]) -> bool:
    """Follow all ways to match at once: a state is how many words of the binding are used up.

    Not a regular expression: with several ``#`` it takes exponential time on a key that does not match.
    """
    states = _skip_hashes({0}, binding)
    for word in key:
        states = {state for state in states if state < len(binding) and binding[state] == "#"} | {
            state + 1 for state in states if state < len(binding) and binding[state] in ("*", word)
        }
        states = _skip_hashes(states, binding)
    return len(binding) in states


def _skip_hashes(states: set[int], binding: tuple[str, ...]) -> set[int]:
    """``#`` also stands for no word."""
    reached = set(states)
    for state in range(len(binding)):
        if state in reached and binding[state] == "#":
            reached.add(state + 1)
    return reached
