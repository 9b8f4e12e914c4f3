"""Commands that show numbers: ``status``, ``queues``, ``keys``, ``sessions``, and ``top``, which refreshes them."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from celery_fdb.cli.terminal import Answer, Invocation, command, table
from celery_fdb.inspection import formats
from celery_fdb.inspection.overview import COUNTED, Overview, QueueView, find_keys, key_as_json, look, look_at_keys
from kombu_fdb.model import KeyCounts, KeyLimits, SessionFacts, is_internal
from kombu_fdb.primitives.masking import masked
from kombu_fdb.primitives.plural import plural
from kombu_fdb.primitives.ranges import LONGEST_S

# -- once --------------------------------------------------------------------------------------------------------------


ENDED = "ended, its messages are being released"
#: What tables show instead of a key for messages without one.
NO_KEY = "(no key)"
#: The columns of speeds, and the event of each.
RATES = {"in": "published", "out": "claimed", "acked": "acked", "growth": "growth"}


@command()
def status(invocation: Invocation) -> Answer:
    """Count the ready, delayed, leased and dead messages of each queue, and the sessions."""
    overview = look(invocation.broker)
    totals = {name: overview.total(name) for name in COUNTED}
    about = summary(overview)
    if newer := sum(queue.newer for queue in overview.queues):  # an older worker could not read them
        about.append(f"messages of a newer version: {newer:,}; upgrade the workers")
    if overview.asides:
        about.append(f"set aside by duties: {len(overview.asides)}; run `doctor` to see what and why")
    return Answer({**overview.as_json(), "totals": totals}, [*about, "", queue_table(overview.own_queues)])


def summary(overview: Overview) -> list[str]:
    """The broker's totals, in two lines."""
    states = ", ".join(f"{overview.total(name):,} {name}" for name in COUNTED)
    live = sum(session.open for session in overview.sessions)
    return [overview.broker, f"{states}; {plural(len(overview.own_queues), 'queue')}, {plural(live, 'session')}"]


def queue_table(views: list[QueueView], speeds: dict[str, dict[str, float]] | None = None) -> Table:
    """The table of queues. ``speeds``: from ``Overview.rates``; None for a table without them."""
    speed = "" if speeds is None else "".join(f" >{name}" for name in RATES)
    return table(
        f"queue >ready >delayed >leased >dead >oldest >consumers{speed} note",
        [
            (
                *(view.name, view.ready, view.delayed, view.leased, view.dead, formats.age(view.oldest_age_s)),
                view.consumers,
                *(() if speeds is None else _speeds(speeds.get(view.name))),
                "paused" if view.paused else "",
            )
            for view in views
        ],
    )


def _speeds(speeds: dict[str, float] | None) -> list[str]:
    """The cells of a queue's speeds. None: there was only one look, which has no speeds."""
    if speeds is None:
        return ["–"] * len(RATES)  # noqa: RUF001 - a dash, as on the pages
    growth = speeds.get("growth", 0.0)
    return [
        f"{'-' if growth < 0 else '+'}{formats.rate(abs(growth))}"
        if event == "growth"
        else formats.rate(speeds.get(event, 0.0))
        for event in RATES.values()
    ]


KEY_SPEEDS = "".join(f" >{name}" for name in RATES if name != "growth")


def key_speeds(speeds: dict[str, float] | None) -> list[str]:
    """The columns :data:`KEY_SPEEDS` of a key; empty if it is not counted by itself."""
    events = [event for event in RATES.values() if event != "growth"]
    return ["" if speeds is None else formats.rate(speeds.get(event, 0.0)) for event in events]


@command()
@click.option("--all", "everything", is_flag=True, help="Include the queues of dead letters, and Celery's own.")
def queues(invocation: Invocation, *, everything: bool) -> Answer:
    """List every queue and how it was declared."""
    overview = look(invocation.broker)
    shown = overview.queues if everything else overview.own_queues
    rows = [
        (
            *(view.name, view.ready, view.delayed, view.leased, view.dead, formats.age(view.oldest_age_s)),
            "paused" if view.paused else "",
            ", ".join(f"{name}={masked(name, value)}" for name, value in view.arguments.items())
            if view.declared
            else "not declared",
        )
        for view in shown
    ]
    headings = "queue >ready >delayed >leased >dead >oldest note arguments"
    names = {view.name for view in shown}
    document = [each for each in overview.as_json()["queues"] if each["name"] in names]
    return Answer(document, [table(headings, rows)])


def known(invocation: Invocation, queue: str) -> QueueView:
    """The view of a queue. Raises ``QueueNotFound``."""
    return look(invocation.broker, queues=[queue]).queues[0]


