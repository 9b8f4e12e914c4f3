"""A queue's end and a message that comes meanwhile, over every store: what is published is never lost or stranded."""

from contextlib import suppress

import pytest
from kit.conformance.queue import Bench
from kit.costs import CountingDatabase, cost

from kombu_fdb.engine import topology
from kombu_fdb.engine.messages import move
from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.model import Publication
from kombu_fdb.routing.tables import Exchange, QueueDeclaration


class Interrupted:
    """A way to the store on which something happens just before a transaction begins, or before it commits."""

    def __init__(self, inner):
        self._inner = inner
        self.commit_may_be_unknown = inner.commit_may_be_unknown
        self.writers_take_turns = inner.writers_take_turns
        self.before_begin = bool
        self.before_commit = bool

    def begin(self, *, timeout_s, read_only=False):
        self.before_begin()
        return _Transaction(self._inner.begin(timeout_s=timeout_s, read_only=read_only), self)

    def close(self):
        """The store is the test's."""


class _Transaction:
    def __init__(self, inner, way):
        self._inner = inner
        self._way = way

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def commit(self):
        self._way.before_commit()
        return self._inner.commit()


@pytest.fixture
def bench(database):
    bench = Bench(database)
    yield bench
    bench.check()
    bench.clean()


@pytest.fixture
def other(bench, database):
    """Another process in the same namespace, which can be interrupted."""
    other = Bench(Interrupted(database))
    other.namespace = bench.namespace
    other.clock = bench.clock
    other.engine = other.another()
    return other


def everything(bench):
    return [payload for _ in range(3) for payload in bench.payloads()]


@pytest.mark.parametrize("moment", range(4))
def test_what_is_published_after_a_queue_expired_belongs_to_the_next(bench, other, moment):
    """Before each transaction of the expiry, of which the first that deletes anything deletes all."""
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-expires": 1000}))
    bench.put(b"old")
    ((_, last_use, _),) = bench.engine.queues.expiring()
    way = other.database
    assert isinstance(way, Interrupted)
    begun = []

    def publish():
        if len(begun) == moment:
            bench.put(b"new" if bench.engine.inspect.queue("q") is None else b"late")
        begun.append(True)

    way.before_begin = publish
    assert other.engine.queues.expire("q", last_use)
    if len(begun) <= moment:
        bench.put(b"new")
    assert everything(bench) == [b"new"] * (moment > 0)


def test_a_queue_whose_last_consumer_leaves_stays_if_another_one_comes(bench, other, request):
    """Between the transaction's reads and its commit. SQLite lets no other writer in there, so it comes just before."""
    bench.engine.queues.declare(QueueDeclaration("q", auto_delete=True))
    bench.engine.queues.add_consumer(bench.session, "q", "old")
    bench.put(b"a")
    way = other.database
    assert isinstance(way, Interrupted)
    interruption = once(lambda: bench.engine.queues.add_consumer(bench.session, "q", "new"))
    if "sqlite" in request.node.name:
        way.before_begin = interruption
    else:
        way.before_commit = interruption
    other.engine.queues.remove_consumer(bench.session, "q", "old")
    assert bench.engine.inspect.queue("q") is not None
    assert bench.payloads() == [b"a"]
    bench.engine.messages.release([each.lease for each in bench.take()])
    bench.engine.queues.remove_consumer(bench.session, "q", "new")
    assert bench.engine.inspect.queue("q") is None


class Killed(BaseException):
    """The process."""


def fill(bench):
    """With more than one transaction purges, with keys and without."""
    for key in ("", "a", "b"):
        bench.put(*[b"old"] * 400, key=key)
    bench.put(*[b"old"] * 100, due_ms=bench.clock.wall_ms() + 9_000)


def deletes(bench, other):
    other.engine.queues.delete("q")


def expires(bench, other):
    ((_, last_use, _),) = bench.engine.queues.expiring()
    other.engine.queues.expire("q", last_use)


def leaves(bench, other):
    other.engine.queues.remove_consumer(bench.session, "q", "tag")


def dies(bench, other):
    """Its sweeper is killed."""
    if bench.session in bench.beats():
        bench.engine.sessions.fence(bench.session, bench.beats()[bench.session])
    other.engine.sessions.release(bench.session)


ENDS = {
    deletes: QueueDeclaration("q"),
    expires: QueueDeclaration("q", arguments={"x-expires": 1000}),
    leaves: QueueDeclaration("q", auto_delete=True),
    dies: QueueDeclaration("q", exclusive=True),
}


