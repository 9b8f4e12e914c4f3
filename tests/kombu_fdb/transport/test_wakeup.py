import os
import select
import threading
import time

import pytest

from kombu_fdb.primitives.wakeup import Bell


@pytest.fixture
def bell():
    return Bell()


def test_wait_times_out(bell):
    started = time.monotonic()
    assert not bell.wait(0.02)
    assert 0.02 <= time.monotonic() - started < 1
    assert not bell.wait(0)
    bell.close()


def test_a_ring_before_the_wait(bell):
    bell.ring()
    assert bell.wait(None)
    assert bell.wait(0), "waiting does not clear"
    bell.clear()
    assert not bell.wait(0)
    bell.close()


def test_a_ring_during_the_wait(bell):
    threading.Timer(0.02, bell.ring).start()
    assert bell.wait(10)
    bell.close()


def test_readable_while_rung(bell):
    for _ in range(3):
        bell.ring()
        bell.ring()
        assert select.select([bell], [], [], 0)[0]
        bell.clear()
        assert not select.select([bell], [], [], 0)[0]
    bell.close()


def test_no_ring_is_lost(bell):
    """Work made visible before a ring is always seen: the protocol of clear, look, wait."""
    work, done = [], threading.Event()

    def ring():
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


def test_closed(bell):
    waiting = threading.Thread(target=bell.wait, args=(10,))
    waiting.start()
    bell.close()
    bell.ring()
    bell.clear()
    assert not waiting.join(5)
    bell.close()


class Slow:
    """Sends when something else has happened."""

    def __init__(self, ringing, meanwhile):
        self._ringing, self._meanwhile = ringing, meanwhile

    def send(self, data):
        self._meanwhile()
        return self._ringing.send(data)


def test_a_ring_that_is_cleared_before_it_has_sent_wakes_an_event_loop_once(bell):
    descriptor = bell.fileno()
    bell._ringing = Slow(bell._ringing, bell.clear)
    bell.ring()
    assert select.select([descriptor], [], [], 0)[0]
    bell.clear()
    assert not select.select([descriptor], [], [], 0)[0]


def test_a_ring_that_is_cleared_before_it_has_sent_wakes_a_thread_once(bell):
    sleeper = object()
    bell._sleepers.add(sleeper)
    bell._ringing = Slow(bell._ringing, bell.clear)
    bell.ring()
    bell._sleepers.discard(sleeper)
    assert bell.wait(10)
    assert not bell.wait(0.01)


def test_a_ring_while_stale_bytes_are_taken_is_not_lost(bell, monkeypatch):
    """There may be another sleeper."""
    descriptor = bell._listening.fileno()
    bell._sleepers.add(object())
    bell._ringing.send(b"!")
    take = Bell._take_bytes

    def ring_and_take(self):
        self.ring()
        take(self)

    monkeypatch.setattr(Bell, "_take_bytes", ring_and_take)
    bell.wait(10)
    assert select.select([descriptor], [], [], 0)[0]


def test_a_bell_that_is_closed_wakes_a_sleeper_who_has_only_its_number(bell, monkeypatch):
    """Another file would get the number, and it would sleep on that."""
    poll, files = select.poll, list[int]()

    class Late:
        def __init__(self):
            self._poll = poll()
            self.register = self._poll.register

        def poll(self, timeout):
            bell.close()
            bell.clear()
            files.extend(os.pipe() + os.pipe())
            return self._poll.poll(timeout)

    monkeypatch.setattr(select, "poll", Late)
    try:
        assert bell.wait(10)
    finally:
        for each in files:
            os.close(each)
    assert bell.wait(10), "for good"
