"""How dispatch scales with distance and to thousands of workers: a model, which ``make bench-network`` checks.

Model. ``n`` workers want windows of ``w`` messages from one queue that never runs empty. They stand in a line
(``kombu_fdb/engine/scheduling/line.py``). One service of ``b`` workers takes

    service(b) = (look (2) + read version, states, messages (k)) r + commit + b w s

with the round trip ``r``, the ``k`` round trips of a claim before its commit, the latency of a commit, and the
processor time ``s`` that the server spends on each message. A worker that was served is away from the line for

    away = wake-up (r) + look (2 r) + w c + join (2 r) + commit

with the processor time ``c`` that it spends on each message of its own (its looks, its acks). The next service begins
at once, without those that are away, so a worker is served once in each service(b) + max(away, service(b)), and a
service takes at most 512 messages:

    b = min(n service(b) / (service(b) + max(away, service(b))), 512 / w)

The throughput is b w / service(b). A consumer without rivals claims by itself: b = 1, without looks and joins.

The check: on one machine all processes share a few cores, and what they take of a service is not known beforehand. So
it is taken from what was measured with no distance: the model adds the round trips. For a cluster, whose workers have
a core each, it has to know nothing but round trip, commit, ``s`` and ``c``.
"""

from __future__ import annotations

from typing import NamedTuple

from contention import WINDOW

from kombu_fdb.engine.messages.claim import MOST_MESSAGES

#: Round trips of a claim before its commit.
READS = {"no keys": 2, "1,000 keys": 3}
LOOK, AWAY = 2, 5


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
    away = AWAY * costs.round_trip + costs.commit + window * costs.own

    def service(size: float) -> float:
        return (trips(keys, workers) - 1) * costs.round_trip + costs.commit + size * window * costs.serving

    low, high = 1.0, max(1.0, min(float(workers), MOST_MESSAGES / window))
    for _ in range(60):  # the equilibrium's size grows slower than the size it is computed from
        size = (low + high) / 2
        if workers * service(size) / (service(size) + max(away, service(size))) > size:
            low = size
        else:
            high = size
    return high * window / service(high)


def at_distance(rate_here: float, messages: float, keys: str, workers: int, distance: float) -> float:
    """Messages per second over a round trip of so many more seconds; ``messages``: how many one service takes."""
    return messages / (messages / rate_here + trips(keys, workers) * distance)
