"""Which routing keys a binding matches. Pure. Rules: https://www.rabbitmq.com/tutorials/amqp-concepts#exchanges.

* direct: the keys are equal.
* fanout: always.
* topic: words separated by dots; in the binding ``*`` stands for exactly one word, ``#`` for any number, also none.
"""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["EXCHANGE_TYPES", "matches"]

EXCHANGE_TYPES = frozenset({"direct", "fanout", "topic"})


def matches(exchange_type: str, binding_key: str, routing_key: str) -> bool:
    """Whether a message with ``routing_key`` reaches a queue bound with ``binding_key``."""
    if exchange_type == "fanout":
        return True
    if exchange_type == "direct" or ("*" not in binding_key and "#" not in binding_key):
        return binding_key == routing_key
    words = "." + routing_key if routing_key else ""  # RabbitMQ: the empty key has no word
    return _topic_pattern(binding_key).fullmatch(words) is not None


@lru_cache(4096)
def _topic_pattern(binding_key: str) -> re.Pattern[str]:
    """Every word is matched with the dot before it, so that ``#`` for no word takes its dot along."""
    words = {"*": r"\.[^.]*", "#": r"(?:\.[^.]*)*"}
    return re.compile("".join(words.get(word, r"\." + re.escape(word)) for word in _collapse(binding_key.split("."))))


def _collapse(words: list[str]) -> list[str]:
    """``#.#`` is ``#``; without this the expression could take exponential time."""
    return [word for place, word in enumerate(words) if word != "#" or words[place - 1 : place] != ["#"]]
