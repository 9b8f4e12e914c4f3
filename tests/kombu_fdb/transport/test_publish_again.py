"""A publish whose answer was lost is published again by kombu and Celery: it is stored once (again.py)."""

from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from celery import Celery
from kit.conformance.queue import Bench
from kit.faults import Fault, Faults, FaultyDatabase, Interrupted
from kombu import Connection

from kombu_fdb import Broker
from kombu_fdb.engine.messages import publish as republishing
from kombu_fdb.errors import CommitUnknown, KombuFDBError, StoreUnavailable
from kombu_fdb.model import Publication
from kombu_fdb.primitives.clock import random_id
from kombu_fdb.store.retry import LONGEST_DOUBT_S, Retry
from kombu_fdb.testing.clock import ManualClock
from kombu_fdb.testing.stores import MemoryStores
from kombu_fdb.transport import channel

#: When the commit lands whose answer was lost: never, before it is published again, and later.
LANDINGS = [None, 0.0, 4.0]


@pytest.fixture
def name():
    """Of a store that no pool of an earlier test has a connection to."""
    return f"again-{random_id().hex()}"


@pytest.fixture
def url(name):
    return f"fdb+memory://{name}"


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def stores(faults):
    with MemoryStores(lambda: FaultyDatabase(faults=faults)) as stores:
        yield stores


@pytest.fixture
def ready(stores, name, url):
    """How many messages there are when all has landed."""
    with Broker.open(url) as broker:

        def ready(queue):
            stores.store(name).land_late_commits()
            return broker.queue(queue).stats().ready

        yield ready


def lose(faults, *landings_s):
    faults.at_commits(*[Fault.COMMIT_LATE] * len(landings_s))
    faults.at_landings(*landings_s)


@pytest.mark.parametrize("lands_s", LANDINGS)
def test_a_producer_that_retries(faults, url, ready, lands_s):
    with Connection(url) as connection:
        producer = connection.Producer(auto_declare=False)
        producer.publish("warm", routing_key="other")
        lose(faults, lands_s)
        producer.publish("x", routing_key="q", retry=True, retry_policy={"interval_start": 0, "max_retries": 3})
        producer.publish("y", routing_key="q")
    assert ready("q") == 2


@pytest.mark.parametrize("lands_s", LANDINGS)
def test_celery_with_its_default_retry(faults, url, ready, lands_s):
    with Celery(broker=url, set_as_current=False) as app:
        app.send_task("warm", queue="celery")
        lose(faults, lands_s)
        app.send_task("tasks.add", args=(1, 2), countdown=None, queue="celery")
    assert faults.struck[Fault.COMMIT_LATE] == 1
    assert ready("celery") == 2


@pytest.mark.parametrize("lands_s", LANDINGS)
def test_a_task_whose_countdown_ends_in_between(monkeypatch, faults, url, ready, lands_s):
    due = datetime.now(UTC) + timedelta(minutes=1)
    with Connection(url) as connection:
        producer = connection.Producer(auto_declare=False)
        producer.publish("warm", routing_key="q")
        task = partial(producer.publish, "x", routing_key="q", headers={"task": "t", "id": "1", "eta": due.isoformat()})
        lose(faults, lands_s)
        with pytest.raises(CommitUnknown):
            task()
        monkeypatch.setattr(channel, "now_ms", lambda: int(due.timestamp() * 1000) + 1)
        task()
    ready("q")
    with Broker.open(url) as broker:
        counts = broker.queue("q").stats()
    assert counts.ready + counts.delayed == 2


@pytest.mark.parametrize("lands_s", LANDINGS)
def test_the_last_connection_is_dropped_in_between(faults, stores, name, url, lands_s):
    """The client closes its store with it, and forgets nothing."""
    with Connection(url) as connection:
        producer = connection.Producer(auto_declare=False)
        producer.publish("warm", routing_key="other")
        lose(faults, lands_s)
        with pytest.raises(CommitUnknown):
            producer.publish("x", routing_key="q")
    with Connection(url) as connection:
        connection.Producer(auto_declare=False).publish("x", routing_key="q")
        stores.store(name).land_late_commits()
        assert connection.default_channel.engine.inspect.counts("q").ready == 1


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def bench(clock, faults):
    bench = Bench(FaultyDatabase(clock=clock, faults=faults))
    bench.clock = clock
    bench.engine = bench.another()
    return bench


def publication(text, **fields):
    return Publication("", "q", text.encode(), **fields)


def publish(bench, *texts):
    return bench.engine.publisher.publish([publication(text) for text in texts])


def stored(bench):
    database = bench.database
    assert isinstance(database, FaultyDatabase)
    database.land_late_commits()
    return sorted(payload.decode() for payload in bench.payloads())


@pytest.mark.parametrize("lands_s", LANDINGS)
def test_cut_into_other_batches(bench, faults, lands_s):
    lose(faults, lands_s)
    with pytest.raises(CommitUnknown):
        publish(bench, "a", "b", "c")
    assert publish(bench, "c", "d") == [["q"], ["q"]]
    assert publish(bench, "a", "b") == [["q"], ["q"]]
    assert stored(bench) == ["a", "b", "c", "d"]
    assert not bench.engine.publisher.doubts


@pytest.mark.parametrize("lands_s", LANDINGS)
@pytest.mark.parametrize(
    "other", [publication("b"), Publication("no such exchange", "q", b"b")], ids=["lost", "refused"]
)
def test_beside_another_that_fails(bench, faults, lands_s, other):
    """What was found to be stored already is still known at the next attempt."""
    lose(faults, lands_s)
    with pytest.raises(CommitUnknown):
        publish(bench, "a")
    faults.at_commits(None, Fault.COMMIT_LATE) if lands_s != 0.0 else lose(faults, None)
    with pytest.raises(KombuFDBError):
        bench.engine.publisher.publish([publication("a"), other])
    faults.stop()
    assert publish(bench, "a", "b") == [["q"], ["q"]]
    assert stored(bench) == ["a", "b"]


