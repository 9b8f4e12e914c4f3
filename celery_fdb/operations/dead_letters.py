"""Replay and discard: dead letters that were selected, or all that match a filter, of one queue or of all, in parts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any

from celery_fdb.inspection.dead_letters import dead_queues, died_elsewhere
from celery_fdb.inspection.overview import look
from celery_fdb.operations.action import Outcome, Request, each_selected, in_parts, names
from kombu_fdb import Broker, DeadLetters, Spot
from kombu_fdb.api.arguments import Conditions
from kombu_fdb.errors import InvalidArgument, QueueNotFound
from kombu_fdb.model import Listed, Part
from kombu_fdb.primitives.plural import plural


def replay(broker: Broker, request: Request) -> Outcome:
    """Each to the queue it died in."""
    queue, letters = broker.queue(request.queue), broker.dead_letters(request.queue)

    def act(spot: Spot) -> Listed | None:
        listed = queue.at(spot)
        return listed if listed is not None and letters.replay(at=[spot]) else None

    done = each_selected(request, act)
    queues = ", ".join(sorted({death.queue for _, listed in done.results for death in listed.message.deaths[:1]}))
    text = f"Replayed {plural(len(done.results), 'dead letter')}" + (f" to {queues}" if queues else "")
    return done.outcome(f"{text}{names(request, done.spots)}.")


def discard(broker: Broker, request: Request) -> Outcome:
    """For good."""
    done = each_selected(request, lambda spot: broker.queue(request.queue).delete(spot) or None)
    text = f"Discarded {plural(len(done.spots), 'dead letter')} of {request.queue}{names(request, done.spots)}."
    return done.outcome(text)


def replay_all(broker: Broker, request: Request) -> Outcome:
    """All that match, and had died when it was asked for."""
    part = partial(broker.dead_letters(request.queue).replay_part, **_conditions(request))
    return in_parts(part, request, "Replayed", "dead letter", _target(request), first=request.asked.by)


def discard_all(broker: Broker, request: Request) -> Outcome:
    """The same, for good."""
    part = partial(broker.dead_letters(request.queue).discard_part, **_conditions(request))
    return in_parts(part, request, "Discarded", "dead letter", _target(request), first=request.asked.by)


def _conditions(request: Request) -> Conditions:
    """Where there are too many to be named, those that can't be read are among all."""
    found = request.filter.conditions()
    return found if request.asked.named is None else {**found, "where": request.wanted}


def _target(request: Request) -> str:
    return f"{request.queue} ({request.filter})" if request.filter else request.queue


# -- of all queues of dead letters -------------------------------------------------------------------------------------


def replay_everywhere(broker: Broker, request: Request) -> Outcome:
    """All that match, in queue after queue. Where a queue to replay to is gone, the rest of those letters stays."""
    walk = _Everywhere(broker, request, DeadLetters.replay_part)
    done = in_parts(walk.part, request, "Replayed", "dead letter", _target(request))
    return done._replace(text=" ".join([done.text, *sorted(walk.stuck)]))


def discard_everywhere(broker: Broker, request: Request) -> Outcome:
    """The same, for good."""
    walk = _Everywhere(broker, request, DeadLetters.discard_part)
    return in_parts(walk.part, request, "Discarded", "dead letter", _target(request))


class _Everywhere:
    """One request's parts. Their mark is the queue, by name, and the mark of the letters in it."""

    def __init__(self, broker: Broker, request: Request, verb: Callable[..., Part]) -> None:
        self._broker = broker
        self._conditions = request.filter.conditions()
        self._wanted, self._by = request.wanted, request.asked.by
        self._verb = verb
        self._queues = sorted(dead_queues(broker, look(broker)))
        #: What could not be replayed.
        self.stuck: set[str] = set()

    def part(self, mark: bytes) -> Part:
        """Of the queue of the mark, or the first one behind it. Raises ``InvalidArgument``."""
        name, inner = _split(mark) if mark else ("", b"")
        at = bisect_left(self._queues, name)
        if at == len(self._queues):
            return Part(0, None)
        queue = self._queues[at]
        found = self._part_of(queue, inner if queue == name and inner else self._by)
        if found.following:
            return found._replace(following=_joined(queue, found.following))
        return found._replace(following=_joined(self._queues[at + 1], b"") if at + 1 < len(self._queues) else None)

    def _part_of(self, queue: str, mark: bytes) -> Part:
        conditions: dict[str, Any] = {
            **self._conditions,
            "where": lambda letter: died_elsewhere(letter, queue) and self._wanted(letter),
        }
        try:
            return self._verb(self._broker.dead_letters(queue), mark, **conditions)
        except QueueNotFound as error:
            self.stuck.add(f"Some stay in {queue}: {error}")
            return Part(0, None)


def _joined(queue: str, inner: bytes) -> bytes:
    name = queue.encode(errors="surrogatepass")
    return len(name).to_bytes(4, "big") + name + inner


def _split(mark: bytes) -> tuple[str, bytes]:
    end = 4 + int.from_bytes(mark[:4], "big")
    try:
        return mark[4:end].decode(errors="surrogatepass"), mark[end:]
    except ValueError:
        raise InvalidArgument("no mark of an action", fix="Begin it anew.") from None
