"""Connections: what kombu's ``Connection`` and Celery's consumer do with a transport (interfaces A5, A7, A10).

=========================================================== ===============================================
interface                                                   test
=========================================================== ===============================================
A5 nothing opened by the constructor                        TestEstablish.test_constructing_opens_nothing
A5 errors as class attributes, which is which               TestErrors
A5 connect timeout                                          TestEstablish.test_unreachable
A5 verify_connection does not ask the store                 TestEstablish.test_verify_does_not_ask_the_store
A5 _collect, same process: leases stay valid (pain 7)       TestLostConnection
A5 mingle and gossip                                        test_mingle_and_gossip_know_us
A7 one client per process                                   TestSharing
A7 fork                                                     TestFork
A10 URLs, clone, failover, info, masks                      TestUrls
=========================================================== ===============================================
"""

import gc
import importlib
import json
import sqlite3
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from unittest.mock import Mock

import pytest
from amqp.exceptions import RecoverableConnectionError
from celery._state import _task_stack
from celery.exceptions import WorkerShutdown
from kit.processes import in_child
from kombu import Connection, Queue
from kombu.exceptions import OperationalError

from kombu_fdb.engine.messages.publish import Publisher
from kombu_fdb.errors import CommitUnknown, LimitExceeded, OptionError, StoreUnavailable
from kombu_fdb.settings.location import parse_url
from kombu_fdb.store.sqlite.database import SqliteDatabase
from kombu_fdb.testing.clock import ManualClock
from kombu_fdb.transport import Transport
from kombu_fdb.transport import connection as connection_module
from kombu_fdb.transport.connection import url_parts_of
from kombu_fdb.transport.errors import ExchangeVanished


@contextmanager
def outage(connection):
    """The store of this connection does not answer."""
    database = connection.default_channel.client.engine_if_open.database

    def begin(**_):
        raise StoreUnavailable("the test switched it off")

    database.begin = begin
    try:
        yield
    finally:
        del database.begin


class TestEstablish:
    def test_constructing_opens_nothing(self, url, tmp_path):
        connection = Connection(url)
        assert connection.transport.implements.asynchronous
        assert not connection.connected
        assert connection.transport.driver_version()
        assert not list(tmp_path.iterdir())

    def test_a_publisher_has_no_threads_and_no_session(self, connection):
        before = {*threading.enumerate()}  # those of other tests' connections may be about to end
        connection.Producer().publish(1, routing_key="q")
        assert connection.default_channel.client._session is None
        assert not [each.name for each in {*threading.enumerate()} - before if each.name.startswith("kombu-fdb")]

    def test_verify_does_not_ask_the_store(self, connection):
        connection.connect()
        with outage(connection):
            assert connection.connected

    def test_connect_again_after_close(self, connect):
        connection = connect()
        connection.Producer().publish(1, routing_key="q")
        connection.close()
        connection.Producer().publish(2, routing_key="q")
        connection.close()
        again = connect()
        assert again.default_channel._size("q") == 2

    def test_unreachable(self, connection):
        connection.connect()
        with outage(connection):
            started = time.monotonic()
            with pytest.raises(connection.connection_errors):
                connection.clone().connect()
            assert time.monotonic() - started < 5

    @pytest.mark.foundationdb
    def test_unreachable_cluster(self):
        connection = Connection("fdb://nobody:nothing@127.0.0.1:1", connect_timeout=0.5)
        for _ in range(2):
            started = time.monotonic()
            with pytest.raises(connection.connection_errors):
                connection.transport.establish_connection()
            assert time.monotonic() - started < 2

    def test_unwritable(self, tmp_path):
        connection = Connection(f"fdb+sqlite:///{tmp_path}/no/such/directory/b.db")
        with pytest.raises(connection.connection_errors, match=r"directory.*mkdir -p"):
            connection.connect()
        with pytest.raises(OperationalError):
            connection.ensure_connection(max_retries=1, interval_start=0)

    def test_wrong_option(self, connect):
        with pytest.raises(OptionError, match="session_ttl"):
            connect(sesion_ttl=3).connect()

    def test_close_is_idempotent(self, connection):
        with connection.Consumer([Queue("q")]):
            pass
        transport = connection.transport
        connection.close()
        connection.close()
        transport.close_connection(transport)
        transport._collect(transport)
        transport._collect(None)


