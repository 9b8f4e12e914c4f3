"""Many tasks in one transaction, and tasks in a transaction of the caller's."""

import os
import threading

import pytest
from celery import Celery, chain, chord, group
from kombu import Exchange, Producer, Queue
from kombu.exceptions import OperationalError

from celery_fdb import enqueue, publish_many
from kombu_fdb import OptionError
from kombu_fdb.engine.facade.queues import Queues
from kombu_fdb.errors import CapacityExceeded, LimitExceeded, StoreUnavailable
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.transport.errors import MessageNacked


@pytest.fixture
def add(app):
    @app.task(name="add", shared=False, typing=False)
    def add(*args):
        return sum(args)

    return app.tasks["add"]


# -- publish_many ------------------------------------------------------------------------------------------------------


def test_many_are_few_transactions(add, broker, commits):
    results = publish_many(add.s(number) for number in range(2500))
    assert commits == [2000, 500]
    assert broker.queue("q").count() == 2500
    assert len({result.id for result in results}) == 2500


def test_atomic_is_one_transaction(add, sent, commits):
    publish_many([add.s(1), add.s(2), chain(add.s(3), add.s(4))], atomic=True)
    assert commits == [3]
    assert [args for _, args, *_ in sent()] == [[1], [2], [3]]


def test_an_atomic_group(add, sent, commits):
    (result,) = publish_many([group(add.s(number) for number in range(10))], atomic=True)
    assert commits == [10]
    assert [headers["id"] for *_, headers in sent()] == [each.id for each in result.results]


def test_an_atomic_chord(add, sent, commits):
    publish_many([chord([add.s(1), add.s(2)], add.s())], atomic=True)
    assert commits == [2]
    assert all(headers["task"] == "add" for *_, headers in sent())


@pytest.mark.parametrize("signatures", [{"number": 2001, "size": 0}, {"number": 5, "size": 1_000_000}])
def test_atomic_raises_beforehand_if_it_does_not_fit(add, broker, commits, signatures):
    text = "x" * signatures["size"]
    with pytest.raises(LimitExceeded, match="do not fit into one transaction"):
        publish_many([add.s(text) for _ in range(signatures["number"])], atomic=True)
    assert commits == []
    assert broker.queue("q").count() == 0


def test_an_error_on_the_way_publishes_nothing(app, add, broker):
    @app.task(name="strict", shared=False)
    def strict(one):
        pass

    with pytest.raises(TypeError):
        publish_many([add.s(1), app.tasks["strict"].s()])
    assert broker.queue("q").count() == 0


def test_the_producer_is_as_before(app, add, broker):
    with app.producer_pool.acquire(block=True) as producer:
        with pytest.raises(LimitExceeded):
            publish_many([add.s(1)] * 2001, atomic=True, producer=producer)
        add.apply_async((1,), producer=producer)
        publish_many([add.s(1)] * 2001, producer=producer)
    assert broker.queue("q").count() == 2002


@pytest.fixture
def refused(app, monkeypatch):
    """A queue whose first declaration meets a store that does not answer."""
    app.conf.task_publish_retry_policy = {"max_retries": 3, "interval_start": 0}
    declare, refusals = Queues.declare, [StoreUnavailable("it does not answer")]

    def refuse(self, declaration, **kwargs):
        if declaration.name == "refused" and refusals:
            raise refusals.pop()
        return declare(self, declaration, **kwargs)

    monkeypatch.setattr(Queues, "declare", refuse)
    return "refused"


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize(
    "together",
    [list, lambda each: [group(each)], lambda each: [chord(each[:2], each[2])]],
    ids=["many", "group", "chord"],
)
def test_a_batch_with_a_store_that_does_not_answer_is_not_published(app, add, broker, refused, together, atomic):
    """The error is one that callers know. A repetition's channel would not have the batch."""
    signatures = [add.s(1), add.s(2).set(queue=refused), add.s(3)]
    with pytest.raises(OperationalError, match="does not answer"):
        publish_many(together(signatures), app=app, atomic=atomic)
    assert broker.queue("q").count() == 0


