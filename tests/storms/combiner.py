"""kill -9 of the first consumer in the wait queue, which claims for all of them, while others publish.

Besides what came of each message, it tells how long no consumer got any after a kill. How long that may be depends on
the machine, so no verdict does: on a quiet one it stays below :data:`LONGEST_PAUSE_S`.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from kombu import Connection

from kombu_fdb import Broker
from kombu_fdb.engine.scheduling import wait_queue

from .ledger import Verdict
from .stage import OPTIONS, QUEUE, Actor, Skipped, Stage, staged
from .strikes import MOST_STEPS

CONSUMERS = 6
#: Messages per second.
RATE = 60.0
LONGEST_PAUSE_S = 1.0


def run(rounds: int, seed: int, store: str = "fdb") -> Verdict:
    if store != "fdb":
        raise Skipped("on SQLite, writers take turns, and consumers stand in no wait queue")
    with staged("combiner", seed, store=store) as stage, Broker.open(stage.url, **OPTIONS) as broker:
        fill(stage)
        with publishing(stage):
            pauses = [kill_the_first(stage, broker) for _ in range(rounds)]
        tell(pauses)
        return stage.finish()


def fill(stage: Stage) -> None:
    """So many consumers are there, and ready."""
    new = CONSUMERS - len(stage.alive("consumer"))
    target = stage.ledger.counts["ready"] + new
    for _ in range(new):
        stage.start("consumer", "-m", "tests.storms.consumer", QUEUE)
    stage.ledger.wait_while_moving(lambda: stage.ledger.counts["ready"] >= target, stage.patience_s)


@contextmanager
def publishing(stage: Stage) -> Iterator[None]:
    """At a steady rate, by a thread of this process."""
    over = threading.Event()

    def publish() -> None:
        with Connection(stage.url, transport_options=OPTIONS) as connection:
            producer = connection.Producer()
            for number in count():
                if over.wait(1 / RATE):
                    break
                began_s, name = time.monotonic(), f"message-{number}"
                producer.publish(name, routing_key=QUEUE, headers={"id": name})
                stage.ledger.tell("confirmed", name, time.monotonic() - began_s)

    thread = threading.Thread(target=publish, name="publisher")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def kill_the_first(stage: Stage, broker: Broker) -> float:
    """After some more messages. The longest time without one, until there have been some more again."""
    stage.expect("begun", stage.rng.randint(1, MOST_STEPS))
    victim = first_of_the_wait_queue(stage, broker)
    stage.ledger.longest_s.clear()
    stage.kill(victim)
    stage.expect("begun", MOST_STEPS)
    pause_s = stage.ledger.longest_s["begun"]
    fill(stage)
    return pause_s


def first_of_the_wait_queue(stage: Stage, broker: Broker) -> Actor:
    """The wait queue may be empty for a moment, while all have something in hand: any consumer then."""
    alive = stage.alive("consumer")
    begin, end, _ = broker._engine.transactions.read(
        lambda work: wait_queue.first_range(work, wait_queue.name([QUEUE]))
    )
    rows = broker._engine.transactions.read(lambda work: work.tr.get_range(begin, end, limit=1, snapshot=True))
    first = wait_queue.waiting_in(wait_queue.name([QUEUE]), rows).values()
    pids = {each.session_id: each.description.get("pid") for each in broker._engine.inspect.sessions()}
    standing = [each for each in alive for demand in first if pids.get(demand.session) == each.process.pid]
    return (standing or alive)[0]


def tell(pauses: list[float]) -> None:
    if len(pauses) < 2:
        return
    cuts = statistics.quantiles(pauses, n=10)
    beyond = sum(each > LONGEST_PAUSE_S for each in pauses)
    print(
        f"combiner: {len(pauses)} kills; no consumer got a message for p50 {statistics.median(pauses):.2f} s, "
        f"p90 {cuts[8]:.2f} s, at most {max(pauses):.2f} s; {beyond} times longer than {LONGEST_PAUSE_S:g} s",
        file=sys.stderr,
        flush=True,
    )
