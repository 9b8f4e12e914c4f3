"""Fuzz targets: made-up input, from seeds, so that whatever fails can be run again.

``FUZZ_ROUNDS``: inputs of each target, a few seconds' worth unless set (``make fuzz`` sets many). ``FUZZ_SEED``: the
first seed, 0 unless set; each input has the next one. A failing input is run again, alone, by the command that the
failure prints.
"""

import os
import random
import traceback

import pytest

ROUNDS = 60


def pytest_report_header():
    return f"fuzz: FUZZ_SEED={os.environ.get('FUZZ_SEED', '0')} FUZZ_ROUNDS={os.environ.get('FUZZ_ROUNDS', ROUNDS)}"


@pytest.fixture
def seed():
    """The first one."""
    return int(os.environ.get("FUZZ_SEED", "0"))


@pytest.fixture
def fuzz(request, seed):
    """Calls a target once per seed, with a source of chance of its own. ``rounds``: fewer, if its inputs are dear."""

    def run(target, rounds=ROUNDS):
        for number in range(seed, seed + int(os.environ.get("FUZZ_ROUNDS", rounds))):
            story = _failure(target, number)
            if story is not None:
                again = f"FUZZ_SEED={number} FUZZ_ROUNDS=1 pytest -n 0 '{request.node.nodeid}'"
                pytest.fail(f"{story}seed {number}; once more: {again}", pytrace=False)

    return run


def _failure(target, number):
    """In ASCII: what xdist hands on has to be UTF-8, and made-up input is not."""
    try:
        target(random.Random(number))
    except Exception as error:
        return "".join(traceback.format_exception(error)).encode("ascii", "backslashreplace").decode()
    return None