@pytest.mark.parametrize("database", ["memory"], indirect=True)  # no store has a part in it: it is before a transaction
@pytest.mark.parametrize("moment", range(4))
@pytest.mark.parametrize("verb", ENDS, ids=lambda verb: verb.__name__)
def test_a_queue_that_is_declared_again_when_its_end_was_interrupted_has_nothing_of_the_old(bench, other, verb, moment):
    """Its process is killed before its n-th transaction. That such an end leaves no rows is in test_every_commit.py."""
    owner = None if verb in (deletes, expires) else (bench.session, "tag")
    bench.engine.queues.declare(ENDS[verb], owner=owner)
    bench.engine.queues.bind("q", "amq.fanout", "")
    fill(bench)
    way, begun = other.database, list[bool]()
    assert isinstance(way, Interrupted)

    def kill():
        begun.append(True)
        if len(begun) > moment:
            raise Killed

    way.before_begin = kill
    with suppress(Killed):
        verb(bench, other)
    assert moment < 3 or len(begun) <= moment, "an end has more transactions, so there are more moments"
    way.before_begin = bool
    if bench.engine.inspect.queue("q") is not None:
        verb(bench, other)
    bench.engine.queues.declare(QueueDeclaration("q"))
    assert bench.counts() == (0, 0, 0)
    bench.engine.publisher.publish([Publication("", "q", b"new", key=key) for key in ("", "a", "b", "c")])
    session = bench.engine.sessions.open({})
    duties = bench.duties(session)
    for _ in range(80):
        bench.engine.sessions.beat(session)
        duties.run_once()
        bench.later(1)
    assert [each.payload for each in bench.engine.messages.claim(session, ["q"], 10)] == [b"new"] * 4
    assert list(bench.engine.inspect.queues()) == ["q"]
    duties.stop()


@pytest.mark.parametrize("due_s", [0, 9])
def test_what_is_only_delayed_is_purged_too_if_a_session_s_end_is_cut_short(bench, due_s):
    bench.engine.queues.declare(QueueDeclaration("q", exclusive=True), owner=(bench.session, "tag"))
    bench.put(b"old", due_ms=due_s and bench.clock.wall_ms() + due_s * 1_000)
    bench.engine.sessions.fence(bench.session, bench.beats()[bench.session])
    ended = bench.engine.transactions.write(lambda work: topology.drop_consumers(work, 10, bench.session))
    assert ended == (["q"], False)
    assert bench.engine.queues.being_deleted() == ["q"]
    assert not bench.engine.queues.finish_deletion_part("q", b"")
    assert bench.counts() == (0, 0, 0)


def test_a_deletion_gives_way_to_no_ack(bench, other, request):
    """An ack changes how many are held, which a deletion only looks at."""
    bench.put(b"a", b"b")
    one, _two = bench.take(2)
    way, begun = other.database, list[bool]()
    assert isinstance(way, Interrupted)
    if "sqlite" not in request.node.name:  # there no other writer comes in between
        way.before_commit = once(lambda: bench.engine.messages.ack([one.lease]))
    way.before_begin = lambda: begun.append(True)
    other.engine.transactions.write(lambda work: topology.delete_queue(work, "q"))
    assert len(begun) == 1


def test_deleting_what_has_many_bindings_takes_few_reads(database):
    """One at a time, 5,000 would never come to an end where a round trip takes a millisecond."""
    bench = Bench(CountingDatabase(database))

    def bind():
        bench.engine.queues.declare_exchange(Exchange("x", "topic"))
        for number in range(50):
            bench.engine.queues.bind("q", "x", f"k{number}")

    bind()
    assert isinstance(bench.database, CountingDatabase)
    assert cost(bench.database, lambda: bench.engine.queues.delete("q")).round_trips < 20
    bind()
    assert cost(bench.database, lambda: bench.engine.queues.delete_exchange("x")).round_trips < 5
    assert bench.engine.inspect.bindings() == []
    bench.clean()


def test_a_message_with_a_key_that_comes_during_a_deletion_is_found(bench, other, request):
    """Between the deletion's reads and its commit. SQLite lets no other writer in there, so it comes just before."""
    bench.put(b"old", key="a")
    way = other.database
    assert isinstance(way, Interrupted)
    interruption = once(lambda: bench.engine.publisher.publish([Publication("", "q", b"new", key="b")]))
    if "sqlite" in request.node.name:
        way.before_begin = interruption
    else:
        way.before_commit = interruption
    deleted = other.engine.queues.delete("q")
    left = bench.counts()[0]
    assert deleted is not None
    assert deleted + left == 2
    assert len(everything(bench)) == left, "nothing is stranded"


def once(event):
    waiting = [event]
    return lambda: waiting.pop()() if waiting else None


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        (topology, "purge_part", lambda queues, _: queues.purge_some("q")),
        (topology, "purge_part", lambda queues, _: queues.delete("q")),
        (move, "move_some", lambda queues, messages: messages.move_some("q", "other", queues.last("q"))),
    ],
    ids=["a purge in parts", "a deletion", "a move in parts"],
)
def test_a_part_that_took_too_long_is_followed_by_smaller_ones(bench, monkeypatch, module, name, call):
    """Else a queue that a slow store can't empty in such parts would never be empty."""
    verb = getattr(module, name)

    def slow(work, limit, *given):
        if limit > 150:
            raise StoreUnavailable
        return verb(work, limit, *given)

    monkeypatch.setattr(module, name, slow)
    bench.put(*[b"x"] * 10)
    for _ in range(3):
        with suppress(StoreUnavailable):
            call(bench.engine.queues, bench.engine.messages)
    assert not bench.counts()[0]
