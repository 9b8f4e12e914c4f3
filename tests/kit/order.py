"""In which order a run goes through its tests: what mostly waits stands between what mostly computes.

Tests with real processes wait for them, for seconds each, and there are hundreds. Side by side they would leave the
cores idle, and then all others would crowd them. So they are spread: after each file of the others some of them, all
of them before the last tenth of the run, which then ends with short tests and not with one that everybody waits for.
Between two tests of a file nothing is put, as it may have a fixture in common.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import groupby
from typing import TypeVar

Test = TypeVar("Test")


def spread(tests: Iterable[Test], waits: Callable[[Test], bool], file: Callable[[Test], Hashable]) -> list[Test]:
    """The same tests, those that wait among the others; each kind in its order."""
    given = list(tests)
    waiting = [each for each in given if waits(each)]
    others = [each for each in given if not waits(each)]
    ordered: list[Test] = []
    placed = 0
    for _, group in groupby(others, file):
        ordered += group
        until = min(len(waiting), _share(len(ordered) - placed, len(others), len(waiting)))
        ordered += waiting[placed:until]
        placed = until
    return ordered + waiting[placed:]


def _share(done: int, of: int, waiting: int) -> int:
    """How many of those that wait belong before this point."""
    return waiting * done * 10 // (of * 9)