def test_the_messages_of_a_batch_do_not_say_that_it_repeats_nothing(app, add, broker):
    """A worker publishes the rest of them, and repeats it."""
    chords = [chord([add.s(3), add.s(4)], add.s(5)), chain(group(add.s(1), add.s(2)), add.s(9))]
    publish_many([chain(add.s(1), add.s(2)), group([chain(add.s(5), add.s(6))]), *chords], app=app)
    jobs = broker.queue("q").take_many(10, timeout=5)
    assert len(jobs) == 6
    assert b'retry"' not in b"".join(job.payload for job in jobs)


def test_another_thread_that_publishes_with_the_producer_meanwhile_repeats(app, add, monkeypatch):
    repeats = {}
    publish = Producer.publish

    def note(self, body, **options):
        repeats[threading.get_ident()] = options["retry"]
        if len(repeats) == 1:
            other = threading.Thread(target=add.apply_async, args=((2,),), kwargs={"producer": self})
            other.start()
            other.join(60)
        return publish(self, body, **options)

    monkeypatch.setattr(Producer, "publish", note)
    with app.amqp.producer_pool.acquire(block=True) as producer:
        publish_many([add.s(1)], producer=producer)
    assert repeats.pop(threading.get_ident()) is False
    assert list(repeats.values()) == [True]


def test_nothing_is_nothing():
    assert publish_many([]) == []


def test_another_broker_publishes_one_by_one_and_is_not_atomic():
    other = Celery(broker="memory://", set_as_current=False)

    @other.task(name="add", shared=False)
    def add(one):
        pass

    assert len(publish_many([other.tasks["add"].s(1)], app=other)) == 1
    with pytest.raises(OptionError, match="no transactions"):
        publish_many([other.tasks["add"].s(1)], atomic=True)


# -- enqueue -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fdb(cluster):
    from kombu_fdb.store.foundationdb.binding import binding

    return binding()


@pytest.fixture
def db(fdb, cluster):
    database = fdb.open(cluster.cluster_file)
    database.clear_range(b"rows/", b"rows0")
    return database


