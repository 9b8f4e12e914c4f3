"""What interrupts a call at any moment leaves nothing behind in the thread that asked for it."""

import gc
import sys

import pytest
from kit.interruption import interrupt

HERE = frozenset({__file__})


def works():
    """Handles an exception and lets one through, in all the ways there are."""
    try:
        try:
            int("one")
        except ValueError:
            int("1")
        try:
            int("two")
        except ValueError as error:
            raise KeyError from error
        finally:
            int("3")
    except KeyError:
        pass


def moments():
    """How many bytecodes can be interrupted."""
    moment = 1
    while interrupt(works, moment, HERE, per="opcode"):
        moment += 1
    return moment


def test_no_exception_is_left_in_the_threads_state():
    assert moments() > 20
    assert sys.exc_info() == (None, None, None)
    with pytest.raises(LookupError) as caught:
        raise LookupError
    assert caught.value.__context__ is None


def test_it_strikes_where_it_says():
    places = [interrupt(works, line, HERE) for line in range(1, 5)]
    assert len(set(places)) == 4
    assert all(place.startswith("works:") for place in places)
    assert interrupt(works, 10_000, HERE) == ""
    assert interrupt(works, 1, {"another.py"}) == ""


def test_what_the_call_raises_itself_is_raised():
    with pytest.raises(ZeroDivisionError):
        interrupt(lambda: 1 / 0, 10_000, HERE)


def test_it_strikes_in_no_finalizer_of_garbage():
    """The exception would be lost, pytest would warn of it, and each round would have other moments."""
    collects = []
    interrupt(lambda: collects.append(gc.isenabled()), 10_000, HERE)
    assert collects == [False]
    assert gc.isenabled()
