"""The receiver's thread ends when it is told to, at whatever moment that is, and else is missed."""

import math
import threading
from contextlib import contextmanager, suppress
from time import monotonic

import pytest
from kit.interruption import interrupt
from kombu import Connection, Queue

from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.primitives import interruption, wakeup
from kombu_fdb.primitives.interruption import Signal
from kombu_fdb.primitives.wakeup import Bell
from kombu_fdb.process.client import Client
from kombu_fdb.transport import connection as connections
from kombu_fdb.transport.consuming import receiver, watch_set
from kombu_fdb.transport.consuming.fetcher import Fetcher
from kombu_fdb.transport.consuming.receiver import Receiver
from kombu_fdb.transport.consuming.watch_set import WatchSet


def test_a_thread_that_is_stopped_while_its_turn_clears_the_bell_ends(monkeypatch):
    outlook = WatchSet(Bell())

    def turn(*_):
        outlook.bell.ring()
        outlook.stop()  # by another thread: its ring adds nothing to the first
        outlook.bell.clear()

    monkeypatch.setattr(receiver, "_step", turn)
    thread = threading.Thread(target=receiver._serve, args=(None, outlook), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_a_thread_that_an_exception_ends_anywhere_is_started_anew(monkeypatch, tmp_path, error):
    """Where threads are greenlets, a signal handler raises in whichever is running."""
    monkeypatch.setattr(Receiver, "_may_drive", lambda _: False)
    strike_once(monkeypatch, error)
    with consumer(tmp_path) as (connection, seen):
        with pytest.raises(connection.connection_errors):
            connection.drain_events(timeout=30)
        connection.ensure_connection()
        connection.transport.establish_connection()
        connection.drain_events(timeout=30)
        assert seen == [1]


def strike_once(monkeypatch, error):
    """The next turn raises it."""
    strikes = [error("out of nowhere")]
    limit = WatchSet.limit

    def strike(self, *args):
        if strikes:
            raise strikes.pop()
        return limit(self, *args)

    monkeypatch.setattr(WatchSet, "limit", strike)


@contextmanager
def consumer(folder, callback=lambda _: None, **options):
    """A consumer of a queue with one message, and the bodies that it has seen."""
    seen = []

    def on_message(body, message):
        seen.append(body)
        message.ack()
        callback(body)

    with Connection(f"fdb+sqlite:///{folder}/broker.db", transport_options=options) as connection:
        connection.Producer().publish(1, routing_key="q", declare=[Queue("q")])
        with connection.Consumer([Queue("q")], callbacks=[on_message]):
            yield connection, seen


class TimeLimit(Exception):
    """As Celery's soft one, which is no ``BaseException``."""


def let_the_thread_rest(monkeypatch):
    """For ever, so that drains take all turns."""

    def rest(self):
        self.relief.clear()
        return self.stopped or self.relief.wait(None)

    monkeypatch.setattr(WatchSet, "rest", rest)


def turns_of(monkeypatch):
    """The threads of the turns that follow."""
    drivers = []
    turn = Receiver.turn

    def note(self, *failures):
        drivers.append(threading.current_thread())
        return turn(self, *failures)

    monkeypatch.setattr(Receiver, "turn", note)
    return drivers


class TestADrain:
    """On a store whose writers take turns, a drain claims by itself."""

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, TimeLimit, OSError])
    def test_that_a_signal_ends_raises_what_its_handler_raised(self, monkeypatch, tmp_path, error):
        """And the next one goes on."""
        let_the_thread_rest(monkeypatch)
        with consumer(tmp_path) as (connection, seen):
            strike_once(monkeypatch, error)
            with pytest.raises(error, match="out of nowhere"):
                connection.drain_events(timeout=30)
            connection.drain_events(timeout=30)
            assert seen == [1]

    def test_that_ends_at_any_line_leaves_the_turns_to_the_thread(self, tmp_path):
        files = {str(each.__file__) for each in (receiver, watch_set, interruption)}
        with consumer(tmp_path) as (connection, seen):
            engine = connection.default_channel.engine
            connection.drain_events(timeout=30)

            def drain():
                with suppress(TimeoutError):
                    connection.drain_events(timeout=0.01)

            where, line = "begin", 0
            while where:
                line += 1
                where = interrupt(drain, line, files)
                connection.Producer().publish(line, routing_key="q")
                deadline = monotonic() + 30
                while not engine.inspect.counts("q").leased:
                    assert monotonic() < deadline, where
                connection.drain_events(timeout=30)
            assert seen == [1, *range(1, line + 1)]
            assert line > 20

    def test_whose_turn_fails_raises_the_error_and_the_thread_goes_on(self, monkeypatch, tmp_path):
        """Were it another one, the first one's end would take back what the second one watches."""
        with consumer(tmp_path) as (connection, seen):
            strike_once(monkeypatch, StoreUnavailable)
            thread = connection.transport.receiver._thread
            with pytest.raises(connection.connection_errors):
                connection.drain_events(timeout=30)
            connection.ensure_connection()
            connection.transport.establish_connection()
            connection.drain_events(timeout=30)
            assert seen == [1]
            assert connection.transport.receiver.running
            assert connection.transport.receiver._thread is thread

    def test_that_failed_lets_the_thread_sleep(self, monkeypatch, tmp_path):
        with consumer(tmp_path) as (connection, _):
            strike_once(monkeypatch, StoreUnavailable)
            with pytest.raises(connection.connection_errors):
                connection.drain_events(timeout=30)
            bell = connection.transport.receiver.watch_set.bell
            bell.ring()
            deadline = monotonic() + 30
            while bell.wait(0):
                assert monotonic() < deadline

    def test_that_sleeps_does_not_keep_the_turns(self, monkeypatch, tmp_path):
        """Where a signal handler drains as well, in the same thread."""
        let_the_thread_rest(monkeypatch)
        wait_for = wakeup.wait_for

        def wait(bells, timeout_s):
            monkeypatch.setattr(receiver, "wait_for", wait_for)
            connection.Producer().publish(2, routing_key="q")
            connection.drain_events(timeout=30)
            return wait_for(bells, timeout_s)

        with consumer(tmp_path) as (connection, seen):
            connection.drain_events(timeout=30)
            monkeypatch.setattr(receiver, "wait_for", wait)
            with pytest.raises(TimeoutError):
                connection.drain_events(timeout=0.01)
            assert seen == [1, 2]

    def test_that_takes_a_turn_is_waited_for_by_who_closes(self, monkeypatch, tmp_path):
        let_the_thread_rest(monkeypatch)
        waited = list[bool]()
        turn = Receiver.turn

        def close_meanwhile(self, *failures):
            closer = threading.Thread(target=self.stop, args=(30,))
            closer.start()
            while closer.is_alive() and len(self.watch_set.turns) < 2:
                pass
            waited.append(closer.is_alive())
            monkeypatch.setattr(Receiver, "turn", turn)
            return turn(self, *failures)

        with consumer(tmp_path) as (connection, _):
            monkeypatch.setattr(Receiver, "turn", close_meanwhile)
            with suppress(TimeoutError):
                connection.drain_events(timeout=0.01)
            assert waited == [True]

    def test_needs_no_other_thread(self, monkeypatch, tmp_path):
        """While drains follow each other the thread stands by; here, for ever."""
        monkeypatch.setattr(watch_set, "SHORTEST_REST_S", 1000.0)
        drivers = turns_of(monkeypatch)
        with consumer(tmp_path) as (connection, seen):
            producer = connection.Producer()
            for number in range(100):
                connection.drain_events(timeout=30)
                producer.publish(number, routing_key="q")
            assert seen == [1, *range(99)]
            assert set(drivers[-50:]) == {threading.current_thread()}

    def test_that_works_for_long_leaves_its_acks_to_the_thread(self, tmp_path):
        """Also if the drain before had slept, as the thread did."""

        def work(body):
            while (counts := engine.inspect.counts("q")).leased or counts.ready:
                assert threading.active_count() > 1

        with consumer(tmp_path, work) as (connection, seen):
            engine = connection.default_channel.engine
            connection.drain_events(timeout=30)
            with pytest.raises(TimeoutError):
                connection.drain_events(timeout=0.1)
            connection.Producer().publish(2, routing_key="q")
            connection.drain_events(timeout=30)
            assert seen == [1, 2]

    def test_that_need_not_wait_settles_acks_that_have_waited_for_long(self, monkeypatch, tmp_path):
        let_the_thread_rest(monkeypatch)
        monkeypatch.setattr(Client, "_run_deferred", lambda _client: None)  # it settles acks, too, once a second
        with consumer(tmp_path) as (connection, seen):
            channel = connection.default_channel
            channel.basic_qos(0, 3)
            for number in (2, 3):
                connection.Producer().publish(number, routing_key="q")
            connection.drain_events(timeout=30)
            assert channel.engine.inspect.counts("q").leased == 3
            later_s = 5 * connection.transport.options.ack_delay_ms / 1000  # then the rest and the nap, of eight
            monkeypatch.setattr(connection.transport.receiver.fetcher, "_clock", lambda: monotonic() + later_s)
            connection.drain_events(timeout=30)
            assert seen == [1, 2]
            assert channel.engine.inspect.counts("q").leased == 2

    def test_that_need_not_wait_finds_what_comes_later(self, tmp_path, until):
        """A loop of such drains looks more often than the thread's rest lasts, and must not prolong it."""
        with consumer(tmp_path, ack_delay_ms=100) as (connection, seen):
            connection.drain_events(timeout=30)

            def polled():
                with suppress(TimeoutError):
                    connection.drain_events(timeout=0)
                return len(seen) == 2

            until(lambda: polled() or connection.transport.receiver.fetcher.idle)
            with Connection(f"fdb+sqlite:///{tmp_path}/broker.db") as other:
                other.Producer().publish(2, routing_key="q")
            until(polled, 20)

    def test_that_need_not_wait_does_not_wait_for_acks(self, monkeypatch, tmp_path):
        """It did until the last ack was settled, and took a turn every millisecond meanwhile."""
        let_the_thread_rest(monkeypatch)
        turns = turns_of(monkeypatch)
        with consumer(tmp_path, ack_delay_ms=1000) as (connection, seen):
            connection.default_channel.basic_qos(0, 10)
            connection.drain_events(timeout=30)
            turns.clear()
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    connection.drain_events(timeout=0)
            assert seen == [1]
            assert len(turns) <= 3

    @pytest.mark.parametrize(("ack_delay_ms", "rest_s"), [(0.1, 0.001), (10, 0.01), (1000, 0.02)])
    def test_lets_the_thread_rest_as_long_as_an_ack_waits(self, monkeypatch, tmp_path, ack_delay_ms, rest_s):
        """But not for long: drains that must not wait find what the thread has claimed. Each message begins it anew."""
        let_the_thread_rest(monkeypatch)
        with consumer(tmp_path, ack_delay_ms=ack_delay_ms) as (connection, seen):
            connection.default_channel.basic_qos(0, 2)
            connection.Producer().publish(2, routing_key="q")
            for now_s in (100.0, 100.0 + rest_s / 2):
                monkeypatch.setattr(watch_set, "monotonic", lambda now_s=now_s: now_s)
                connection.drain_events(timeout=30)
                assert connection.transport.receiver.watch_set.rest_until == now_s + rest_s
            assert seen == [1, 2]

    def test_that_finds_a_message_as_another_ends_leaves_no_rest_for_ever(self, monkeypatch):
        outlook = WatchSet(Bell())
        outlook.begin_drive()

        def another_ends():
            monkeypatch.undo()
            outlook.end_drive()
            return monotonic()

        monkeypatch.setattr(watch_set, "monotonic", another_ends)
        outlook.prolong_rest()
        watch_set.monotonic()  # now at the latest
        assert outlook.rest_until < math.inf

    def test_that_was_slow_leaves_the_turns_to_the_thread(self, monkeypatch, tmp_path):
        """As long as the store's writers are slow, a drain ends by its own deadline."""
        monkeypatch.setattr(receiver, "SLOW_S", -1.0)
        monkeypatch.setattr(receiver, "SPARED_S", 1000.0)
        drivers = turns_of(monkeypatch)
        with consumer(tmp_path) as (connection, seen):
            for number in range(10):
                connection.drain_events(timeout=30)
                connection.Producer().publish(number, routing_key="q")
            assert seen == [1, *range(9)]
            assert drivers.count(threading.current_thread()) <= 1
            if threading.current_thread() in drivers:
                assert connection.transport.receiver.watch_set.rest_until == -math.inf, "the thread rests"