@command()
@click.argument("queue")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="How many.")
@click.option("--prefix", help="Only keys that begin with this, by name.")
def keys(invocation: Invocation, *, queue: str, limit: int, prefix: str | None) -> Answer:
    """List the fairness keys of QUEUE that have messages or limits, longest first."""
    known(invocation, queue)
    if prefix is None:
        found = look_at_keys(invocation.broker, queue, top=limit)
    else:
        found = find_keys(invocation.broker, queue, limit, prefix=prefix)[0]
    rows = [(*_counts(key, each), limits_of(each.limits)) for key, each in found.items()]
    document = [key_as_json(key, dataclasses.asdict(each)) for key, each in found.items()]
    return Answer(document, [table("key >ready >leased limits", rows)])


def _counts(key: str, counts: KeyCounts) -> tuple[str, int | None, int]:
    return key or NO_KEY, counts.ready if key else None, counts.leased


def limits_of(limits: KeyLimits | None) -> str:
    if limits is None:
        return ""
    return ", ".join(
        name if value is True else f"{name}={formats.limit(value) if name == 'rate' else value}"
        for name, value in dataclasses.asdict(limits).items()
        if value not in (None, False)
    )


@command()
def sessions(invocation: Invocation) -> Answer:
    """List the consumer processes, and how many messages each one holds."""
    overview = look(invocation.broker, held=True)
    return Answer(overview.as_json()["sessions"], [session_table(overview)])


def session_table(overview: Overview) -> Table:
    return table(
        "session host >pid program >leased >ttl >heard state queues",
        [
            (
                *(each.id[:12], each.host, str(each.pid or ""), each.program, each.held, f"{each.ttl_s:g} s"),
                *_heard(each, overview.heard_s(each)),
                ", ".join(name for name in each.consumed if not is_internal(name)),
            )
            for each in overview.sessions
        ],
    )


def _heard(session: SessionFacts, quiet_s: float | None) -> tuple[str, str]:
    """The time since a session's last heartbeat, and the session's state."""
    state = session.state(quiet_s)
    return formats.age(quiet_s) + " ago" * (quiet_s is not None), ENDED if state == "ended" else state


# -- top ---------------------------------------------------------------------------------------------------------------


class Seconds(click.FloatRange):
    """Seconds in a range, in which ``nan`` is not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        return self.fail(f"{value!r} is not a number of seconds", param, ctx) if math.isnan(found) else found


@command()
@click.option(
    "--interval", type=Seconds(0.1, LONGEST_S), default=2.0, show_default=True, help="Seconds between refreshes."
)
@click.option("--iterations", type=click.IntRange(1), help="How many refreshes; default: until you press Ctrl-C.")
@click.option("--once", is_flag=True, help="The same as --iterations 1.")
@click.option("--keys", type=click.IntRange(0), default=5, show_default=True, help="How many keys of each queue.")
def top(invocation: Invocation, *, interval: float, iterations: int | None, once: bool, keys: int) -> None:
    """Watch the counts, ages and rates of queues and keys, and the sessions.

    With --json, print one document per refresh, one per line.
    """
    with suppress(KeyboardInterrupt):  # Ctrl-C ends it
        _watch(invocation, _looks(invocation, interval, 1 if once else iterations, keys))


def _watch(invocation: Invocation, looks: Iterator[tuple[Overview, Overview]]) -> None:
    if invocation.as_json:
        for overview, before in looks:
            rates = {"rates": overview.rates(before), "key_rates": overview.key_rates(before)}
            silent_s = {each.id: overview.heard_s(each) for each in overview.sessions}
            invocation.print_json({**overview.as_json(), **rates, "silent_s": silent_s})
        return
    with Live(console=invocation.console, auto_refresh=False, screen=False) as live:
        for each in looks:
            live.update(_screen(*each), refresh=True)
    if not invocation.console.is_terminal:
        invocation.console.line()  # Live ends only a terminal's last line


def _looks(
    invocation: Invocation, interval_s: float, number: int | None, keys: int
) -> Iterator[tuple[Overview, Overview]]:
    """Each look, with the one before it; the first one with itself."""
    before = None
    pause = threading.Event()
    for looks in count(1):
        overview = look(invocation.broker, top_keys=keys, held=True)
        yield overview, before or overview
        before = overview
        if looks == number:
            return
        pause.wait(interval_s)


def _screen(overview: Overview, before: Overview) -> Group:
    parts: list[RenderableType] = [*summary(overview), "", queue_table(overview.own_queues, overview.rates(before))]
    by_key = overview.key_rates(before)
    rows = [
        (
            *(queue.name, *_counts(key, each)),
            *key_speeds(by_key.get(queue.name, {}).get(key) if key else None),
            "paused" if each.limits and each.limits.paused else "",
        )
        for queue in overview.own_queues
        for key, each in queue.keys.items()
    ]
    if rows:
        parts += ["", table(f"queue key >ready >leased{KEY_SPEEDS} note", rows)]
    if overview.sessions:
        parts += ["", session_table(overview)]
    return Group(*parts)
