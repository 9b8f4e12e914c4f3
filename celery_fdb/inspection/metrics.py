"""Prometheus metrics of a broker, read from the store when they are scraped.

One exporter per broker is enough: its numbers cover all processes. Run ``celery fdb metrics --port 9808``, or, in a
process that already has an endpoint::

    from celery_fdb.inspection.metrics import make_collector

    REGISTRY.register(make_collector("fdb://"))

The cost of a scrape does not grow with the number of messages. Labels are bounded: the :data:`QUEUES` busiest queues
and their longest and busiest keys have names, and all others are combined under :data:`OTHER`. Reply queues and other
queues that delete themselves are left out. If the store does not answer, ``celery_fdb_up`` is 0, and nothing about
queues is exported.

The busiest queues, and each queue's busiest keys, have counters of their own; the others share one. Prometheus takes a
counter that shrinks for one that began anew, and counts its whole value as an increase. So the shared counter is not
the sum of those without a name, which would shrink whenever one gets a name. Instead, at each scrape it grows by what
those without a name have grown since the scrape before. So the rates of all keys add up to the queue's.

Needs ``prometheus-client`` (the extra ``metrics``).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from celery_fdb import brokers
from celery_fdb.inspection.overview import COUNTED, Overview, QueueView, look
from kombu_fdb import Broker
from kombu_fdb.engine.metrics.totals import OTHERS, KeyTotals, growth
from kombu_fdb.errors import KombuFDBError
from kombu_fdb.primitives.clock import Clock

# -- counters of queues and keys ---------------------------------------------------------------------------------------


#: The label of all queues or keys without series of their own. A queue or key with this very name is one of them.
OTHER = "(other)"

#: To choose the busiest keys: the weight of a message of the previous scrape; one of this scrape weighs 1.
FADING = 0.9


class Rates:
    """The counters of the queues, or of one queue's keys, from scrape to scrape. Not thread-safe."""

    def __init__(self, most: int) -> None:
        """``most``: how many queues or keys get a name, the recently busiest."""
        self._most = most
        self._before: KeyTotals = {}
        self._weights: dict[str, float] = {}
        self.named: KeyTotals = {}
        #: The counters of all others, by event.
        self.others: Counter[str] = Counter()

    def look(self, now: KeyTotals) -> None:
        """Take the store's present counters into account."""
        named = {key: events for key, events in now.items() if key not in {OTHERS, OTHER}}
        grown = {key: _growth(self._before.get(key, {}), events) for key, events in named.items()}
        self._weights = {key: FADING * self._weights.get(key, 0.0) + by.total() for key, by in grown.items()}
        busiest = sorted(grown, key=lambda key: (-self._weights[key], -sum(now[key].values()), key))[: self._most]
        self.named = {key: now[key] for key in busiest}
        others = _sum(now.values())
        others.subtract(_sum(self._before.values()))
        others.subtract(_sum(grown[key] for key in busiest))
        self.others += +others  # the counters of a queue that was deleted began anew
        self._before = now


def _growth(before: Mapping[str, int], now: Mapping[str, int]) -> Counter[str]:
    return Counter({event: growth(before.get(event, 0), number) for event, number in now.items()})


