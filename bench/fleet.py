"""What idle consumers ask of a FoundationDB server: ``python fleet.py --sessions 100 300 1000``.

Starts a server of one process, at a higher priority than all other programs where that is permitted. Counted by the
server's ``status``, and its processor time by the kernel's, in one run: the server by itself; what it gives to programs
that do nothing but what a heartbeat does, a read version, some reads and a commit; and fleets of sessions with one
consumer each, all of one queue, forked from a process that has imported all there is. In the clients the
transactions are counted by the thread that begins them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kombu import Connection, Consumer
from kombu.exceptions import OperationalError
from workloads import declared

from kombu_fdb.errors import KombuFDBError
from kombu_fdb.process import connect
from kombu_fdb.store.foundationdb.binding import binding
from kombu_fdb.testing.fdbserver import Cluster

_fork = multiprocessing.get_context("fork")
#: Of a program that asks for all the server gives: transactions under way at once, and reads in each.
UNDER_WAY, READS = 200, 4
DEADLINE_S = 300.0
FAILED = (OSError, OperationalError, KombuFDBError)
TICKS = os.sysconf("SC_CLK_TCK")


def server_counts(cluster: Cluster) -> Counter[str]:
    """What the server has done since it started."""
    asked = ["fdbcli", "-C", cluster.cluster_file, "--exec", "status json"]
    told = json.loads(subprocess.run(asked, capture_output=True, check=True).stdout)["cluster"]["workload"]
    times = Path(f"/proc/{cluster.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return Counter(
        transactions=int(told["transactions"]["started"]["counter"]),
        reads=int(told["operations"]["reads"]["counter"]),
        rows=int(told["keys"]["read"]["counter"]),
        writes=int(told["operations"]["writes"]["counter"]),
        commits=int(told["transactions"]["committed"]["counter"]),
        cpu=(int(times[11]) + int(times[12])) / TICKS,  # type: ignore[call-overload]  # a Counter of floats
    )


def counted(cluster: Cluster, seconds: float) -> dict[str, float]:
    """What the server does a second; ``cpu``: of a core."""
    before, began = server_counts(cluster), time.monotonic()
    time.sleep(seconds)
    after, took = server_counts(cluster), time.monotonic() - began
    return {each: (after[each] - before[each]) / took for each in after}


@contextmanager
def crowd(processes: int, work: Callable[[int, Any], None]) -> Iterator[Any]:
    """Processes that do ``work``, whose pipes each say when they are ready and are closed when they shall end."""
    pipes = [_fork.Pipe() for _ in range(processes)]
    running = [_fork.Process(target=work, args=(number, theirs)) for number, (_, theirs) in enumerate(pipes)]
    for each in running:
        each.start()
    try:
        for ours, _ in pipes:
            if not ours.poll(DEADLINE_S):
                raise SystemExit("a process of the crowd is not ready")
            ours.recv()
        yield [ours for ours, _ in pipes]
    finally:
        for each in running:
            each.kill()
            each.join()


def busy(cluster: Cluster) -> Callable[[int, Any], None]:
    """Asks for all the server gives."""

    def work(number: int, pipe: Any) -> None:
        database = binding().open(cluster.cluster_file)
        begun: deque[tuple[Any, list[Any]]] = deque()
        commits: deque[tuple[Any, Any]] = deque()
        pipe.send("ready")
        turn = 0
        while True:
            while len(begun) + len(commits) < UNDER_WAY:
                turn += 1
                tr = database.create_transaction()
                keys = [b"busy/%d/%d" % (number, (turn * READS + at) % 10_000) for at in range(READS)]
                begun.append((tr, [tr.get(key) for key in keys]))
                tr[keys[0]] = b"x" * 40
            tr, reads = begun.popleft()
            for each in reads:
                each.wait()
            commits.append((tr, tr.commit()))
            if len(commits) >= UNDER_WAY / 2:
                _, commit = commits.popleft()
                commit.wait()

    return work


def idle(cluster: Cluster, sessions: int) -> Callable[[int, Any], None]:
    """So many sessions in each process; each is a client of its own because its options are."""
    url = f"fdb:///{cluster.cluster_file}"

    def work(_number: int, pipe: Any) -> None:
        begun, ready = count_transactions(), threading.Semaphore(0)

        def consume(which: int) -> None:
            options = {"operation_timeout": 5 + which / 1e6, "connect_timeout": 60}
            while True:
                with suppress(*FAILED), Connection(url, transport_options=options) as connection:
                    _, queue = declared(connection)
                    with Consumer(connection, [queue], on_message=lambda message: message.ack()):
                        ready.release()
                        connection.drain_events()

        for which in range(sessions):
            threading.Thread(target=consume, args=(which,), daemon=True).start()
            ready.acquire()
        pipe.send("ready")
        while True:
            pipe.recv()
            pipe.send(Counter(begun))

    return work


def count_transactions() -> Counter[str]:
    """By the kind of thread, from now on."""
    begun: Counter[str] = Counter()
    open_database = connect._open_database

    def open_and_count(*arguments: Any) -> Any:
        database = open_database(*arguments)
        begin, watch = database.begin, database.arm

        def counting(**given: Any) -> Any:
            begun[kind()] += 1
            return begin(**given)

        def arming(*given: Any) -> Any:
            begun["watches"] += 1
            return watch(*given)

        database.begin, database.arm = counting, arming
        return database

    def kind() -> str:
        name = threading.current_thread().name
        return name.removeprefix("kombu-fdb-") if name.startswith("kombu-fdb-") else "consumer"

    connect._open_database = open_and_count
    return begun


def told(pipes: Any) -> Counter[str]:
    for pipe in pipes:
        pipe.send("tell")
    return sum((pipe.recv() for pipe in pipes), Counter())


def show(name: str, numbers: dict[str, float]) -> None:
    print(f"{name:28}", *(f"{each} {value:9.3f}" for each, value in numbers.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--settle", type=float, default=15.0, help="seconds that a fleet has before it is counted")
    given = parser.parse_args()
    with Cluster() as cluster:
        if shutil.which("chrt"):
            subprocess.run(["chrt", "-r", "-a", "-p", "1", str(cluster.pid)], check=False)
        show("by itself", counted(cluster, given.seconds))
        with crowd(2, busy(cluster)):
            time.sleep(2)
            show("all it gives", counted(cluster, given.seconds))
        for sessions in given.sessions:
            with crowd(given.processes, idle(cluster, sessions // given.processes)) as pipes:
                time.sleep(given.settle)
                before, began = told(pipes), time.monotonic()
                show(f"{sessions} idle sessions", counted(cluster, given.seconds))
                after, took = told(pipes), time.monotonic() - began
                show("  begun by", {each: (after[each] - before[each]) / took for each in sorted(after)})


if __name__ == "__main__":
    main()
