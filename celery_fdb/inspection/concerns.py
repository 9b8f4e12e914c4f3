"""What needs attention, of all that one look at the broker shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from celery_fdb.inspection.overview import Overview, QueueView
from celery_fdb.inspection.sessions import silent
from kombu_fdb.primitives.plural import plural

#: So many are told of, the worst first.
MOST = 12
#: Seconds after which the oldest message of a queue with consumers is a concern.
LATE_S = 300.0


class Concern(NamedTuple):
    """``queue``: where to act; None for the sessions."""

    text: str
    queue: str | None = None


def concerns(seen: Overview) -> list[Concern]:
    """What a person on call would want to know, the worst first."""
    found = [*_of_sessions(seen)]
    for each in seen.own_queues:
        found += [Concern(text, each.name) for text in _of_queue(each)]
    return found[:MOST]


def _of_sessions(seen: Overview) -> Iterator[Concern]:
    if seen.own_queues and not any(each.consumers for each in seen.live_queues):
        yield Concern("no worker consumes any queue")
    quiet = silent(seen)
    if quiet:
        yield Concern(f"{plural(len(quiet), 'session')} without a heartbeat: {quiet[0].host} {quiet[0].pid}")
    if seen.asides:
        yield Concern(f"{plural(len(seen.asides), 'thing')} set aside by duties: run fdb doctor")


def _of_queue(each: QueueView) -> Iterator[str]:
    if each.dead:
        yield f"{plural(each.dead, 'dead letter')} of {each.name}"
    if each.paused and each.ready:
        yield f"{each.name} is paused with {plural(each.ready, 'message')}"
    elif each.ready and not each.consumers:
        yield f"{each.name} has no consumers, and {each.ready:,} wait there"
    elif each.oldest_age_s is not None and each.oldest_age_s > LATE_S:
        yield f"the oldest message of {each.name} waits for {each.oldest_age_s / 60:,.0f} min"
