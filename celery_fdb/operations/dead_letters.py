"""Replay and discard: the dead letters that were selected, or all that match a filter, in parts."""

from __future__ import annotations

from functools import partial

from celery_fdb.operations.deed import Outcome, Request, names, outcome
from celery_fdb.operations.parts import in_parts
from kombu_fdb import Broker
from kombu_fdb.primitives.plural import plural

__all__ = ["discard", "discard_all", "replay", "replay_all"]


def replay(broker: Broker, request: Request) -> Outcome:
    """Each to the queue it died in."""
    queue, letters = broker.queue(request.queue), broker.dead_letters(request.queue)
    seen = [(each, queue.at(each)) for each in request.spots]
    replayed = [(spot, listed) for spot, listed in seen if listed is not None and letters.replay(at=[spot])]
    queues = ", ".join(sorted({death.queue for _, listed in replayed for death in listed.message.deaths[:1]}))
    done = f"Replayed {plural(len(replayed), 'dead letter')}" + (f" to {queues}" if queues else "")
    return outcome(f"{done}{names(request, [each for each, _ in replayed])}.", len(request.spots) - len(replayed))


def discard(broker: Broker, request: Request) -> Outcome:
    """For good."""
    gone = [each for each in request.spots if broker.queue(request.queue).delete(each)]
    text = f"Discarded {plural(len(gone), 'dead letter')} of {request.queue}{names(request, gone)}."
    return outcome(text, len(request.spots) - len(gone))


def replay_all(broker: Broker, request: Request) -> Outcome:
    """All that match, and died before it began."""
    part = partial(broker.dead_letters(request.queue).replay_part, **request.filter.conditions())
    return in_parts(part, request.mark).tell("Replayed", "dead letter", _target(request))


def discard_all(broker: Broker, request: Request) -> Outcome:
    """The same, for good."""
    part = partial(broker.dead_letters(request.queue).discard_part, **request.filter.conditions())
    return in_parts(part, request.mark).tell("Discarded", "dead letter", _target(request))


def _target(request: Request) -> str:
    return f"{request.queue} ({request.filter})" if request.filter else request.queue
