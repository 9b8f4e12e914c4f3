"""Competing consumers on a real FoundationDB: ``make bench-contention``.

Throughput: consumers are threads of 4 processes. Each has a session, claims windows of 10 from one queue that never
runs empty, alone or in a wait queue with others as every consumer does (``kombu_fdb/process/combiner_client.py``),
and acknowledges them with its next claim. Shown are the medians of some rounds: messages per second, lost races per
claim, the processor time that a message costs its client, and how the throughput compares with that of fewer consumers.

Latency: as many Kombu consumers, each with a connection of its own, wait at an empty queue, and one message after
another is published. Shown is the time from before the publish to the callback; and for each read of a key that took
long meanwhile in one of the processes, how long threads waited for a core (``stalls.py``).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import stalls
from kombu import Connection, Consumer, Exchange, Producer, Queue
from rich.console import Console
from rich.table import Table

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.work import Environment
from kombu_fdb.errors import Outrun, StoreUnavailable
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import Delivery, Lease, Publication
from kombu_fdb.primitives.clock import Clock, random_id
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.process.combiner_client import CombinerClient, Contention
from kombu_fdb.settings.options import Options
from kombu_fdb.store.foundationdb.database import FoundationDatabase
from kombu_fdb.testing.fdbserver import Cluster, fdb_unavailable_reason

WINDOW = 10
PROCESSES = 4
QUEUES = ["q"]
KEYS = {"no keys": 0, "one key": 1, "1,000 keys": 1_000, "100,000 keys": 100_000}
MESSAGES = 60_000
#: Consumers begin one after another, as processes that are started together do; then each finds out that others
#: compete.
BEGINNING_S, LEARNING_S = 2.0, 5.0
#: Pings of the latency, of which the first are not counted: the consumers learn that others compete.
PINGS, LEARNING = 400, 30


class Tally(NamedTuple):
    claims: int = 0
    messages: int = 0
    lost: int = 0
    #: Transactions in which one consumer claimed for the wait queue.
    services: int = 0
    cpu_s: float = 0.0


def total(tallies: Sequence[Tally]) -> Tally:
    return Tally(*(sum(column) for column in zip(*tallies, strict=True)))


class NoThreads:
    """No thread beats: a session lives longer than its measurement."""

    def ring(self) -> None:
        """No thread waits."""

    def end(self) -> None:
        """No thread runs."""

    def join(self) -> None:
        """There is no thread."""


class Competitor:
    """One consumer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: What its process had spent when the counting began.
        self.began_cpu_s = 0.0
        self._rung = threading.Event()
        session = engine.sessions.open({}, ttl_s=3_600)
        self._session = ClientSession(engine, Options(), session, NoThreads(), Clock())
        self._found: list[Delivery] = []
        self._member = CombinerClient(self._rung.set, time.monotonic, random.Random(), 1.0, Contention(), self._found)
        self._member.contention.suspect(QUEUES)
        self._acks: list[Lease] = []
        self._services = 0

    def run(self, tallies: list[Tally], began_s: float, seconds: float) -> None:
        """What it does before ``began_s`` is not counted."""
        claims = messages = 0
        before = Tally()
        time.sleep(random.uniform(0, BEGINNING_S))
        while time.monotonic() < began_s + seconds:
            if not self.began_cpu_s and time.monotonic() >= began_s:
                before = Tally(claims, messages, self._engine.messages.lost_races, self._services)
                self.began_cpu_s = time.process_time()
            self._found.clear()
            try:
                self._claim()
            except StoreUnavailable:
                break
            if self._found:
                self._acks = [each.lease for each in self._found]
                self._session.known.difference_update(self._acks)
                claims, messages = claims + 1, messages + len(self._found)
        now = Tally(claims, messages, self._engine.messages.lost_races, self._services)
        tallies.append(Tally(*(late - early for late, early in zip(now, before, strict=True))))

    def _claim(self) -> None:
        if self._member.contention.is_contested(QUEUES):
            self._stand()
            return
        try:
            self._session.claim(QUEUES, WINDOW, acks=self._acks, gives_way=True, into=self._found)
            self._acks = []
        except Outrun:
            self._member.contention.contest(QUEUES)

    def _stand(self) -> None:
        if not self._member.in_wait_queue:
            self._member.join(self._session, QUEUES, WINDOW, self._acks)
            self._acks = []
        self._rung.clear()
        self._member.attend(self._engine)
        if self._member.is_first:
            self._services += 1
            self._member.serve(QUEUES)
        elif not self._found and self._member.in_wait_queue:
            self._rung.wait(self._member.next_look_s())


