"""Keys: a queue's fairness keys by name, in pages, all or those that begin with a text. A page costs what it shows."""

from __future__ import annotations

from typing import NamedTuple

from celery_fdb.inspection.overview import KeyView, key_view
from kombu_fdb import Broker


class KeyPage(NamedTuple):
    """Keys with their counts and limits, and the key behind which the next page begins; None at the end."""

    keys: list[KeyView]
    following: str | None


def find_keys(broker: Broker, queue: str, limit: int, *, prefix: str = "", after: str | None = None) -> KeyPage:
    """Up to ``limit`` keys that have messages or limits."""
    found = [key_view(*each) for each in broker.queue(queue).keys(after=after, limit=limit + 1, prefix=prefix).items()]
    return KeyPage(found[:limit], found[limit - 1].key if len(found) > limit else None)