class TestErrors:
    def test_classes(self):
        assert issubclass(StoreUnavailable, Transport.recoverable_connection_errors)
        assert issubclass(CommitUnknown, Transport.connection_errors)
        assert issubclass(LimitExceeded, Transport.channel_errors)
        assert not issubclass(LimitExceeded, Transport.connection_errors)
        assert Transport.recoverable_channel_errors == (ExchangeVanished,)

    def test_publish_in_an_outage(self, connection, connect):
        connect().connect()  # keeps the client open when the other is collected
        producer = connection.Producer()
        producer.publish(1, routing_key="q")
        with outage(connection):
            with pytest.raises(connection.connection_errors):
                producer.publish(2, routing_key="q")
            with pytest.raises(OperationalError):
                producer.publish(2, routing_key="q", retry=True, retry_policy={"max_retries": 1, "interval_start": 0})
        producer.publish(3, routing_key="q", retry=True)
        assert connection.default_channel._size("q") == 2

    def test_publish_on_a_closed_connection(self, connection):
        channel = connection.default_channel
        connection.transport.close_connection(connection.transport)
        with pytest.raises(OperationalError, match="closed"):
            channel.basic_publish("x", routing_key="q")

    def test_a_closed_channel_takes_nothing(self, connection):
        """It would keep its message, and its consumer, until the process ends."""
        channel, other = connection.channel(), connection.default_channel
        other.basic_publish("x", routing_key="q")
        channel.close()
        for ask in (channel.basic_get, partial(channel.basic_consume, no_ack=False, callback=pytest.fail)):
            with pytest.raises(RecoverableConnectionError, match="the channel is closed"):
                ask("q")
        assert other.queue_declare("q", passive=True)[1:] == (1, 0)


class TestStoppingWorker:
    @pytest.mark.parametrize("solo", [False, True])
    @pytest.mark.parametrize(("left_s", "pause_s"), [(0.0, 1.5), (4.0, 3.5)], ids=["hangs", "refuses at once"])
    def test_what_connects_for_ever_ends(self, connection, monkeypatch, solo, left_s, pause_s):
        """Not as long as a task's publish connects by default: a retry that fails is a dead letter."""
        connection.connect()
        transport, client = connection.transport, connection.default_channel.client
        found, now_s = list[type[Exception]](), [1_000.0]

        def connect():
            for passed_s in (0.0, pause_s, 1.0):
                now_s[0] += passed_s
                try:
                    transport.establish_connection()
                except (StoreUnavailable, OperationalError) as error:
                    found.append(type(error))

        def refuse(*_, **__):
            raise StoreUnavailable("the test switched it off")

        with monkeypatch.context() as patch:
            patch.setattr(importlib.import_module("celery.worker.state"), "should_stop", 0)
            patch.setattr(connection_module, "monotonic", lambda: now_s[0])
            patch.setattr(client.patience, "left_s", left_s)
            patch.setattr(client, "attach", refuse)
            if solo:  # a task in the main thread: WorkerShutdown would end it in its middle
                _task_stack.push(connect)
                connect()
                _task_stack.pop()
            else:
                thread = threading.Thread(target=connect)
                thread.start()
                thread.join()
            with pytest.raises(WorkerShutdown):
                transport.establish_connection()
        assert found == [StoreUnavailable, StoreUnavailable, OperationalError]

    @pytest.mark.parametrize("in_main_thread", [True, False])
    def test_what_connects_and_is_refused_for_ever_ends(self, tmp_path, monkeypatch, in_main_thread):
        """A heartbeat event of a worker, on a file that could be read and not written, held its main thread.

        It ends the thread that repeats, and no other: the store may take what that one publishes.
        """
        errback = Mock(side_effect=[None] * 2000)
        monkeypatch.setattr(importlib.import_module("celery.worker.state"), "should_stop", 0)
        for name in ("ENDING_S", "REPEATED_S"):
            monkeypatch.setattr(connection_module, name, 0.05)
        with Connection(f"fdb+sqlite:///{tmp_path}/b.db") as connection:
            producer = connection.Producer()
            producer.publish(1, routing_key="q")
            with closing(sqlite3.connect(tmp_path / "b.db")) as outsider:
                outsider.execute("CREATE TRIGGER t BEFORE INSERT ON kv BEGIN SELECT RAISE(ABORT, 'mine'); END")

            def publish():
                producer.publish(2, routing_key="q", retry=True, retry_policy={"errback": errback})

            if in_main_thread:
                with pytest.raises(WorkerShutdown):
                    publish()
            else:
                with ThreadPoolExecutor() as threads, pytest.raises(OperationalError, match="refuses what is written"):
                    threads.submit(publish).result()
            with closing(sqlite3.connect(tmp_path / "b.db")) as outsider:
                outsider.execute("DROP TRIGGER t")
            with ThreadPoolExecutor() as threads:  # a task's publish, of which nothing was refused
                threads.submit(publish).result()