def open_engine(cluster_file: str, namespace: str) -> Engine:
    environment = Environment(Clock(), random_id, random.Random(), call_s=30)
    database = FoundationDatabase.open(cluster_file)
    return Engine(database, namespace, environment)


def fill(engine: Engine, keys: int, messages: int) -> None:
    chosen = random.Random(0)
    for _ in range(messages // 1000):
        names = [f"key-{chosen.randrange(keys)}" if keys else "" for _ in range(1000)]
        engine.publisher.publish([Publication("", "q", b"x" * 500, key=name) for name in names])


def consume(cluster_file: str, namespace: str, consumers: int, seconds: float, ready: Any, results: Any) -> None:
    """One process. They begin when the last of them is ``ready``."""
    tallies: list[Tally] = []
    competitors = [Competitor(open_engine(cluster_file, namespace)) for _ in range(consumers)]
    ready.wait()
    began_s = time.monotonic() + BEGINNING_S + LEARNING_S
    _run_threads(
        [lambda competitor=competitor: competitor.run(tallies, began_s, seconds) for competitor in competitors]
    )
    results.put(total([*tallies, Tally(cpu_s=time.process_time() - min(each.began_cpu_s for each in competitors))]))


def _run_threads(targets: Sequence[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=each) for each in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def throughput(cluster_file: str, keys: int, consumers: int, seconds: float) -> Tally:
    namespace = random_id().hex()
    engine = open_engine(cluster_file, namespace)
    fill(engine, keys, max(MESSAGES, keys))
    done = total(_in_processes(consume, (cluster_file, namespace), consumers, seconds))
    engine.transactions.write(lambda work: work.tr.clear_range(*range_of(engine.keys.prefix)))  # its memory is small
    return done


def _in_processes(work: Callable[..., None], where: tuple[Any, ...], consumers: int, amount: float) -> list[Any]:
    """The consumers' results; they are spread over the processes."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    spread = [consumers // PROCESSES + (number < consumers % PROCESSES) for number in range(PROCESSES)]
    shares = [share for share in spread if share]
    ready = context.Barrier(len(shares))
    processes = [context.Process(target=work, args=(*where, share, amount, ready, results)) for share in shares]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return found


# -- latency -----------------------------------------------------------------------------------------------------------


def listen(url: str, server: int, queue: str, consumers: int, _amount: float, _ready: Any, results: Any) -> None:
    """One process: tells when each ping came, and what stalled, until it gets a farewell for each of its consumers."""
    found: list[tuple[int, float]] = []
    slow, over = list[stalls.Stall](), threading.Event()
    with Connection(url) as connection, connection.channel():
        watch = threading.Thread(target=stalls.watch, args=(connection.transport.store.engine, server, over, slow))
        watch.start()
        _run_threads([lambda: _listen_once(url, queue, found) for _ in range(consumers)])
        over.set()
        watch.join()
    results.put((found, slow))


def _listen_once(url: str, queue: str, found: list[tuple[int, float]]) -> None:
    left = threading.Event()

    def note(body: Any, message: Any) -> None:
        came_s = time.time()
        message.ack()
        if body is None:
            left.set()
        else:
            found.append((body["number"], came_s - body["sent_s"]))

    with Connection(url) as connection, connection.channel() as channel:
        channel.basic_qos(0, 1, False)
        with Consumer(channel, [Queue(queue, Exchange(""), queue, durable=True)], callbacks=[note]):
            while not left.is_set():
                connection.drain_events()


def latency(url: str, server: int, consumers: int) -> tuple[list[float], list[stalls.Stall]]:
    """Seconds of each ping, in order; and the slow reads."""
    queue = f"pings-{random_id().hex()[:8]}"
    answers: list[tuple[list[tuple[int, float]], list[stalls.Stall]]] = []
    collect = threading.Thread(target=lambda: answers.extend(_in_processes(listen, (url, server, queue), consumers, 0)))
    collect.start()
    with Connection(url) as connection, connection.channel() as channel:
        producer = Producer(channel)
        Queue(queue, Exchange(""), queue, durable=True)(channel).declare()
        time.sleep(3)  # the processes start, and their consumers find nothing
        for number in range(PINGS):
            producer.publish({"number": number, "sent_s": time.time()}, routing_key=queue)
            time.sleep(0.05)  # they are idle again
        for _ in range(consumers):
            producer.publish(None, routing_key=queue)
    collect.join()
    pings = sorted(each for part, _ in answers for each in part)
    return [took_s for number, took_s in pings if number >= LEARNING], [each for _, part in answers for each in part]


# -- tables ------------------------------------------------------------------------------------------------------------


def median(rounds: Sequence[Tally]) -> Tally:
    """Of each figure by itself."""
    return Tally(*(statistics.median(column) for column in zip(*rounds, strict=True)))


def show_throughput(console: Console, cluster_file: str, given: argparse.Namespace) -> None:
    shown = Table(title=f"one queue, windows of {WINDOW}, single-node FoundationDB, medians of {given.rounds}")
    for name in ("keys", "consumers", "messages/s", "of fewer", "lost per claim", "windows per service", "us/message"):
        shown.add_column(name, justify="left" if name == "keys" else "right")
    for name in given.keys:
        before = 0.0
        for consumers in given.consumers:
            rounds = [throughput(cluster_file, KEYS[name], consumers, given.seconds) for _ in range(given.rounds)]
            done = median(rounds)
            rate = done.messages / given.seconds
            windows = f"{done.claims / done.services:.1f}" if done.services else "-"
            shown.add_row(
                name,
                str(consumers),
                f"{rate:,.0f}",
                f"{rate / before:.2f}" if before else "",
                f"{done.lost / max(1, done.claims):.3f}",
                windows,
                f"{1e6 * done.cpu_s / max(1, done.messages):.0f}",
            )
            before = rate
        shown.add_section()
    console.print(shown)


def show_latency(console: Console, url: str, server: int, given: argparse.Namespace) -> None:
    shown = Table(title="one message for idle consumers, from before the publish to the callback, ms")
    for name in ("consumers", "p50", "p99", "p99 of one"):
        shown.add_column(name, justify="right")
    alone = 0.0
    for consumers in given.idle:
        pings, slow = latency(url, server, consumers)
        taken = sorted(pings)
        p99 = taken[int(len(taken) * 0.99)]
        alone = alone or p99
        shown.add_row(str(consumers), f"{1e3 * statistics.median(taken):.1f}", f"{1e3 * p99:.1f}", f"{p99 / alone:.2f}")
        for each in slow:
            console.print(
                f"{consumers} consumers: a read took {each.took:.0f} ms; for a core, a thread of ours waited for "
                f"{each.ours:.0f} ms, the client library's for {each.library:.0f}, the server's for {each.server:.0f}"
            )
    console.print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--consumers", type=int, nargs="*", default=[1, 8, 50, 200])
    parser.add_argument("--keys", nargs="*", choices=[*KEYS], default=[*KEYS])
    parser.add_argument("--idle", type=int, nargs="*", default=[1, 8, 50])
    parser.add_argument("--cluster", metavar="FILE", help="measure there, once, and print one JSON object")
    given = parser.parse_args()
    if given.cluster:
        print(json.dumps(throughput(given.cluster, KEYS[given.keys[0]], given.consumers[0], given.seconds)._asdict()))
        return
    reason = fdb_unavailable_reason()
    if reason is not None:
        raise SystemExit(reason)
    console = Console(width=110)
    with Cluster() as cluster:
        show_throughput(console, str(cluster.cluster_file), given)
        show_latency(console, f"fdb:///{cluster.cluster_file}", cluster.pid, given)


if __name__ == "__main__":
    main()