@pytest.mark.parametrize("lands_s", LANDINGS)
def test_equal_messages_are_as_many_as_were_published(bench, faults, lands_s):
    lose(faults, lands_s)
    with pytest.raises(CommitUnknown):
        publish(bench, "tick", "tick")
    for _ in range(3):
        publish(bench, "tick")
    assert stored(bench) == ["tick"] * 3


@pytest.mark.parametrize("lands_s", LANDINGS)
def test_a_delay_is_reckoned_anew(bench, faults, lands_s):
    lose(faults, lands_s)
    with pytest.raises(CommitUnknown):
        bench.engine.publisher.publish([publication("x", due_ms=bench.clock.wall_ms() + 5_000)])
    bench.clock.advance(0.5)
    bench.engine.publisher.publish([publication("x", due_ms=bench.clock.wall_ms() + 5_000)])
    stored(bench)
    assert bench.counts() == (0, 1, 0)


@pytest.mark.parametrize("lands_s", [None, 4.0])
def test_the_answer_is_lost_again_and_again(bench, faults, lands_s):
    """That of the fence, too; and the store is away in between."""
    lose(faults, *[lands_s] * 5)
    for _ in range(4):
        with pytest.raises(CommitUnknown):
            publish(bench, "x")
        bench.clock.advance(1)
    faults.at_reads(Fault.UNAVAILABLE)
    with pytest.raises(CommitUnknown) as caught:
        publish(bench, "x")
    assert isinstance(caught.value.__cause__, StoreUnavailable)
    faults.stop()
    publish(bench, "x")
    assert stored(bench) == ["x"]


def test_an_exception_out_of_a_signal_handler(bench, faults):
    faults.at_commits(Fault.INTERRUPTED)
    with pytest.raises(Interrupted):
        publish(bench, "x")
    publish(bench, "x")
    assert stored(bench) == ["x"]


def test_a_doubt_that_is_too_old_is_none(bench, faults):
    """Its token may have been cleared: what is published again is stored again, rather than lost."""
    lose(faults, 0.0)
    with pytest.raises(CommitUnknown):
        publish(bench, "x")
    bench.clock.advance(LONGEST_DOUBT_S + 1)
    publish(bench, "x")
    assert stored(bench) == ["x", "x"]
    assert not bench.engine.publisher.doubts


def test_no_more_than_so_many_are_remembered(bench, faults, monkeypatch):
    """The oldest are forgotten first, and one that is settled makes room."""
    monkeypatch.setattr(republishing, "MOST_MESSAGES", 3)
    doubts = bench.engine.publisher.doubts
    for number in range(5):
        lose(faults, 0.0)
        with pytest.raises(CommitUnknown):
            publish(bench, str(number))
    assert len(doubts) == 3
    publish(bench, "4")
    assert len(doubts) == 2
    publish(bench, "0", "3")
    assert len(doubts) == 1
    assert stored(bench) == ["0", "0", "1", "2", "3", "4"]


def test_moments_and_ids_that_are_made_anew_make_no_other_message(bench, faults):
    lose(faults, 0.0)
    now_ms = bench.clock.wall_ms()
    with pytest.raises(CommitUnknown):
        bench.engine.publisher.publish([publication("x", message_id=b"1" * 16, expires_ms=now_ms + 60_000)])
    bench.clock.advance(0.5)
    bench.engine.publisher.publish([publication("x", message_id=b"2" * 16, expires_ms=now_ms + 60_500)])
    assert stored(bench) == ["x"]


def test_settling_doubts_and_publishing_share_one_time_limit(bench, faults, monkeypatch):
    for text in ("a", "b"):
        lose(faults, None)
        with pytest.raises(CommitUnknown):
            publish(bench, text)
    run, given_s = bench.engine.transactions, []
    resolve, write = Retry.resolve, run.write

    def slow_resolve(retry, doubt, *, timeout_s):
        given_s.append(timeout_s)
        bench.clock.advance(2)
        return resolve(retry, doubt, timeout_s=timeout_s)

    def noted_write(body, timeout_s=None, **more):
        given_s.append(timeout_s)
        return write(body, timeout_s, **more)

    monkeypatch.setattr(Retry, "resolve", slow_resolve)
    monkeypatch.setattr(run, "write", noted_write)
    bench.engine.publisher.publish([publication("a"), publication("b")], timeout_s=10)
    assert given_s == [10, 8, 6]


def test_what_is_stored_already_costs_no_transaction_more(bench, faults, monkeypatch):
    lose(faults, 0.0)
    with pytest.raises(CommitUnknown):
        publish(bench, "x")
    monkeypatch.setattr(bench.engine.transactions, "write", None)
    assert publish(bench, "x") == [["q"]]


def test_what_differs_is_another_message(bench, faults):
    lose(faults, 0.0)
    with pytest.raises(CommitUnknown):
        publish(bench, "x")
    bench.engine.publisher.publish(
        [publication("x", key="k"), publication("x", priority=3), publication("x", ttl_ms=60_000)]
    )
    bench.engine.publisher.publish([publication("x", due_ms=bench.clock.wall_ms() + 1)])
    assert bench.counts() == (4, 1, 0)


def test_nothing_is_paid_for_it_while_all_goes_well(bench):
    publish(bench, "x")
    assert not bench.engine.publisher.doubts