class Ticking(ManualClock):
    """What is done between two looks takes a millisecond."""

    def monotonic(self):
        self.advance(0.001)
        return super().monotonic()


class Enough(Exception):
    pass


class TestRefused:
    """A store that can be opened, and fails what follows, is opened again without a pause by kombu and Celery."""

    @pytest.fixture
    def clock(self, connection, monkeypatch):
        connection.connect()
        clock = Ticking()
        monkeypatch.setattr(connection.default_channel.client.patience, "clock", clock)
        return clock

    @pytest.mark.parametrize(
        ("worker", "task", "expected"),
        [(True, None, range(10, 90)), (True, "one", range(100, 101)), (False, None, range(100, 101))],
    )
    def test_what_is_published_again_for_ever(self, connection, clock, monkeypatch, worker, task, expected):
        """A worker's heartbeat event took a core. In a minute; a program or task that publishes fails at once."""
        become(monkeypatch, worker=worker)
        monkeypatch.setattr("celery._state.get_current_task", lambda: task)
        attempts, until_s = [], clock.monotonic() + 60

        def count(*_):
            attempts.append(clock.monotonic())
            if len(attempts) == 100 or attempts[-1] > until_s:
                raise Enough

        def refuse(*_, **__):
            clock.advance(0.001)
            connection.default_channel.client.patience.wasted(0.001)
            raise StoreUnavailable("the test switched it off")

        monkeypatch.setattr(Publisher, "publish", refuse)
        with pytest.raises(Enough):
            connection.Producer().publish(1, routing_key="q", retry=True, retry_policy={"errback": count})
        assert len(attempts) in expected

    def test_connections_that_follow_each_other_wait_once(self, connection, clock, monkeypatch):
        """A worker opens several when its store is back; each waited for a second."""
        become(monkeypatch, worker=True)
        connection.default_channel.client.patience.wasted(5.0)
        began = clock.monotonic()
        for _ in range(4):
            with connection.clone() as another:
                another.connect()
        assert 0.9 < clock.monotonic() - began < 1.5

    def test_what_another_thread_fails_to_claim(self, connection, clock):
        """It counts for the thread that drains, as that one connects again: Celery's did so six times a second."""
        connection.Consumer([Queue("q")], on_message=print).consume()
        transport = connection.transport
        transport.receiver.fetcher.fail(StoreUnavailable("the test switched it off"))
        with pytest.raises(OperationalError, match="switched it off"):
            transport.drain_events(transport, timeout=60)
        assert connection.default_channel.client.patience.failing_s > 0


def become(monkeypatch, *, worker):
    """A process that has, or has not, loaded Celery's consumer."""
    module = importlib.import_module("celery.worker.consumer")
    if worker:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    else:
        monkeypatch.delitem(sys.modules, module.__name__)


