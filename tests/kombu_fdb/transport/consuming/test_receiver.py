"""The receiver's thread ends when it is told to, at whatever moment that is, and else is missed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Queue

from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.primitives.locks import Signal
from kombu_fdb.primitives.wakeup import Bell
from kombu_fdb.process.client import Client
from kombu_fdb.transport import transport as transports
from kombu_fdb.transport.consuming import receiver
from kombu_fdb.transport.consuming.lookout import Lookout
from kombu_fdb.transport.consuming.receiver import Receiver


def test_a_thread_that_is_stopped_while_its_turn_clears_the_bell_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    lookout = Lookout(Bell())

    def turn(_: object) -> None:
        lookout.bell.ring()
        lookout.stop()  # by another thread: its ring adds nothing to the first
        lookout.bell.clear()

    monkeypatch.setattr(receiver, "_turn", turn)
    thread = threading.Thread(target=receiver._serve, args=(None, lookout), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_a_thread_that_an_exception_ends_anywhere_is_started_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: type[BaseException]
) -> None:
    """Where threads are greenlets, a signal handler raises in whichever is running."""
    strikes = [error("out of nowhere")]
    wait = Lookout.arm

    def strike(self: Lookout, *args: Any) -> Any:
        if strikes:
            raise strikes.pop()
        return wait(self, *args)

    monkeypatch.setattr(Lookout, "arm", strike)
    seen: list[Any] = []
    with Connection(f"fdb+sqlite:///{tmp_path}/broker.db") as connection:
        producer = connection.Producer()
        producer.publish(1, routing_key="q", declare=[Queue("q")])
        with connection.Consumer([Queue("q")], callbacks=[lambda body, message: (seen.append(body), message.ack())]):
            with pytest.raises(connection.connection_errors):
                connection.drain_events(timeout=30)
            connection.ensure_connection()
            connection.transport.establish_connection()
            connection.drain_events(timeout=30)
    assert seen == [1]


def test_a_connection_that_is_closed_as_its_receiver_is_made_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By another thread. Whoever drained it would wait for ever."""
    with Connection(f"fdb+sqlite:///{tmp_path}/broker.db") as connection:
        transport = connection.transport
        connection.connect()

        def close_meanwhile(store: Client) -> Receiver:
            transport.close_connection(transport)
            return Receiver(store)

        monkeypatch.setattr(transports, "Receiver", close_meanwhile)
        with pytest.raises(StoreUnavailable, match="closed"):
            transport.drain_events(transport)
        assert transport.receiver_if_any is None


def test_a_cancel_in_an_event_loop_does_not_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where gevent runs signal handlers. The thread does it."""
    monkeypatch.setattr(receiver, "in_hub", lambda: True)
    wait = Signal.wait

    def refuse(signal: Signal, timeout_s: float | None) -> bool:
        assert threading.current_thread() is not threading.main_thread(), "it waits"
        return wait(signal, timeout_s)

    monkeypatch.setattr(Signal, "wait", refuse)
    with Connection(f"fdb+sqlite:///{tmp_path}/broker.db") as connection:
        connection.Producer().publish(1, routing_key="q", declare=[Queue("q")])
        consumer = connection.Consumer([Queue("q")], on_message=print)
        consumer.consume()
        consumer.cancel()
        monkeypatch.undo()
        engine = connection.default_channel.engine
        while engine.inspect.counts("q").leased:
            connection.transport.receiver.reception.arrived.wait(0.01)
        assert engine.inspect.counts("q").ready == 1
