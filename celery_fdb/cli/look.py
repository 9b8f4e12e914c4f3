"""``status``, ``queues``, ``keys`` and ``sessions``: how things are."""

from __future__ import annotations

import dataclasses

import click
from rich.table import Table

from celery_fdb.cli.terminal import Answer, Run, age, command, table
from celery_fdb.overview import KeyView, Overview, QueueView, SessionView, as_json, look, look_at_keys

__all__ = [
    "KEY_SPEEDS",
    "key_speeds",
    "keys",
    "known",
    "queue_table",
    "queues",
    "session_table",
    "sessions",
    "status",
    "summary",
]

#: Column and event.
RATES = {"in": "published", "out": "claimed", "acked": "acked", "growth": "growth"}


@command()
def status(run: Run) -> Answer:
    """What is ready, delayed, leased and dead, by queue; how many sessions."""
    overview = look(run.broker)
    totals = {name: overview.total(name) for name in ("ready", "delayed", "leased", "dead")}
    return Answer({**as_json(overview), "totals": totals}, [*summary(overview), "", queue_table(overview.live_queues)])


def summary(overview: Overview) -> list[str]:
    """Two lines."""
    states = ", ".join(f"{overview.total(name):,} {name}" for name in ("ready", "delayed", "leased", "dead"))
    live = sum(session.open for session in overview.sessions)
    return [overview.broker, f"{states}; {len(overview.live_queues)} queues, {live} sessions"]


def queue_table(views: list[QueueView], speeds: dict[str, dict[str, float]] | None = None) -> Table:
    """``speeds``: of :func:`~celery_fdb.overview.rates`, if there were two looks."""
    speed = "" if speeds is None else "".join(f" >{name}/s" for name in RATES)
    return table(
        f"queue >ready >delayed >leased >dead >oldest >consumers{speed} note",
        [
            (
                *(view.name, view.ready, view.delayed, view.leased, view.dead, age(view.oldest_age_s), view.consumers),
                *(() if speeds is None else _speeds(speeds.get(view.name, {}))),
                "paused" if view.paused else "",
            )
            for view in views
        ],
    )


def _speeds(speeds: dict[str, float]) -> list[str]:
    return [
        f"{speeds.get(event, 0.0):+.1f}" if event == "growth" else f"{speeds.get(event, 0.0):.1f}"
        for event in RATES.values()
    ]


KEY_SPEEDS = "".join(f" >{name}/s" for name in RATES if name != "growth")


def key_speeds(speeds: dict[str, float] | None) -> list[str]:
    """The columns :data:`KEY_SPEEDS` of a key; empty if it is not counted by itself."""
    events = [event for event in RATES.values() if event != "growth"]
    return ["" if speeds is None else f"{speeds.get(event, 0.0):.1f}" for event in events]


@command()
@click.option("--all", "everything", is_flag=True, help="Also the queues of dead letters.")
def queues(run: Run, *, everything: bool) -> Answer:
    """Every queue, with how it was declared."""
    overview = look(run.broker)
    shown = overview.queues if everything else overview.live_queues
    rows = [
        (
            *(view.name, view.ready, view.delayed, view.leased, view.dead, age(view.oldest_age_s)),
            "paused" if view.paused else "",
            ", ".join(f"{name}={value}" for name, value in view.arguments.items()) if view.declared else "not declared",
        )
        for view in shown
    ]
    headings = "queue >ready >delayed >leased >dead >oldest note arguments"
    return Answer([dataclasses.asdict(view) for view in shown], [table(headings, rows)])


def known(run: Run, queue: str) -> QueueView:
    """Raises ``QueueNotFound``."""
    return look(run.broker, queues=[queue]).queues[0]


@command()
@click.argument("queue")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="The longest so many.")
def keys(run: Run, *, queue: str, limit: int) -> Answer:
    """The fairness keys of QUEUE that have messages or limits, the longest first."""
    known(run, queue)
    found = look_at_keys(run.broker, queue, top=limit)
    return Answer([dataclasses.asdict(each) for each in found], [key_table(found)])


def key_table(views: list[KeyView]) -> Table:
    return table("key >ready >leased limits", [(view.key, view.ready, view.leased, limits_of(view)) for view in views])


def limits_of(view: KeyView) -> str:
    if view.limits is None:
        return ""
    return ", ".join(
        name if value is True else f"{name}={value}"
        for name, value in view.limits.items()
        if value not in (None, False)
    )


@command()
def sessions(run: Run) -> Answer:
    """The consumer processes, and how many messages each holds."""
    found = look(run.broker, held=True).sessions
    return Answer([dataclasses.asdict(each) for each in found], [session_table(found)])


def session_table(views: list[SessionView], silent_s: dict[str, float] | None = None) -> Table:
    """``silent_s``: for how long each has been seen without a heartbeat."""
    return table(
        "session host >pid program >leased >ttl state queues",
        [
            (
                *(view.id[:12], view.host, str(view.pid or ""), view.program, view.leased, f"{view.ttl_s:g} s"),
                *(_state(view, silent_s), ", ".join(view.queues)),
            )
            for view in views
        ],
    )


def _state(view: SessionView, silent_s: dict[str, float] | None) -> str:
    if not view.open:
        return "ended, its messages are coming back"
    if silent_s is None:
        return "open"
    silent = silent_s.get(view.id, 0.0)
    return f"silent for {age(silent)}" if silent > view.ttl_s / 2 else "alive"