class TestLostConnection:
    def consume(self, connection, held, until):
        consumer = connection.Consumer([Queue("q")], on_message=held.append, prefetch_count=4)
        consumer.consume()
        return consumer

    def test_consumer_gets_a_connection_error(self, connection, until):
        self.consume(connection, [], until)
        with outage(connection):
            with pytest.raises(connection.connection_errors):
                connection.drain_events(timeout=60)
            assert not connection.connected

    def test_the_same_consumer_goes_on(self, connection, connect, until):
        """A program that catches the error and drains again needs not to consume again."""
        held = []
        self.consume(connection, held, until)
        with outage(connection), pytest.raises(connection.connection_errors):
            connection.drain_events(timeout=60)
        connect().Producer().publish(1, routing_key="q")
        connection.drain_events(timeout=60)
        assert len(held) == 1

    def test_what_is_worked_on_is_acked_after_the_reconnect(self, connection, connect, until):
        held = []
        watcher = connect(ack_delay_ms=2.5)
        for number in range(4):
            watcher.Producer().publish(number, routing_key="q")
        engine = watcher.default_channel.engine
        self.consume(connection, held, until)
        until(lambda: connection.drain_events(timeout=60) or len(held) == 2)
        until(lambda: engine.inspect.counts("q").leased == 4)
        with outage(connection):
            connection.collect()
        # Two were not handed out: back at once. Two are being worked on: still ours.
        until(lambda: engine.inspect.counts("q").leased == 2)
        assert engine.inspect.counts("q").ready == 2
        again = []
        self.consume(connection, again, until)
        until(lambda: connection.drain_events(timeout=60) or len(again) == 2)
        assert [message.payload for message in again] == [2, 3]
        for message in [*held, *again]:
            message.ack()
        until(lambda: engine.inspect.counts("q").leased == 0)
        assert engine.inspect.counts("q").ready == 0
        assert connection.default_channel.client.lost_acks == 0

    def test_an_unreferenced_message_goes_back(self, connection, connect, until):
        held = []
        watcher = connect(ack_delay_ms=2.5)
        for number in range(3):
            watcher.Producer().publish(number, routing_key="q")
        engine = watcher.default_channel.engine
        self.consume(connection, held, until)
        until(lambda: connection.drain_events(timeout=60) or len(held) == 3)
        kept = held[1]
        connection.collect()
        assert engine.inspect.counts("q").leased == 3
        held.clear()
        gc.collect()
        until(lambda: engine.inspect.counts("q").ready == 2)
        kept.ack()
        until(lambda: engine.inspect.counts("q").leased == 0)

    def test_acks_in_an_outage_are_kept(self, connection, connect, until):
        held = []
        watcher = connect(ack_delay_ms=2.5)
        watcher.Producer().publish(1, routing_key="q")
        engine = watcher.default_channel.engine
        self.consume(connection, held, until)
        until(lambda: connection.drain_events(timeout=60) or len(held) == 1)
        with outage(connection):
            held[0].ack()
            until(lambda: connection.transport.receiver.failed)
            connection.collect()
        until(lambda: engine.inspect.counts("q").leased == 0)
        assert engine.inspect.counts("q").ready == 0

    def test_close_in_an_outage(self, connect, until):
        """Nothing raises, nothing stays; the store gets the messages back when it answers, or after the TTL."""
        connection, watcher = connect(), connect(ack_delay_ms=2.5)
        watcher.Producer().publish(1, routing_key="q")
        held = []
        self.consume(connection, held, until)
        until(lambda: connection.drain_events(timeout=60) or len(held) == 1)
        with outage(connection):
            connection.close()
        until(lambda: watcher.default_channel.engine.inspect.counts("q").ready == 1)

    def test_close_has_one_deadline(self, connect, monkeypatch, until):
        """However many channels and consumers there are: after the first call that ran into it, none asks again."""
        timeout_s = 0.5
        connection, held = connect(operation_timeout=timeout_s), []
        connect(ack_delay_ms=2.5).connect()
        for number in range(8):
            connection.Producer().publish(number, routing_key=f"q{number}")
        channels = [connection.channel() for _ in range(8)]
        for number, channel in enumerate(channels):
            channel.basic_consume(f"q{number}", False, held.append)
        until(lambda: connection.drain_events(timeout=60) or len(held) == 8)
        database = connection.default_channel.client.engine_if_open.database
        hanging = threading.Event()

        def begin(**_):
            hanging.wait(timeout_s)
            raise StoreUnavailable("the test made it hang")

        monkeypatch.setattr(database, "begin", begin, raising=False)
        started = time.monotonic()
        connection.close()
        took_s = time.monotonic() - started
        monkeypatch.undo()
        assert took_s < 8 * timeout_s, "one for each channel"


