"""What a run has measured, as tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

import goals
from brokers import Broker
from rich.table import Table

__all__ = ["CROWDS", "SPEED", "WORKERS", "all_of", "cell", "median"]

#: By the name of a result.
SPEED = {
    "publish": "publish/s",
    "named": "to a named exchange/s",
    "batch": "batch/s",
    "consume": "consume+ack/s",
    "tasks": "tasks/s",
    "task_us": "CPU us/task",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
}
CROWDS = {
    "publish": "publish/s by 1",
    "publish4": "by 4",
    "publish16": "by 16",
    "idle1_cpu_s": "1 idle: CPU s/min",
    "idle1_ops": "transactions/min",
    "idle50_cpu_s": "50 idle: CPU s/min",
    "idle50_ops": "transactions/min",
}
WORKERS = {
    "tasks": "1 x prefork 2: tasks/s",
    "workers1": "1 x prefork 4",
    "workers2": "2 x prefork 4",
    "workers4": "4 x prefork 4",
    "solo": "solo",
    "threads": "4 threads",
    "gevent": "50 greenlets",
}

Results = Mapping[str, Mapping[str, Sequence[float]]]


def all_of(found: list[Broker], results: Results, rounds: int) -> Iterator[Table]:
    yield _speed(found, results, rounds)
    if any(not broker.name.startswith("fdb") for broker in found):
        yield _ratios(found, results)
    crowds = "publishers at the same time, and consumers with nothing to do; processes, all together"
    for title, columns in (crowds, CROWDS), ("Celery workers at the same time", WORKERS):
        if _has(results, list(columns)[1:]):
            yield _plain(title, columns, found, results)
    yield goals.table(results)


def median(results: Results, broker: str, column: str) -> float | None:
    values = results.get(broker, {}).get(column)
    return statistics.median(values) if values else None


def cell(value: float | None, column: str) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if column.endswith(("_ms", "_us")) else f"{value:.2f}" if "cpu" in column else f"{value:,.0f}"


def _has(results: Results, columns: Sequence[str]) -> bool:
    return any(column in measured for measured in results.values() for column in columns)


def _speed(found: list[Broker], results: Results, rounds: int) -> Table:
    shown = Table(title=f"medians of {rounds} rounds; messages of about 900 B; one client process")
    for name in ("broker", "version", "a confirmed publish survives"):
        shown.add_column(name)
    for name in SPEED.values():
        shown.add_column(name, justify="right")
    for broker in found:
        cells = [cell(median(results, broker.name, column), column) for column in SPEED]
        shown.add_row(broker.name, broker.version, broker.durability, *cells)
    return shown


def _ratios(found: list[Broker], results: Results) -> Table:
    shown = Table(title="ours, as a multiple of each peer (latency: below 1 is faster)")
    shown.add_column("")
    for name in SPEED.values():
        shown.add_column(name, justify="right")
    ours = [broker for broker in found if broker.name.startswith("fdb")]
    for one in ours:
        for peer in found:
            if peer not in ours:
                shown.add_row(f"{one.name} / {peer.name}", *(_ratio(results, one, peer, column) for column in SPEED))
        shown.add_section()
    return shown


def _ratio(results: Results, one: Broker, peer: Broker, column: str) -> str:
    found = goals.ratio(results, (one.name, column), (peer.name, column))
    return f"{found:.2f}" if found else "-"


def _plain(title: str, columns: Mapping[str, str], found: list[Broker], results: Results) -> Table:
    shown = Table(title=title)
    shown.add_column("broker")
    for name in columns.values():
        shown.add_column(name, justify="right")
    for broker in found:
        if any(column in results[broker.name] for column in list(columns)[1:]):
            shown.add_row(broker.name, *(cell(median(results, broker.name, column), column) for column in columns))
    return shown