def test_a_connection_that_is_closed_as_its_receiver_is_made_has_none(monkeypatch, tmp_path):
    """By another thread. The thread that drained it would wait for ever."""
    with Connection(f"fdb+sqlite:///{tmp_path}/broker.db") as connection:
        transport = connection.transport
        connection.connect()

        def close_meanwhile(store):
            transport.close_connection(transport)
            return Receiver(store)

        monkeypatch.setattr(connections, "Receiver", close_meanwhile)
        with pytest.raises(StoreUnavailable, match="closed"):
            transport.drain_events(transport)
        assert transport.receiver_if_any is None


def test_a_cancel_in_an_event_loop_does_not_wait(monkeypatch, tmp_path):
    """Where gevent runs signal handlers. The thread does it."""
    monkeypatch.setattr(receiver, "in_hub", lambda: True)
    wait = Signal.wait

    def refuse(signal, timeout_s):
        assert threading.current_thread() is not threading.main_thread(), "it waits"
        return wait(signal, timeout_s)

    with Connection(f"fdb+sqlite:///{tmp_path}/broker.db") as connection:
        connection.Producer().publish(1, routing_key="q", declare=[Queue("q")])
        consumer = connection.Consumer([Queue("q")], on_message=print)
        consumer.consume()
        monkeypatch.setattr(Signal, "wait", refuse)  # not before: a write may have to wait for the duties'
        consumer.cancel()
        monkeypatch.undo()
        engine = connection.default_channel.engine
        while engine.inspect.counts("q").leased:
            connection.transport.receiver.fetcher.arrived.wait(0.01)
        assert engine.inspect.counts("q").ready == 1


def test_a_drain_whose_turn_has_failed_does_not_sleep(monkeypatch, tmp_path):
    """Although another drain has cleared the bell that the failure rang."""

    def fail_and_clear(self, error):
        fail(self, error)
        self.arrived.clear()

    def sleep(*_):
        raise AssertionError("it sleeps")

    fail = Fetcher.fail
    with consumer(tmp_path) as (connection, seen):
        connection.drain_events(timeout=30)
        monkeypatch.setattr(Receiver, "_may_drive", lambda _: True)
        monkeypatch.setattr(Fetcher, "fail", fail_and_clear)
        monkeypatch.setattr(receiver, "wait_for", sleep)
        strike_once(monkeypatch, StoreUnavailable)
        with pytest.raises(connection.connection_errors):
            connection.drain_events(timeout=30)
        assert seen == [1]


def test_an_engine_that_another_thread_closes_meanwhile_is_still_one(monkeypatch, tmp_path):
    with consumer(tmp_path) as (connection, _):
        client = connection.default_channel.client
        engine = client.engine
        reads = [engine, None]
        monkeypatch.setattr(Client, "engine_if_open", property(lambda _: reads.pop(0)), raising=False)
        found = client.engine
        monkeypatch.undo()
        assert found is engine
