"""A queue's fairness keys: those with counters of their own in a scrape, and pages of all.

Which fairness keys have counters of their own in a scrape, and what the counters of all others show.

A counter that shrinks is taken for one that began anew, and its whole value for an increase. So the others' counters
are not what is left when the named keys are taken away, which shrinks whenever a key gets a name: from the first scrape
on they grow by what the keys without a name at that scrape have grown. So rates add up to those of the queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from celery_fdb.inspection.overview import KeyView, key_view
from kombu_fdb import Broker
from kombu_fdb.engine.metrics.keytotals import OTHERS, KeyTotals

# -- counters in a scrape ----------------------------------------------------------------------------------------------


#: The label of all those that have no series of their own; what has that name itself is one of them.
OTHER = "(other)"

#: What a message of the scrape before weighs against one of this scrape, where the busiest keys are chosen.
FADING = 0.9


class KeyRates:
    """The counters of one queue's keys, from scrape to scrape. Not thread-safe."""

    def __init__(self, most: int) -> None:
        """``most``: so many keys are named, the busiest of late."""
        self._most = most
        self._before: KeyTotals = {}
        self._weights: dict[str, float] = {}
        self.named: KeyTotals = {}
        #: Of all other keys, by event.
        self.others: Counter[str] = Counter()

    def look(self, now: KeyTotals) -> None:
        """Take what the store tells now."""
        named = {key: events for key, events in now.items() if key not in {OTHERS, OTHER}}
        grown = {key: _growth(self._before.get(key, {}), events) for key, events in named.items()}
        self._weights = {key: FADING * self._weights.get(key, 0.0) + by.total() for key, by in grown.items()}
        busiest = sorted(grown, key=lambda key: (-self._weights[key], -sum(now[key].values()), key))[: self._most]
        self.named = {key: now[key] for key in busiest}
        others = _sum(now.values())
        others.subtract(_sum(self._before.values()))
        others.subtract(_sum(grown[key] for key in busiest))
        self.others += +others  # a queue that was deleted began anew
        self._before = now


def _growth(before: Mapping[str, int], now: Mapping[str, int]) -> Counter[str]:
    """By event; what is fewer than before was folded into the others in between, and began anew."""
    return Counter(
        {
            event: number - (was if number >= was else 0)
            for event, number in now.items()
            for was in [before.get(event, 0)]
        }
    )


def _sum(totals: Iterable[Mapping[str, int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for events in totals:
        found.update(events)
    return found


# -- pages -------------------------------------------------------------------------------------------------------------


class KeyPage(NamedTuple):
    """Keys with their counts and limits, and the key behind which the next page begins; None at the end."""

    keys: list[KeyView]
    following: str | None


def find_keys(broker: Broker, queue: str, limit: int, *, prefix: str = "", after: str | None = None) -> KeyPage:
    """Up to ``limit`` keys that have messages or limits."""
    found = [key_view(*each) for each in broker.queue(queue).keys(after=after, limit=limit + 1, prefix=prefix).items()]
    return KeyPage(found[:limit], found[limit - 1].key if len(found) > limit else None)
