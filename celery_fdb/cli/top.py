"""``top``: a live table of queues, keys and sessions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import click
from rich.console import Group, RenderableType
from rich.live import Live

from celery_fdb.cli.look import KEY_SPEEDS, key_speeds, queue_table, session_table, summary
from celery_fdb.cli.terminal import Run, command, in_json, table
from celery_fdb.inspection.overview import Overview, as_json, key_rates, look, rates
from kombu_fdb.primitives.clock import Clock, SystemClock

Speeds = dict[str, dict[str, float]]
KeySpeeds = dict[str, Speeds]
Look = tuple[Overview, Speeds, KeySpeeds, dict[str, float]]


class Beats:
    """For how long each session has been seen without a heartbeat, by our own clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[str, float]] = {}

    def silent_s(self, overview: Overview) -> dict[str, float]:
        """Seconds since the first of the looks that saw the same beat."""
        now = self._clock.monotonic()
        was = self._seen
        self._seen = {each.id: (each.beat, now) for each in overview.sessions}
        for session, (beat, _) in list(self._seen.items()):
            if was.get(session, ("", 0.0))[0] == beat:
                self._seen[session] = was[session]
        return {session: now - since for session, (_, since) in self._seen.items()}


@command()
@click.option(
    "--interval", type=click.FloatRange(0.1), default=2.0, show_default=True, help="Seconds between refreshes."
)
@click.option("--iterations", type=click.IntRange(1), help="How many refreshes; default: until you press Ctrl-C.")
@click.option("--once", is_flag=True, help="The same as --iterations 1.")
@click.option("--keys", type=click.IntRange(0), default=5, show_default=True, help="How many keys of each queue.")
def top(run: Run, *, interval: float, iterations: int | None, once: bool, keys: int) -> None:
    """Watch the counts, ages and rates of queues and keys, and the sessions.

    With --json, print one document per refresh, one per line.
    """
    with suppress(KeyboardInterrupt):  # how one leaves it
        _watch(run, _looks(run, interval, 1 if once else iterations, keys))


def _watch(run: Run, looks: Iterator[Look]) -> None:
    if run.as_json:
        for overview, speeds, by_key, silent_s in looks:
            found = {**as_json(overview), "rates": speeds, "key_rates": by_key, "silent_s": silent_s}
            click.echo(in_json(found))
        return
    with Live(console=run.console, auto_refresh=False, screen=False) as live:
        for each in looks:
            live.update(_screen(*each), refresh=True)


def _looks(run: Run, interval_s: float, number: int | None, keys: int) -> Iterator[Look]:
    beats, before = Beats(SystemClock()), None
    pause = threading.Event()
    while number is None or number > 0:
        overview = look(run.broker, top_keys=keys, held=True)
        before = overview if before is None else before
        yield overview, rates(before, overview), key_rates(before, overview), beats.silent_s(overview)
        before = overview
        number = None if number is None else number - 1
        if number != 0:
            pause.wait(interval_s)


def _screen(overview: Overview, speeds: Speeds, by_key: KeySpeeds, silent_s: dict[str, float]) -> Group:
    parts: list[RenderableType] = [*summary(overview), "", queue_table(overview.own_queues, speeds)]
    rows = [
        (
            *(queue.name, each.key, each.ready, each.leased),
            *key_speeds(by_key.get(queue.name, {}).get(each.key) if each.key else None),
            "paused" if each.paused else "",
        )
        for queue in overview.own_queues
        for each in queue.keys
    ]
    if rows:
        parts += ["", table(f"queue key >ready >leased{KEY_SPEEDS} note", rows)]
    if overview.sessions:
        parts += ["", session_table(overview.sessions, silent_s)]
    return Group(*parts)
