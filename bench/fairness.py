"""What one noisy key does to 99 quiet ones: ``make bench-fairness``. Prints a table, and draws docs/fairness.svg.

The noisy key has 10,000 messages waiting when each of the others sends 10. One consumer takes all, with a prefetch of
10. Shown are Jain's index over the first 1,000 deliveries, in which every key has work (1 is perfectly fair, 1/100 is
one key alone; Jain, Chiu, Hawe: A Quantitative Measure of Fairness, 1984), and how long the quiet messages waited.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brokers import Broker, all_brokers
from kombu import Connection, Consumer, Producer, Queue
from rich.console import Console
from rich.table import Table

NOISY = 10_000
QUIET_KEYS = 99
QUIET = 10
FIRST = 1_000
PICTURE = Path(__file__).parents[1] / "docs" / "fairness.svg"


@dataclass
class Outcome:
    """``shares``: deliveries of each key among the first; ``waits_ms``: of each quiet message."""

    broker: str
    shares: list[int]
    waits_ms: list[float]

    @property
    def jain(self) -> float:
        return sum(self.shares) ** 2 / (len(self.shares) * sum(share**2 for share in self.shares))

    def percentile(self, part: float) -> float:
        return sorted(self.waits_ms)[int(part * (len(self.waits_ms) - 1))]


def measure(broker: Broker) -> Outcome:
    with Connection(broker.url, transport_options=broker.options) as connection:
        channel = connection.channel()
        queue = Queue("fairness", routing_key="fairness")(channel)
        queue.declare()
        queue.purge()
        _publish(Producer(channel))
        order = _consume(connection, channel, queue)
        queue.delete()
    served = Counter(key for key, _ in order[:FIRST])
    keys = ["noisy", *(f"quiet-{number}" for number in range(QUIET_KEYS))]
    return Outcome(broker.name, [served[key] for key in keys], [ms for key, ms in order if key != "noisy"])


def _publish(producer: Producer) -> None:
    keys = ["noisy"] * NOISY + [f"quiet-{number}" for _ in range(QUIET) for number in range(QUIET_KEYS)]
    with producer.batch(1000):
        for key in keys:
            producer.publish("x" * 500, routing_key="fairness", headers={"fair_key": key})


def _consume(connection: Connection, channel: Any, queue: Queue) -> list[tuple[str, float]]:
    """Key and waiting time of each message, from when the last was published."""
    order: list[tuple[str, float]] = []
    began = time.perf_counter()

    def on_message(message: Any) -> None:
        order.append((message.headers["fair_key"], 1000 * (time.perf_counter() - began)))
        message.ack()

    consumer = Consumer(channel, [queue], on_message=on_message)
    consumer.qos(prefetch_count=10)
    with consumer:
        while len(order) < NOISY + QUIET_KEYS * QUIET:
            connection.drain_events(timeout=60)
    return order


def table(outcomes: list[Outcome]) -> Table:
    shown = Table(title=f"one key with {NOISY:,} messages, {QUIET_KEYS} with {QUIET}")
    for name in ("broker", "Jain's index", "quiet p50 ms", "quiet p99 ms"):
        shown.add_column(name, justify="left" if name == "broker" else "right")
    for each in outcomes:
        shown.add_row(
            each.broker, f"{each.jain:.2f}", f"{statistics.median(each.waits_ms):.0f}", f"{each.percentile(0.99):.0f}"
        )
    return shown


def picture(outcomes: list[Outcome]) -> str:
    """Bars of the quiet messages' p99 wait, one per broker."""
    most = max(each.percentile(0.99) for each in outcomes)
    rows = []
    for number, each in enumerate(outcomes):
        y, wait = 40 + 34 * number, each.percentile(0.99)
        colour = "#1a7f5a" if each.broker.startswith("fdb") else "#8a8a8a"
        rows.append(
            f'<text x="150" y="{y + 15}" text-anchor="end">{each.broker}</text>'
            f'<rect x="160" y="{y}" width="{max(2, 380 * wait / most):.0f}" height="22" fill="{colour}"/>'
            f'<text x="{170 + max(2, 380 * wait / most):.0f}" y="{y + 15}">{wait:,.0f} ms, Jain {each.jain:.2f}</text>'
        )
    title = f"p99 wait of 99 quiet keys while one key has {NOISY:,} messages waiting"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{60 + 34 * len(outcomes)}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="10" y="22" font-weight="bold">{title}</text>{"".join(rows)}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="BROKER")
    given = parser.parse_args()
    with all_brokers(given.only) as (found, missing):
        outcomes = [measure(broker) for broker in found if broker.name not in ("memory://", "rabbitmq confirmed")]
    console = Console(width=100)
    console.print(table(outcomes))
    for line in missing:
        console.print(f"not measured: {line}")
    PICTURE.write_text(picture(outcomes))
    console.print(f"drawn: {PICTURE.relative_to(Path.cwd()) if PICTURE.is_relative_to(Path.cwd()) else PICTURE}")


if __name__ == "__main__":
    main()
