from __future__ import annotations

import select
import threading
import time

import pytest

from kombu_fdb.primitives.wakeup import Bell


@pytest.fixture
def bell() -> Bell:
    return Bell()


def test_wait_times_out(bell: Bell) -> None:
    started = time.monotonic()
    assert not bell.wait(0.02)
    assert 0.02 <= time.monotonic() - started < 1
    assert not bell.wait(0)
    bell.close()


def test_a_ring_before_the_wait(bell: Bell) -> None:
    bell.ring()
    assert bell.wait(None)
    assert bell.wait(0), "waiting does not clear"
    bell.clear()
    assert not bell.wait(0)
    bell.close()


def test_a_ring_during_the_wait(bell: Bell) -> None:
    threading.Timer(0.02, bell.ring).start()
    assert bell.wait(10)
    bell.close()


def test_readable_while_rung(bell: Bell) -> None:
    for _ in range(3):
        bell.ring()
        bell.ring()
        assert select.select([bell], [], [], 0)[0]
        bell.clear()
        assert not select.select([bell], [], [], 0)[0]
    bell.close()


def test_no_ring_is_lost(bell: Bell) -> None:
    """Work made visible before a ring is always seen: the protocol of clear, look, wait."""
    work, done = [], threading.Event()

    def ring() -> None:
        for number in range(2000):
            work.append(number)
            bell.ring()
        done.set()

    thread = threading.Thread(target=ring)
    thread.start()
    seen = 0
    while seen < 2000:
        bell.clear()
        if seen == len(work):
            assert bell.wait(10)
        seen = len(work)
    thread.join()
    bell.close()


def test_closed(bell: Bell) -> None:
    waiting = threading.Thread(target=bell.wait, args=(10,))
    waiting.start()
    bell.close()
    bell.ring()
    bell.clear()
    assert not waiting.join(5)
    bell.close()
