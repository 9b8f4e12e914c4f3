"""How long each verb takes from here, and its round trips: ``python verbs.py verbs|trip|threads URL --count N``.

Run by ``distances.py`` on a machine at a given distance from its cluster. Prints one JSON object: of each verb its
times in seconds and the round trips that were counted below the engine.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from kit.costs import CountingDatabase
from kombu import Connection, Exchange, Producer, Queue
from workloads import QUEUE, celery_message

from kombu_fdb import Broker
from kombu_fdb.process import connect

BATCH = 100
#: The first calls read declarations, open a session, and are not counted.
LEARNING = 5
#: Of no store of ours.
ROW = b"bench/verbs.py"
Verb = Callable[[], object]


class Counting(CountingDatabase):
    """Counts what this thread does: heartbeats and duties go on beside it."""

    def begin(self, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return self.inner.begin(**options)
        return super().begin(**options)


def counting() -> list[CountingDatabase]:
    """Every store that is opened from now on counts its round trips."""
    opened: list[CountingDatabase] = []
    open_database = connect._open_database

    def open_and_count(*arguments: Any) -> CountingDatabase:
        opened.append(Counting(open_database(*arguments)))
        return opened[-1]

    connect._open_database = open_and_count
    return opened


@contextmanager
def kombu_verbs(url: str) -> Iterator[dict[str, Verb]]:
    """Of a program that publishes with Kombu, as Celery does."""
    number = count()
    with Connection(url) as connection:
        channel = connection.channel()
        queue = Queue(QUEUE, Exchange(f"{QUEUE}.named", type="direct"), routing_key=QUEUE)(channel)
        queue.declare()
        queue.purge()
        producer = Producer(channel)

        def publish(**where: Any) -> None:
            body, properties = celery_message(next(number))
            producer.publish(body, routing_key=QUEUE, serializer="json", **where, **properties)

        def batch() -> None:
            with producer.batch(BATCH):
                for _ in range(BATCH):
                    publish()

        yield {
            "publish": publish,
            "publish to an exchange": lambda: publish(exchange=queue.exchange),
            f"batch of {BATCH}": batch,
        }


@contextmanager
def broker_verbs(url: str) -> Iterator[dict[str, Verb]]:
    """Of a program that uses the Broker API."""
    run, number, taken = secrets.token_hex(4), count(), []
    with Broker.open(url) as broker:
        jobs = broker.queue("jobs")
        jobs.purge()

        def take() -> None:
            taken.append(jobs.take(timeout=0))

        yield {
            "put": lambda: jobs.put("job"),
            "put with a dedup id": lambda: jobs.put("job", dedup_id=f"{run}/{next(number)}"),
            "put with a key": lambda: broker.queue("fair").put("job", key="acme"),
            "take": take,
            "ack": lambda: taken.pop().ack(),
            "take again": take,
            "release": lambda: taken.pop().release(),
            "stats": jobs.stats,
        }


def measured(verbs: dict[str, Verb], times: int, opened: list[CountingDatabase]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, verb in verbs.items():
        seconds, trips = [], []
        for _ in range(LEARNING + times):
            for each in opened:
                each.reset()
            begun = time.perf_counter()
            verb()
            seconds.append(time.perf_counter() - begun)
            trips.append(sum(each.total().round_trips for each in opened))
        found[name] = {"seconds": seconds[LEARNING:], "trips": statistics.median(trips[LEARNING:])}
    return found


def one_row(database: CountingDatabase) -> None:
    """What no publish can do without: a read version, and a commit."""
    transaction = database.begin(timeout_s=10)
    transaction.add_read_conflict_key(ROW)
    transaction.set(ROW, b"")
    transaction.commit()


def all_verbs(url: str, times: int) -> dict[str, dict[str, Any]]:
    opened = counting()
    with kombu_verbs(url) as verbs:
        found = measured({"one row": lambda: one_row(opened[0]), **verbs}, times, opened)
    with broker_verbs(url) as verbs:
        return found | measured(verbs, times, opened)


def trip(url: str, times: int) -> float:
    """Seconds of a round trip, and half of what the server works for a row: the fastest of so many times."""
    opened = counting()
    with Broker.open(url):
        found = measured({"one row": lambda: one_row(opened[0])}, times, opened)["one row"]
    return float(min(found["seconds"]) / found["trips"])


def threads(url: str, times: int, number: int) -> dict[str, float]:
    """Messages per second that so many threads of one process publish one by one, each on a channel of its own."""
    with Connection(url) as connection:
        queue = Queue(QUEUE, routing_key=QUEUE)(connection.channel())
        queue.declare()
        queue.purge()
        barrier, failed = threading.Barrier(number + 1), []

        def work() -> None:
            try:
                with Connection(url) as own:
                    producer = Producer(own.channel())
                    for turn in range(LEARNING + times):
                        if turn == LEARNING:
                            barrier.wait()
                        body, properties = celery_message(turn)
                        producer.publish(body, routing_key=QUEUE, serializer="json", **properties)
            except BaseException as error:
                failed.append(error)
                barrier.abort()
                raise

        working = [threading.Thread(target=work) for _ in range(number)]
        for each in working:
            each.start()
        barrier.wait()
        begun, cpu = time.perf_counter(), time.process_time()
        for each in working:
            each.join()
        took, spent = time.perf_counter() - begun, time.process_time() - cpu
        if failed:
            raise failed[0]
        return {"rate": number * times / took, "cpu_us": 1e6 * spent / (number * times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["verbs", "trip", "threads"])
    parser.add_argument("url")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    if given.what == "verbs":
        print(json.dumps(all_verbs(given.url, given.count)))
    elif given.what == "trip":
        print(json.dumps({"seconds": trip(given.url, given.count)}))
    else:
        print(json.dumps(threads(given.url, given.count, given.threads)))


if __name__ == "__main__":
    main()
