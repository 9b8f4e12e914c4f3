"""How dispatch scales with distance and to thousands of workers: a model, which ``make bench-network`` checks.

Model. ``n`` workers want windows of ``w`` messages from one queue that never runs empty. They stand in a wait queue
(``kombu_fdb/engine/scheduling/wait_queue.py``). One service of ``b`` workers takes

    service(b) = (look (2) + read version, states, messages (k)) r + commit + b w s

with the round trip ``r``, the ``k`` round trips of a claim before its commit, the latency of a commit, and the
processor time ``s`` that the server spends on each message. A worker that was served is away from the wait queue for

    away = wake-up (2 r: the client library asks whether what its watch has seen is committed) + look (2 r) + w c
           + join (2 r) + commit

with the processor time ``c`` that it spends on each message of its own (its looks, its acks). The next service begins
at once, without those that are away, so a worker is served once in each service(b) + max(away, service(b)), and a
service takes at most 512 messages:

    b = min(n service(b) / (service(b) + max(away, service(b))), 512 / w)

The throughput is b w / service(b). A consumer that competes with no other claims by itself: b = 1, without looks and
joins.

The check: on one machine all processes share a few cores, and what they take of a service is not known beforehand. So
it is taken from what was measured with no distance, ``w c`` as well: the model adds the round trips, as long as the
fastest transaction of one row shows them to be. For a cluster, whose workers have a core each, it has to know nothing
but round trip, commit, ``s`` and ``c``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from contention import WINDOW

from kombu_fdb.engine.messages.claim import MOST_MESSAGES

#: Round trips of a claim before its commit.
READS = {"no keys": 2, "1,000 keys": 3}
LOOK, AWAY = 2, 6


class Costs(NamedTuple):
    """All in seconds. ``serving``, ``own``: processor time of a message, of the server and of its consumer."""

    round_trip: float
    commit: float
    serving: float
    own: float


def trips(keys: str, workers: int) -> int:
    """Round trips of a service, its commit among them."""
    return READS[keys] + 1 + (LOOK if workers > 1 else 0)


def rate(costs: Costs, workers: int, keys: str, *, window: int = WINDOW) -> float:
    """Messages per second."""

    def service(messages: float) -> float:
        return (trips(keys, workers) - 1) * costs.round_trip + costs.commit + messages * costs.serving

    messages = _in_a_service(workers, window, service, AWAY * costs.round_trip + costs.commit + window * costs.own)
    return messages / service(messages)


def at_distance(rate_here: float, here: float, keys: str, workers: int, distance: float) -> float:
    """Messages per second over a round trip of so many more seconds; ``here``: how many one service takes without."""

    def service(messages: float) -> float:
        return messages / rate_here + trips(keys, workers) * distance

    away_here = here / rate_here * max(workers * WINDOW / here - 1, 0.0)
    messages = _in_a_service(workers, WINDOW, service, away_here + (AWAY + 1) * distance)
    return messages / service(messages)


def _in_a_service(workers: int, window: int, service: Callable[[float], float], away: float) -> float:
    """How many messages a service takes, where it takes ``service`` seconds for so many."""
    low, high = float(window), float(max(window, min(workers * window, MOST_MESSAGES)))
    for _ in range(60):  # the equilibrium's size grows slower than the size it is computed from
        messages = (low + high) / 2
        if workers * window * service(messages) / (service(messages) + max(away, service(messages))) > messages:
            low = messages
        else:
            high = messages
    return high
