"""A lock refuses the thread that is inside already: a signal handler there would find things half done."""

from __future__ import annotations

import threading

import pytest

from kombu_fdb.errors import StoreError
from kombu_fdb.primitives.threads import unless_mine


def test_a_lock_refuses_the_thread_that_is_inside_and_no_other() -> None:
    lock, seen = threading.RLock(), list[threading.RLock]()
    with unless_mine(lock):
        with pytest.raises(StoreError, match="would wait for itself"):
            unless_mine(lock)
        other = threading.Thread(target=lambda: seen.append(unless_mine(lock)))
        other.start()
        other.join()
    assert seen == [lock]
    with unless_mine(lock):
        pass
