"""A thread is started, and a signal handler raises in the middle of it."""

from __future__ import annotations

import threading

import pytest

from kombu_fdb.primitives.threads import in_hub, start


class TimeLimit(Exception):
    """A signal handler's."""


def _strike() -> None:
    raise TimeLimit


class Interrupted(threading.Thread):
    """As ``threading.py`` does it: the thread has begun, and cleaned up its own entry, when the signal comes."""

    def start(self) -> None:
        begun: dict[object, object] = {}
        try:
            _strike()
        except Exception:
            del begun[self]
            raise


class Broken(threading.Thread):
    def start(self) -> None:
        raise KeyError("of its own")


def test_what_the_signal_handler_raised_comes_out() -> None:
    with pytest.raises(TimeLimit):
        start(Interrupted())


def test_an_error_of_its_own_comes_out() -> None:
    with pytest.raises(KeyError, match="of its own"):
        start(Broken())


def test_a_thread_that_is_not_interrupted_runs() -> None:
    ran = threading.Event()
    start(threading.Thread(target=ran.set))
    assert ran.wait(30)


def test_gevents_loop_is_told_from_its_greenlets() -> None:
    gevent = pytest.importorskip("gevent")
    seen: list[bool] = []
    gevent.get_hub().loop.run_callback(lambda: seen.append(in_hub()))
    gevent.spawn(lambda: seen.append(in_hub())).join()
    assert sorted(seen) == [False, True]
    assert not in_hub()


def test_eventlets_loop_is_told_from_its_greenlets() -> None:
    eventlet = pytest.importorskip("eventlet")
    seen: list[bool] = []
    eventlet.hubs.get_hub().schedule_call_global(0, lambda: seen.append(in_hub()))
    eventlet.spawn(lambda: seen.append(in_hub())).wait()
    eventlet.sleep(0.01)
    assert sorted(seen) == [False, True]
    assert not in_hub()
