"""``limit``: how keys are worked on, changed while everything runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from celery_fdb.cli.look import known
from celery_fdb.cli.terminal import Answer, Run, command, table
from celery_fdb.inspection.time_formats import limit as written
from celery_fdb.inspection.time_formats import rate_of, seconds_of
from kombu_fdb.model import KeyLimits


class Rate(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4, and only for checkers
    """Messages per second, or as Celery writes rates: 10/s, 100/m, 1000/h."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        rate = rate_of(str(value))
        if rate is None:
            self.fail(f"{value!r} is not a rate such as 10, 100/m or 1000/h", param, ctx)
        return rate


class Duration(click.ParamType):  # type: ignore[type-arg]  # not generic when it runs
    """Seconds, or a number with its unit: 30s, 10m, 12h, 7d."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = seconds_of(str(value))
        if seconds is None:
            self.fail(f"{value!r} is not a duration such as 90 (seconds), 10m, 12h or 7d", param, ctx)
        return seconds


class OrNone(click.ParamType):  # type: ignore[type-arg]  # not generic when it runs
    """What another type takes, or ``none`` to take the limit away."""

    def __init__(self, inner: click.ParamType) -> None:  # type: ignore[type-arg]  # likewise
        self.inner = inner
        self.name = f"{inner.name}|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "none" else self.inner.convert(value, param, ctx)


RATE = Rate()
DURATION = Duration()
INTEGER_OR_NONE = OrNone(click.INT)


@command()
@click.argument("queue")
@click.argument("key", required=False)
@click.option("--weight", type=int, help="Messages per turn.")
@click.option("--max-in-flight", type=INTEGER_OR_NONE, help="How many may be leased at a time.")
@click.option("--rate", type=OrNone(RATE), help="Messages a second across all consumers; 100/m and 1000/h also work.")
@click.option("--burst", type=int, help="How many may be delivered at once within the rate.")
@click.option(
    "--capacity", type=INTEGER_OR_NONE, help="How many ready messages it may have before publishing is refused."
)
@click.option("--priority", type=INTEGER_OR_NONE, help="Priority of the whole key, 0 to 9 (9 is the most urgent).")
@click.option("--remove", is_flag=True, help="Remove the key's own limits; those of every key apply again.")
def limit(run: Run, *, queue: str, key: str | None, remove: bool, **given: Any) -> Answer:
    """Show or change the limits of KEY in QUEUE; without KEY, of every key that has no limits of its own.

    Only the limits you name change; none removes a limit. Changes apply from the next message on.
    """
    known(run, queue)
    named = {name: value for name, value in given.items() if value is not None}
    changes: dict[str, Any] = {name: None if value == "none" else value for name, value in named.items()}
    if remove and (changes or key is None):
        raise click.UsageError("--remove needs a KEY and no other option")
    target = run.broker.queue(queue)
    if remove and key is not None:
        target.unlimit(key)
    elif changes and key is None:
        target.limit_every_key(**changes)
    elif changes:
        target.limit(str(key), **changes)
    return _limits(queue, key, _read(run, queue, key))


def _read(run: Run, queue: str, key: str | None) -> KeyLimits:
    return run.broker.queue(queue).limits(key)


def _limits(queue: str, key: str | None, limits: KeyLimits) -> Answer:
    fields = dataclasses.asdict(limits)
    rows = [(name, _limit(name, value)) for name, value in fields.items()]
    return Answer({"queue": queue, "key": key, "limits": fields}, [table("limit value", rows)])


def _limit(name: str, value: Any) -> str:
    if value is None:
        return "none"
    return written(value) if name == "rate" else str(value)
