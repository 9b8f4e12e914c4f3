"""The receiver's thread ends when it is told to, at whatever moment that is."""

from __future__ import annotations

import threading

import pytest

from kombu_fdb.primitives.wakeup import Bell
from kombu_fdb.transport.consuming import receiver
from kombu_fdb.transport.consuming.lookout import Lookout


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
