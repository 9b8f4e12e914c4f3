"""What is done in the name of a session that was fenced leaves nothing in its name: each verb, late and in between."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress

import pytest
from kit.conformance.queue import Bench
from kit.conformance.wait_queues import Rival
from kit.faults import FaultyDatabase

from kombu_fdb.errors import QueueNotFound, SessionLost
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import ClaimTerms
from kombu_fdb.routing.tables import QueueDeclaration

SINGLE = {"x-single-active-consumer": True}


class Holder:
    """A process with a lease, a role, a consumer and the first place in a wait queue that it has served before."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        for name, arguments in (("single", SINGLE), ("line", {}), ("q", {})):
            bench.engine.queues.declare(QueueDeclaration(name, arguments=arguments))
        bench.engine.queues.declare(QueueDeclaration("vanishing", auto_delete=True))
        self.rival = Rival(bench, 1, "line")
        self.engine, self.session = self.rival.engine, self.rival.session
        bench.put(b"a", queue="line")
        (served,) = self.rival.serve().deliveries
        self.rival.join(served.lease)
        self.behind = Rival(bench, 1, "line")
        self.sight = self.rival.look()
        bench.put(b"a")
        (self.held,) = bench.take(1, session=self.session)
        self.engine.sessions.hold_role("promoter", self.session, None)
        self.engine.queues.add_consumer(self.session, "vanishing", "tag")

    def end(self) -> None:
        """What the sweep of another process does."""
        sessions = self.bench.engine.sessions
        assert sessions.fence(self.session, self.bench.beats()[self.session])
        sessions.leave_role("promoter", self.session)
        sessions.release(self.session)
        # Another process has declared it since.
        self.bench.engine.queues.declare(QueueDeclaration("vanishing", auto_delete=True))

    def rows(self) -> list[tuple[bytes, bytes]]:
        """All that name the session."""
        keys = self.engine.keys
        found = self.engine.transactions.read(lambda work: work.tr.get_range(*range_of(keys.prefix), snapshot=True))
        forms = {self.session, self.session.replace(b"\x00", b"\x00\xff")}  # in a value, and packed into a key
        return [row for row in found if any(form in part for form in forms for part in row)]


def claim(holder: Holder, *queues: str) -> None:
    terms = ClaimTerms(consumers=dict.fromkeys(queues, "tag"))
    holder.engine.messages.claim(holder.session, queues, 10, terms=terms)


def serve(holder: Holder, queue: str) -> None:
    holder.engine.messages.serve(holder.rival.demand, [queue], holder.sight.waiting)


def serve_the_other(holder: Holder) -> None:
    """One message, and it is dealt to the one behind: the server's own demand is not among the rows."""
    holder.bench.put(b"b", queue="line")
    serve(holder, "line")


VERBS: dict[str, Callable[[Holder], object]] = {
    "beat": lambda holder: holder.engine.sessions.beat(holder.session, consumed=["q"]),
    "claim nothing": lambda holder: claim(holder, "empty"),
    "claim": lambda holder: (holder.bench.put(b"b"), claim(holder, "q")),
    "become the active consumer": lambda holder: claim(holder, "single"),
    "join": lambda holder: holder.rival.join(),
    "look": lambda holder: holder.rival.look(),
    "serve": serve_the_other,
    "serve nothing": lambda holder: serve(holder, "line"),
    "leave the wait queue": lambda holder: holder.engine.messages.leave(holder.rival.demand),
    "evict": lambda holder: holder.engine.messages.evict(holder.behind.demand, holder.sight.first),
    "recover": lambda holder: holder.engine.sessions.recover(holder.session, holder.rival.demand.first),
    "take a role": lambda holder: holder.engine.sessions.hold_role("promoter", holder.session, None),
    "leave a role": lambda holder: holder.engine.sessions.leave_role("promoter", holder.session),
    "consume": lambda holder: holder.engine.queues.add_consumer(holder.session, "q", "tag"),
    "consume what is declared": lambda holder: holder.engine.queues.add_consumer(
        holder.session, "q", "tag", declared=True
    ),
    "cancel": lambda holder: holder.engine.queues.remove_consumer(holder.session, "vanishing", "tag"),
    "be active nowhere": lambda holder: holder.engine.queues.leave(holder.session, ["tag"]),
    "declare a queue of its own": lambda holder: holder.engine.queues.declare(
        QueueDeclaration("own", exclusive=True), owner=(holder.session, "tag")
    ),
    "ack": lambda holder: holder.engine.messages.ack([holder.held.lease]),
    "release": lambda holder: holder.engine.messages.release([holder.held.lease]),
    "reject": lambda holder: holder.engine.messages.reject([holder.held.lease]),
    "close": lambda holder: holder.engine.sessions.close(holder.session),
    "seal a beat": lambda holder: holder.engine.sessions.beats_of_a_writer(),
}


@pytest.fixture
def holder() -> Holder:
    return Holder(Bench(FaultyDatabase()))


def check(holder: Holder) -> None:
    assert holder.rows() == []
    assert "own" not in holder.engine.inspect.queues()
    assert "vanishing" in holder.engine.inspect.queues(), "it is another's by now"
    holder.bench.check()


@pytest.mark.parametrize("verb", VERBS)
def test_a_session_that_was_fenced_leaves_nothing_in_its_name(holder: Holder, verb: str) -> None:
    holder.end()
    with suppress(SessionLost, QueueNotFound):
        VERBS[verb](holder)
    check(holder)


@pytest.mark.parametrize("verb", VERBS)
def test_nor_does_one_that_is_fenced_just_before_the_commit(holder: Holder, verb: str) -> None:
    database = holder.bench.database
    assert isinstance(database, FaultyDatabase)
    commits = 0

    def end() -> None:
        nonlocal commits
        commits += 1
        if commits == (2 if verb in {"claim", "serve"} else 1):  # behind the publish
            database.before_commit = None
            holder.end()

    database.before_commit = end
    with suppress(SessionLost, QueueNotFound):
        VERBS[verb](holder)
    if database.before_commit is not None:  # it has not written anything
        database.before_commit = None
        holder.end()
    check(holder)


#: The verbs above.
IN_NAME = {
    "messages": {"ack", "claim", "evict", "join", "leave", "look", "reject", "release", "serve"},
    "queues": {"add_consumer", "declare", "leave", "remove_consumer"},
    "sessions": {"beat", "beats_of_a_writer", "close", "hold_role", "leave_role", "recover"},
}
#: These only look, or are called for a session that has ended, or begin one.
OTHERS = {
    "messages": {"arm", "arm_empty", "glance", "holds"},
    "queues": {"drop_consumers_part"},
    "sessions": {"describe", "fence", "forget_part", "neighbours", "release", "release_part", "skip_lease"},
}


def test_each_verb_that_is_given_a_session_is_in_the_table(holder: Holder) -> None:
    given = {"session_id", "session_ids", "demand", "owner", "leases"}
    for group, named in IN_NAME.items():
        verbs = vars(type(getattr(holder.engine, group))).items()
        found = {
            name for name, verb in verbs if not name.startswith("_") and given & set(inspect.signature(verb).parameters)
        }
        assert found - OTHERS[group] <= named, group