def _sum(totals: Iterable[Mapping[str, int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for events in totals:
        found.update(events)
    return found


# -- the collector -----------------------------------------------------------------------------------------------------


#: How many queues have series of their own, and by default how many keys of each.
QUEUES, KEYS = 200, 10

#: The values of a counter's labels, and the totals by event.
Counted = tuple[tuple[str, ...], Mapping[str, int]]
#: Metric and event of ``totals.py``.
TOTALS = {
    "celery_fdb_published": ("published", "Messages published, by queue."),
    "celery_fdb_claimed": ("claimed", "Messages claimed by consumers, by queue."),
    "celery_fdb_acked": ("acked", "Messages done, by queue."),
    "celery_fdb_returned": ("returned", "Messages released by a consumer, or from a dead one, by queue."),
    "celery_fdb_dead_lettered": ("dead", "Messages that became dead letters, by the queue they died in."),
    "celery_fdb_lost_leases": (
        "lost",
        "Messages released because their consumer process was silent for too long, by queue.",
    ),
    "celery_fdb_claim_conflicts": ("conflicts", "Claims that lost the race to another consumer's claim, by queue."),
    "celery_fdb_contested": ("contested", "Messages in claims that lost the race to another consumer's, by queue."),
}
GAUGES = {
    "celery_fdb_up": "1 if the store answered this scrape.",
    "celery_fdb_scrape_seconds": "How long reading the store took.",
    "celery_fdb_queue_messages": "Messages in a queue, by state: ready, delayed, leased, dead.",
    "celery_fdb_queue_oldest_seconds": "How long the oldest ready message has waited since it was published or due.",
    "celery_fdb_queue_paused": "1 if the queue is paused.",
    "celery_fdb_queue_consumers": "Consumer processes of a queue.",
    "celery_fdb_key_messages": "Messages of a queue's longest keys, by state: ready, leased.",
    "celery_fdb_sessions": "Consumer processes, by state: open, ended (its messages are being released).",
}
#: The same metrics of messages with a fairness key, by queue and key; conflicts are of a claim, not of a key.
KEY_TOTALS = {
    name.replace("celery_fdb_", "celery_fdb_key_"): (event, f"{about.removesuffix('.')} and by fairness key.")
    for name, (event, about) in TOTALS.items()
    if event != "conflicts"
}
LATE = "celery_fdb_late_settlements"
#: All names as they are exported.
NAMES = frozenset(GAUGES) | {f"{name}_total" for name in (*TOTALS, *KEY_TOTALS, LATE)}


def make_collector(url: str, *, keys: int = KEYS, **options: Any) -> BrokerCollector:
    """A collector for ``REGISTRY.register``. Opens the broker when it is first scraped.

    ``options``: as in ``broker_transport_options``. Raises ``OptionError``.
    """
    brokers.location_of(url, options)  # a mistake is an error now, an unreachable store at each scrape
    return BrokerCollector(lambda: Broker.open(url, **options), keys=keys)


class StoreCollector(Collector):
    """A collector that opens the broker when it is first scraped, and again after a failure. Thread-safe."""

    def __init__(self, open_: Callable[[], Broker]) -> None:
        self._lazy_broker = brokers.LazyBroker(open_)
        self._lock = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        """The metrics without values: so a registry does not scrape at registration."""
        return []

    def close(self) -> None:
        """Close the broker."""
        with self._lock:
            self._lazy_broker.close()


class BrokerCollector(StoreCollector):
    """Collects the metrics of a broker's queues, keys and sessions."""

    def __init__(self, open_broker: Callable[[], Broker], *, keys: int = KEYS) -> None:
        """``keys``: how many keys of each queue have series of their own, the longest and the busiest; 0 for none."""
        super().__init__(open_broker)
        self._keys = keys
        self._rates = Rates(QUEUES)
        self._key_rates: dict[str, Rates] = {}

    def collect(self) -> Iterator[Metric]:
        clock = Clock()
        begin = clock.monotonic()
        overview = self._look()
        yield _gauge("celery_fdb_up", [], [((), float(overview is not None))])
        yield _gauge("celery_fdb_scrape_seconds", [], [((), clock.monotonic() - begin)])
        if overview is not None:
            yield from self._metrics(overview)

    def _look(self) -> Overview | None:
        with self._lock:
            try:
                overview = look(self._lazy_broker.broker(), top_keys=self._keys)
                self._count(overview)
                return overview
            except KombuFDBError:
                self._lazy_broker.close()  # the next store may be another one, or this process a forked child
                return None

    def _count(self, overview: Overview) -> None:
        self._rates.look({each.name: each.totals for each in _lasting(overview)})
        queues = [each for each in overview.live_queues if each.key_totals]
        self._key_rates = {each.name: self._key_rates.get(each.name, Rates(self._keys)) for each in queues}
        for queue in queues:
            self._key_rates[queue.name].look(queue.key_totals)

    # -- what it shows -----------------------------------------------------------------------------------------------

    def _metrics(self, overview: Overview) -> Iterator[Metric]:
        queues = _lasting(overview)
        held = {each.name: each.ready + each.delayed + each.leased + each.dead for each in queues}
        busiest = sorted(queues, key=lambda each: (each.name == OTHER, -held[each.name], each.name))
        named = [each for each in busiest[:QUEUES] if each.name != OTHER]
        others = busiest[len(named) :]
        yield from _of_queues(named, others)
        totals: list[Counted] = [((name,), events) for name, events in self._rates.named.items()]
        if others:
            totals.append(((OTHER,), self._rates.others))
        yield from _counters(TOTALS, ["queue"], totals)
        yield _gauge("celery_fdb_key_messages", ["queue", "key", "state"], self._of_keys(named))
        yield from _counters(KEY_TOTALS, ["queue", "key"], self._totals_of_keys(named))
        states = Counter("open" if each.open else "ended" for each in overview.sessions)
        yield _gauge("celery_fdb_sessions", ["state"], [((state,), states[state]) for state in ("open", "ended")])
        late = CounterMetricFamily(LATE, "Settlements that came too late: another consumer had the message.")
        late.add_metric([], overview.late_settlements)
        yield late

    def _of_keys(self, queues: Sequence[QueueView]) -> Iterator[tuple[tuple[str, ...], float]]:
        for queue in queues:
            if not any(queue.keys):  # not a fair queue
                continue
            for state in ("ready", "leased"):
                known = [(key, getattr(each, state)) for key, each in queue.keys.items() if key not in {"", OTHER}]
                yield from (((queue.name, key, state), number) for key, number in known)
                rest = getattr(queue, state) - sum(number for _, number in known)
                yield (queue.name, OTHER, state), max(rest, 0)

    def _totals_of_keys(self, queues: Sequence[QueueView]) -> list[Counted]:
        found = [(each.name, self._key_rates[each.name]) for each in queues if each.name in self._key_rates]
        return [
            ((queue, key), totals)
            for queue, rates in found
            for key, totals in (*rates.named.items(), (OTHER, rates.others))
        ]


def _lasting(overview: Overview) -> list[QueueView]:
    """The queues that are exported."""
    return [each for each in overview.live_queues if not each.passing]


def _of_queues(named: Sequence[QueueView], others: Sequence[QueueView]) -> Iterator[Metric]:
    messages = [((each.name, state), getattr(each, state)) for each in named for state in COUNTED]
    if others:
        messages += [((OTHER, state), sum(getattr(each, state) for each in others)) for state in COUNTED]
    yield _gauge("celery_fdb_queue_messages", ["queue", "state"], messages)
    ages = [((each.name,), each.oldest_age_s or 0.0) for each in named]
    yield _gauge("celery_fdb_queue_oldest_seconds", ["queue"], ages)
    yield _gauge("celery_fdb_queue_paused", ["queue"], [((each.name,), float(each.paused)) for each in named])
    yield _gauge("celery_fdb_queue_consumers", ["queue"], [((each.name,), each.consumers) for each in named])


def _counters(about: Mapping[str, tuple[str, str]], labels: Sequence[str], rows: Sequence[Counted]) -> Iterator[Metric]:
    """One metric for each event in ``about``. ``rows``: the labels' values, and the totals by event."""
    for name, (event, text) in about.items():
        metric = CounterMetricFamily(name, text, labels=labels)
        for values, totals in rows:
            metric.add_metric(values, totals.get(event, 0))
        yield metric


def _gauge(name: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    metric = GaugeMetricFamily(name, GAUGES[name], labels=labels)
    for label_values, value in values:
        metric.add_metric(label_values, value)
    return metric
