"""Which routing keys a binding matches. Pure. Rules: https://www.rabbitmq.com/tutorials/amqp-concepts#exchanges.

* direct: the keys are equal.
* fanout: always.
* topic: words separated by dots; in the binding ``*`` stands for exactly one word, ``#`` for any number, also none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

EXCHANGE_TYPES = frozenset({"direct", "fanout", "topic"})


def matches(exchange_type: str, binding_key: str, routing_key: str) -> bool:
    """Whether a message with ``routing_key`` reaches a queue bound with ``binding_key``."""
    if exchange_type == "fanout":
        return True
    if exchange_type == "direct" or ("*" not in binding_key and "#" not in binding_key):
        return binding_key == routing_key
    return _topic_matches(_parts(binding_key), _words(routing_key))


@lru_cache(4096)
def _words(key: str) -> tuple[str, ...]:
    """RabbitMQ: the empty key has no word."""
    return tuple(key.split(".")) if key else ()


@lru_cache(4096)
def _parts(binding: str) -> tuple[tuple[str, ...], ...]:
    """The words between the ``#`` of a binding; of several ``#`` in a row, one counts."""
    parts: list[list[str]] = [[]]
    hashes = 0
    for word in _words(binding):
        if word != "#":
            parts[-1].append(word)
        elif parts[-1] or not hashes:
            parts.append([])
            hashes += 1
    return tuple(map(tuple, parts))


def _topic_matches(parts: Sequence[tuple[str, ...]], key: tuple[str, ...]) -> bool:
    """The first part stands at the beginning, the last at the end, the others in this order between them.

    Each of those as early as it can: what comes before it is the ``#``'s, and a later place leaves less to the next. So
    it takes at most as many steps as the key has words times the binding (a regular expression with several ``#`` takes
    exponential time, and following all ways to match at once still is quadratic in the binding).
    """
    first, *others = parts
    if not others:
        return len(first) == len(key) and _fits(first, key, 0)
    last = others.pop()
    at, end = len(first), len(key) - len(last)
    if at > end or not _fits(first, key, 0) or not _fits(last, key, end):
        return False
    for part in others:
        while at + len(part) <= end and not _fits(part, key, at):
            at += 1
        at += len(part)
        if at > end:
            return False
    return True


def _fits(part: tuple[str, ...], key: tuple[str, ...], at: int) -> bool:
    return all(word in ("*", found) for word, found in zip(part, key[at : at + len(part)], strict=True))
