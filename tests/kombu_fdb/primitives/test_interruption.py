"""A thread is started, and a signal handler raises in the middle of it."""

import signal
import sys
import threading

import pytest

from kombu_fdb.primitives.interruption import in_hub, start


class TimeLimit(Exception):
    """A signal handler's."""


def test_a_signal_at_any_line_of_a_start_comes_out_as_it_is_before_or_after_the_thread_has_begun():
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signal handlers run in the main thread")

    def handle(number, frame):
        raise TimeLimit

    def trace(frame, event, _argument):
        nonlocal left
        if frame.f_code.co_filename != threading.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGUSR1)
        return trace

    before, moment, traced = signal.signal(signal.SIGUSR1, handle), 0, sys.gettrace()
    left = 0
    try:
        while left <= 0:
            moment += 1
            left = moment
            ran = threading.Event()
            thread = threading.Thread(target=ran.set, daemon=True)
            sys.settrace(trace)
            try:
                start(thread)
            except TimeLimit:
                pass
            finally:
                sys.settrace(traced)
            assert thread.ident is None or ran.wait(30), moment
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert moment > 30


def test_a_thread_that_is_not_interrupted_runs():
    ran = threading.Event()
    start(threading.Thread(target=ran.set))
    assert ran.wait(30)


def test_gevents_loop_is_told_from_its_greenlets():
    gevent = pytest.importorskip("gevent")
    seen = []
    gevent.get_hub().loop.run_callback(lambda: seen.append(in_hub()))
    gevent.spawn(lambda: seen.append(in_hub())).join()
    assert sorted(seen) == [False, True]
    assert not in_hub()


def test_eventlets_loop_is_told_from_its_greenlets():
    eventlet = pytest.importorskip("eventlet")
    seen = []
    eventlet.hubs.get_hub().schedule_call_global(0, lambda: seen.append(in_hub()))
    eventlet.spawn(lambda: seen.append(in_hub())).wait()
    eventlet.sleep(0.01)
    assert sorted(seen) == [False, True]
    assert not in_hub()
