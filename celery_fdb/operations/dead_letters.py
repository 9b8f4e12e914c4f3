"""Replay and discard: the dead letters that were selected, or all of a queue."""

from __future__ import annotations

from celery_fdb.operations.deed import Outcome, Request
from celery_fdb.operations.wording import names, outcome
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
    gone = [each for each in request.spots if broker.queue(request.queue).delete(each)]
    text = f"Discarded {plural(len(gone), 'dead letter')} of {request.queue}{names(request, gone)}."
    return outcome(text, len(request.spots) - len(gone))


def replay_all(broker: Broker, request: Request) -> Outcome:
    number = broker.dead_letters(request.queue).replay()
    return Outcome(f"Replayed {plural(number, 'dead letter')} of {request.queue}.")


def discard_all(broker: Broker, request: Request) -> Outcome:
    number = broker.dead_letters(request.queue).discard()
    return Outcome(f"Discarded {plural(number, 'dead letter')} of {request.queue}.")
