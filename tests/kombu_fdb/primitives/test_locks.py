"""A lock refuses the thread that is inside already: a signal handler there would find things half done."""

import threading
from types import BuiltinFunctionType

import pytest

from kombu_fdb.errors import StoreError
from kombu_fdb.primitives.interruption import Lock


def test_a_lock_refuses_the_thread_that_is_inside_and_no_other():
    lock, seen = Lock(), list[str]()

    def enter():
        with lock:
            seen.append("the other")

    other = threading.Thread(target=enter)
    with lock:
        with pytest.raises(StoreError, match="would wait for itself"), lock:
            seen.append("the same")
        other.start()
        seen.append("the first")
    other.join()
    assert seen == ["the first", "the other"]
    with lock:
        pass


def test_a_lock_may_be_entered_again_where_that_is_asked_for():
    lock = Lock()
    with lock.reentrant, lock.reentrant, pytest.raises(StoreError), lock:
        pass
    with lock:
        pass


def test_with_calls_into_c_where_a_signal_handler_does_not_come_in():
    lock = Lock()
    assert isinstance(lock.__enter__, BuiltinFunctionType)
    assert isinstance(lock.__exit__, BuiltinFunctionType)