@pytest.mark.foundationdb
class TestEnqueue:
    @pytest.fixture
    def url(self, cluster):
        return f"fdb://{cluster.connection_string}/{os.urandom(6).hex()}"

    @pytest.fixture
    def commit(self, fdb, db):
        """As ``@fdb.transactional`` does: again after a conflict."""
        return lambda work: fdb.transactional(work)(db)

    def test_the_row_and_its_task_are_committed_together(self, commit, db, add, sent):
        def place(tr):
            tr[b"rows/1"] = b"order"
            return enqueue(tr, add, (1, 2))

        result = commit(place)
        ((name, args, _, headers),) = sent()
        assert (name, args, headers["id"]) == ("add", [1, 2], result.id)
        assert db[b"rows/1"] == b"order"

    def test_neither_is_if_the_function_fails(self, commit, db, add, broker):
        def place(tr):
            tr[b"rows/1"] = b"order"
            enqueue(tr, add, (1, 2))
            raise KeyError

        with pytest.raises(KeyError):
            commit(place)
        assert broker.queue("q").count() == 0
        assert db[b"rows/1"] is None

    def test_nothing_is_seen_before_the_commit_and_a_waiting_consumer_wakes_after_it(self, db, add, broker):
        """Nor does it read the store: two of them never conflict."""
        one, two = db.create_transaction(), db.create_transaction()
        enqueue(one, add, (1,))
        enqueue(two, add, (2,))
        assert broker.queue("q").count() == 0
        one.commit().wait()
        assert broker.queue("q").take(5) is not None
        two.commit().wait()
        assert broker.queue("q").take(5) is not None

    def test_a_conflict_runs_again_and_publishes_once(self, commit, db, add, broker):
        runs = []

        def place(tr):
            count = int(tr[b"rows/n"].value or b"0")
            runs.append(count)
            if len(runs) == 1:
                db[b"rows/n"] = b"5"  # another writer
            tr[b"rows/n"] = str(count + 1).encode()
            enqueue(tr, add, (count,))

        commit(place)
        assert runs == [0, 5]
        assert broker.queue("q").count() == 1

    def test_several_in_one_transaction_keep_their_order(self, commit, add, sent):
        def place(tr):
            for number in range(5):
                enqueue(tr, add, (number,))
            enqueue(tr, group(add.s(number) for number in range(5, 9)))

        commit(place)
        assert [args for _, args, *_ in sent()] == [[number] for number in range(9)]

    def test_delay_key_priority_and_exchange(self, app, commit, add, broker):
        app.conf.task_queues = [Queue("q"), Queue("bound", Exchange("x", "topic"), routing_key="a.*")]
        with app.connection_for_write() as connection:
            app.amqp.queues["bound"](connection).declare()

        def place(tr):
            enqueue(tr, add, (1,), countdown=3600)
            enqueue(tr, add, (2,), fair_key="acme")
            enqueue(tr, add, (3,), priority=9)
            enqueue(tr, add, (4,), exchange="x", routing_key="a.b")

        commit(place)
        counts = broker.queue("q").stats()
        assert (counts.ready, counts.delayed) == (2, 1)
        assert broker.queue("q").keys()["acme"].ready == 1
        assert broker.queue("bound").count() == 1

    def test_a_dedup_id_makes_a_second_run_harmless(self, commit, add, broker):
        for _ in range(2):  # say its answer was lost
            commit(lambda tr: enqueue(tr, add, (1,), dedup_id="order-1"))
        assert broker.queue("q").count() == 1

    def test_signatures_and_options(self, commit, add, sent):
        commit(lambda tr: enqueue(tr, add.s(2), (1,), task_id="mine"))
        ((_, args, _, headers),) = sent()
        assert (args, headers["id"]) == ([1, 2], "mine")

    @pytest.mark.parametrize("full", ["key", "queue"])
    def test_what_is_refused_leaves_nothing_in_the_transaction(self, app, commit, db, add, broker, full):
        """Its rows were there, uncounted, and so was its dedup id: the task ran with a later one, or never."""
        arguments = {"x-max-length": 0, "x-overflow": "reject-publish"} if full == "queue" else {}
        with app.connection_for_write() as connection:
            Queue("q", queue_arguments=arguments)(connection).declare()
        broker.queue("q").limit("acme", capacity=0)

        def place(tr):
            with pytest.raises(CapacityExceeded if full == "key" else (CapacityExceeded, MessageNacked)):
                enqueue(tr, add, (1,), fair_key="acme", dedup_id="order-1")
            tr[b"rows/1"] = b"refused"

        def rows():
            return {key for key, _ in db.get_range(*range_of(broker._client.engine.keys.prefix))}

        commit(place)  # which declares
        before = rows()
        commit(place)
        assert rows() <= before

    def test_errors_of_foundationdb_pass_through(self, fdb, db, add):
        tr = db.create_transaction()
        tr.options.set_timeout(1000)
        tr.cancel()
        with pytest.raises(fdb.FDBError):
            enqueue(tr, add, (1,), dedup_id="reads")

    def test_the_database_or_a_snapshot_instead_of_a_transaction(self, db, add):
        for wrong in (db, db.create_transaction().snapshot, None):
            with pytest.raises(OptionError, match=r"@fdb\.transactional"):
                enqueue(wrong, add, (1,))

    def test_a_tenants_transaction(self, db, fdb, add):
        with pytest.raises(OptionError, match="tenant"):
            enqueue(db.open_tenant(b"t").create_transaction(), add, (1,))

    def test_another_cluster(self, fdb, db, cluster, app, add, tmp_path):
        other = tmp_path / "other.cluster"
        other.write_text(cluster.connection_string.replace("test:", "test:other", 1))
        with pytest.raises(OptionError, match="another cluster") as raised:
            enqueue(fdb.open(str(other)).create_transaction(), add, (1,))
        assert cluster.connection_string.partition("@")[0] not in str(raised.value), "the id is a secret"

    def test_a_broker_on_sqlite(self, db, tmp_path):
        other = Celery(broker=f"fdb+sqlite:///{tmp_path}/b.db", set_as_current=False)

        @other.task(name="add", shared=False)
        def add(one):
            pass

        with pytest.raises(OptionError, match="outbox"):
            enqueue(db.create_transaction(), other.tasks["add"], (1,))
        other.close()