class TestSharing:
    def test_one_client_for_all(self, connection, connect):
        other = connect()
        assert connection.default_channel.client is other.default_channel.client
        assert connect(ack_delay_ms=2.5).default_channel.client is not other.default_channel.client

    def test_the_session_ends_with_the_last_connection(self, connect, url):
        one, other = connect(), connect()
        client = one.default_channel.client
        with one.Consumer([Queue("q")]):
            pass
        other.connect()
        session = client._session
        one.close()
        assert client._session is session
        other.close()
        assert client._session is None
        with connect() as again:
            assert again.default_channel.engine.sessions.beats() == []

    def test_no_thread_stays(self, connect, until):
        connection = connect()
        connection.connect()
        before = set(threading.enumerate())  # FoundationDB's network thread among them
        with connection.Consumer([Queue("q")]):
            connection.Producer().publish(1, routing_key="q")
        connection.close()
        until(lambda: not set(threading.enumerate()) - before)


class TestFork:
    def test_publish_on_inherited_objects(self, connection):
        producer = connection.Producer(auto_declare=False)
        producer.publish("parent", routing_key="q")
        in_child(lambda: producer.publish("child", routing_key="q"))
        producer.publish("parent", routing_key="q")
        assert connection.default_channel._size("q") == 3

    def test_child_of_a_consumer(self, connection, until):
        """It consumes for itself; what the parent holds stays the parent's, also when the child closes everything."""
        producer, held = connection.Producer(auto_declare=False), []
        producer.publish("parent", routing_key="q")
        with connection.Consumer([Queue("q")], on_message=held.append):
            connection.drain_events(timeout=60)

            def child():
                producer.publish("child", routing_key="other")
                received = []
                with connection.Consumer([Queue("other")], on_message=received.append):
                    connection.drain_events(timeout=60)
                assert received[0].payload == "child"
                received[0].ack()
                connection.close()

            in_child(child)
            held[0].ack()
            engine = connection.default_channel.engine
            until(lambda: engine.inspect.counts("q").leased == 0)
            assert engine.inspect.counts("q").ready == 0
            assert engine.inspect.counts("other").leased == engine.inspect.counts("other").ready == 0

    def test_inherited_consumer_is_a_connection_error(self, connection):
        with connection.Consumer([Queue("q")]):

            def child():
                assert not connection.connected
                with pytest.raises(TimeoutError):  # established anew, without the parent's consumers
                    connection.drain_events(timeout=0.1)

            in_child(child)


