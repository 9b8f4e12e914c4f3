"""Whose value stands still, for how long, and who is seen to live."""

import math

from kombu_fdb.process.failure_detector import FailureDetector


def observer(*looks_s, ttl_s=8.0):
    """One that has looked at an unchanged value at these times."""
    observer = FailureDetector[str]()
    for now in looks_s:
        observer.look([("a", b"same", ttl_s)], now)
    return observer


def test_half_silent_is_half_of_the_time_to_live_and_no_less():
    assert not observer(0, 1.5, 3).half_silent()
    assert observer(0, 2, 4).half_silent() == [("a", 8.0)]


def test_of_an_outage_a_quarter_of_the_time_to_live_counts():
    assert observer(0, 100).next_silent_s() == 6


def test_when_the_next_one_is_silent():
    assert observer().next_silent_s() == math.inf
    assert observer(0, 2, 4).next_silent_s() == 4
    silent = observer(0, 2, 4, 6, 8)
    assert silent.silent() == [("a", b"same")]
    assert silent.next_silent_s() == math.inf, "it is silent already"


def test_who_was_seen_to_change_is_alive_for_a_quarter_of_its_time():
    observer = FailureDetector()
    observer.look([("a", b"1", 20.0)], 100.0)
    assert not observer.is_alive("a"), "seen once: it may have died long ago"
    observer.look([("a", b"1", 20.0)], 100.5)
    assert not observer.is_alive("a"), "seen twice, and the same"
    observer.look([("a", b"2", 20.0)], 101.0)
    observer.look([("a", b"2", 20.0)], 105.5)
    assert observer.is_alive("a")
    observer.look([("a", b"2", 20.0)], 106.0)
    assert not observer.is_alive("a")
