"""What a person does to a message, and what else may happen to it at that moment: as if one of the two had come first.

The oracle is the two orders themselves: whatever both verbs return, and all that is in the store afterwards, must be
what one of the orders gives. Then everything is taken or deleted, and nothing may be left.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import pytest
from kit.conformance.invariants import messages
from kit.conformance.queue import Bench
from kit.conformance.wait_queues import Competitor
from kit.duties import promote_all
from kit.faults import FaultyDatabase
from kit.simulation import twin

from kombu_fdb.engine import topology
from kombu_fdb.engine.dead_letters import LetterWalk
from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.parts import VERSION_BYTES
from kombu_fdb.errors import QueueError, SessionLost
from kombu_fdb.keyspace.codec import CHUNK_BYTES
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import Delivery, KeyLimits, SessionId, Spot, View

#: In several chunks, fewer than the old one has.
LARGE, OTHER_LARGE = b"old" * CHUNK_BYTES, b"new" * (CHUNK_BYTES // 2)
FAR_MS = 2**41
STATES = ("ready", "delayed", "leased", "dead")


class Scene(NamedTuple):
    """A message in one of the states, and a second one of its key behind it; the hands of another process."""

    bench: Bench
    engine: Engine
    session: SessionId
    state: str
    queue: str
    held: list[Delivery]
    spot: Spot
    walk: LetterWalk
    mark: bytes
    competitor: Competitor


Verb = Callable[[Scene], object]
#: What both verbs returned, and the messages there are.
Outcome = tuple[object, object, list[tuple[object, ...]]]


def scene(state):
    bench = Bench(FaultyDatabase(), task_ids=True)
    bench.put(LARGE, key="alice", due_ms=bench.clock.wall_ms() + 1_000 if state == "delayed" else 0)
    held = bench.take() if state in {"leased", "dead"} else []
    if state == "dead":
        bench.engine.messages.reject([each.lease for each in held])
    bench.put(b"second", key="alice")
    bench.later(1)
    queue, shown = ("q.dead", "ready") if state == "dead" else ("q", state)
    (first,) = bench.engine.inspect.page(queue, View(shown), 1).messages
    engine = bench.another()
    mark = engine.transactions.read(lambda work: topology.last_stamp(work, queue))[:VERSION_BYTES]
    walk = engine.dead_letters.walk("q.dead")
    return Scene(
        bench,
        engine,
        engine.sessions.open({}),
        state,
        queue,
        held,
        first.spot,
        walk,
        mark,
        Competitor(bench, 10, queue),
    )


# -- the verbs ---------------------------------------------------------------------------------------------------------


def reschedule(at, due_ms, payload=None):
    return at.engine.messages.reschedule(at.queue, at.spot, due_ms, payload=payload)


def replay_at(at, payload=None):
    return at.engine.dead_letters.replay_at(at.queue, at.spot.position, at.spot.message_id, payload=payload)


def replay_part(at):
    return at.engine.dead_letters.replay_part(at.walk, b"", 10)[0]


def discard_part(at):
    return at.engine.dead_letters.discard_part(at.walk, b"", 10)[0]


def purge_part(at):
    return at.engine.queues.purge_some(at.queue, at.mark)[0]


def claim(at):
    return [each.payload[:3] for each in at.engine.messages.claim(at.session, [at.queue], 10)]


def serve(at):
    """The wait queue of those who consume it."""
    return [each.payload[:3] for each in at.competitor.serve().deliveries]


def settle(at, verb):
    return getattr(at.engine.messages, verb)([each.lease for each in at.held])


def delete_at(at):
    return at.engine.messages.delete_at(at.queue, at.spot.state, at.spot.position, at.spot.message_id)


ON_ONE = {
    "reschedule": partial(reschedule, due_ms=FAR_MS),
    "run now": partial(reschedule, due_ms=0),
    "run another": partial(reschedule, due_ms=0, payload=OTHER_LARGE),
    "delay another": partial(reschedule, due_ms=FAR_MS, payload=b"new"),
    "purge a part": purge_part,
}
ON_LETTERS = {
    "replay": replay_at,
    "replay another": partial(replay_at, payload=OTHER_LARGE),
    "replay a part": replay_part,
    "discard a part": discard_part,
}
ON_LEASES = {
    "ack": partial(settle, verb="ack"),
    "release": partial(settle, verb="release"),
    "reject": partial(settle, verb="reject"),
    "end of the session": lambda at: at.engine.sessions.close(at.bench.session),
    "recovery": lambda at: at.engine.sessions.recover(at.bench.session, at.held[0].lease.number),
}
ANYWHERE = {
    "claim": claim,
    "service": serve,
    "promotion": lambda at: promote_all(at.engine),
    "cancel": lambda at: len(at.engine.messages.cancel(LARGE[:100].hex())),
    "delete": delete_at,
    "move": lambda at: at.engine.messages.move(at.queue, "elsewhere"),
    "delete the queue": lambda at: at.engine.queues.delete(at.queue),
    "pause": lambda at: at.engine.queues.limit("q", "alice", KeyLimits(paused=True)),
}


def by_a_person(state):
    return ON_ONE | (ON_LETTERS if state == "dead" else {})


def others(state):
    return by_a_person(state) | ANYWHERE | (ON_LEASES if state == "leased" else {})


# -- what comes of them ------------------------------------------------------------------------------------------------


def attempt(verb, at):
    try:
        return verb(at)
    except (QueueError, SessionLost) as error:
        return type(error).__name__


def stored(bench):
    """All messages as they stand; each can be read."""
    found = []
    for queue in bench.engine.inspect.queues():
        for state in ("ready", "delayed", "leased"):
            for listed in bench.engine.inspect.page(queue, View(state), 10).messages:
                whole = bench.engine.inspect.read_at(queue, state, listed.position)
                assert whole is not None
                message = whole.message
                text = message.payload.replace(LARGE, b"LARGE").replace(OTHER_LARGE, b"OTHER LARGE")
                found.append((queue, state, text, message.key, message.redeliveries, len(message.deaths)))
    return sorted(found, key=repr)


def empty(bench):
    bench.engine.queues.limit("q", "alice", None)
    for queue, counts in bench.engine.inspect.queues().items():
        session = bench.engine.sessions.open({})
        taken = [each for _ in range(3) for each in bench.engine.messages.claim(session, [queue], 10)]
        assert len(taken) == counts.ready, "what is ready can be claimed"
        bench.engine.messages.ack([each.lease for each in taken])
    for session, *_ in bench.engine.sessions.beats():
        bench.engine.sessions.close(session)
    for queue in bench.engine.inspect.queues():
        bench.engine.queues.delete(queue)
    bodies = []
    bench.write(lambda tr: bodies.extend(tr.get_range(*range_of(bench.engine.keys._key("body")), snapshot=True)))
    bench.check()
    assert (messages(bench.engine), bodies) == ({}, [])


def outcome(at, first, second):
    at.bench.check()
    found = (first, second, stored(at.bench))
    empty(at.bench)
    return found


@cache
def in_turn(state, first, second):
    at, verbs = scene(state), others(state)
    return outcome(at, attempt(verbs[first], at), attempt(verbs[second], at))


def at_once(state, first, second):
    """The second just before the first writing commit of the first; None if that writes nothing."""
    at, verbs, found = scene(state), others(state), []
    database = at.bench.database
    assert isinstance(database, FaultyDatabase)

    def before():
        database.before_commit = None
        found.append(attempt(verbs[second], at))

    database.before_commit = before
    result = attempt(verbs[first], at)
    database.before_commit = None
    return outcome(at, result, found[0]) if found else None


def race(state, first, second):
    raced = at_once(state, first, second)
    if raced is None:
        return
    theirs, ours, left = in_turn(state, second, first)
    assert raced in (in_turn(state, first, second), (ours, theirs, left))


@pytest.mark.parametrize(("state", "first"), [(state, first) for state in STATES for first in by_a_person(state)])
def test_it_is_as_if_one_had_come_first(state, first):
    for other in others(state):
        race(state, first, other)
        if other not in by_a_person(state):
            race(state, other, first)


@pytest.mark.parametrize(
    ("name", "state", "verb"),
    [
        ("a rescheduling does not conflict with claims", "ready", "run another"),
        ("a purge does not conflict with claims", "delayed", "purge a part"),
        ("two replays do not conflict", "dead", "replay a part"),
    ],
)
def test_without_its_guard_it_is_not(name, state, verb):
    for other in others(state):
        for pair in ((verb, other), (other, verb)):
            in_turn(state, *pair)
    with twin(name), pytest.raises(AssertionError):
        for other in others(state):
            race(state, verb, other)