class TestUrls:
    def test_info_is_json_and_masks(self, url):
        connection = Connection(url, transport_options={"session_ttl": 5.0})
        json.dumps(connection.info())
        assert connection.transport.driver_type == "fdb"
        if "@" in url:
            secret = url.split(":")[2].partition("@")[0]
            assert secret not in connection.as_uri()
            assert secret not in repr(connection)

    @pytest.mark.parametrize(
        ("given", "shown"),
        [
            ("fdb://", "fdb:///"),
            ("fdb:///new", "fdb:///new"),
            ("fdb://test:s3cret@10.0.0.1:4500/new", "fdb://test:**@10.0.0.1:4500/new"),
            ("fdb://test:s3cret@[::1]:4500/new", "fdb://test:**@[::1]:4500/new"),
            ("fdb:///test:s3cret@10.0.0.1:4500", "fdb:///test:**@10.0.0.1:4500"),  # a slash too many
            ("fdb+sqlite:////var/lib/shop.db", "fdb+sqlite:////var/lib/shop.db"),
            ("fdb+sqlite:////srv/my%20shop%23.db", "fdb+sqlite:////srv/my%20shop%23.db"),
        ],
    )
    def test_are_shown_as_they_were_given(self, given, shown):
        """Celery's banner named a host "localhost" and a password, where there are none."""
        connection = Connection(given)
        whole = connection.as_uri(include_password=True)
        assert connection.as_uri() == shown
        assert parse_url(whole) == parse_url(given)
        connection.switch(given)  # as after a failover
        for each in (connection, connection.clone()):
            assert (each.as_uri(), each.as_uri(include_password=True)) == (shown, whole)

    def test_after_a_failover_clones_go_where_their_connection_goes(self):
        """From a file to a cluster, the clones of a pool went to the cluster of the default file."""
        urls = ["fdb+sqlite:////var/lib/shop.db", "fdb://test:s3cret@10.0.0.1:4500/new"]
        connection = Connection(urls)
        for url in (urls[1], urls[0], urls[1]):
            connection.maybe_switch_next()
            for each in (connection, connection.clone(), connection.clone().clone()):
                assert url_parts_of(each) == parse_url(url)
                assert each.as_uri(include_password=True) == url

    def test_no_host_is_guessed(self, url, caplog):
        Connection(url).info()
        assert "Reverting to default" not in caplog.text

    def test_failover(self, tmp_path):
        broken = f"fdb+sqlite:///{tmp_path}/no/such/b.db"
        good = f"fdb+sqlite:///{tmp_path}/b.db"
        with Connection(f"{broken};{good}", failover_strategy="round-robin") as connection:
            connection.ensure_connection(max_retries=3, interval_start=0)
            connection.Producer().publish(1, routing_key="q")
            with connection.clone() as clone:
                assert clone.default_channel._size("q") == 1
        with Connection(good) as connection:
            assert connection.default_channel._size("q") == 1

    def test_publish_fails_over(self, tmp_path, monkeypatch):
        opening = SqliteDatabase.open

        def open_b(path, **options):
            if path.endswith("a.db"):  # kombu before 5.7 tries it again, and then the other one
                raise StoreUnavailable("the test switched it off")
            return opening(path, **options)

        urls = [f"fdb+sqlite:///{tmp_path}/{name}.db" for name in "ab"]
        with Connection(urls) as connection:
            producer = connection.Producer()
            producer.publish(1, routing_key="q")
            monkeypatch.setattr(SqliteDatabase, "open", open_b)
            with outage(connection):
                producer.publish(2, routing_key="q", retry=True, retry_policy={"interval_start": 0, "max_retries": 3})
        with Connection(urls[1]) as connection:
            assert connection.default_channel.basic_get("q").payload == 2

    def test_namespaces_are_apart(self, tmp_path):
        for namespace, expected in (("a", 1), ("b", 1), ("a", 2)):
            options = {"namespace": namespace}
            with Connection(f"fdb+sqlite:///{tmp_path}/b.db", transport_options=options) as connection:
                connection.Producer().publish(1, routing_key="q")
                assert connection.default_channel._size("q") == expected

    def test_retry_policy_in_the_transport_options(self, connection):
        """Kombu merges it into the same dict."""
        connection.Producer().publish(
            1, routing_key="q", retry=True, retry_policy={"max_retries": 2, "interval_step": 1}
        )
        with connection.clone() as clone:
            assert clone.default_channel._size("q") == 1


def test_mingle_and_gossip_know_us():
    from celery.worker.consumer.gossip import Gossip
    from celery.worker.consumer.mingle import Mingle

    _ = Connection("fdb+sqlite://").transport
    assert {"fdb", "redis", "amqp"} <= Mingle.compatible_transports
    assert "fdb" in Gossip.compatible_transports
