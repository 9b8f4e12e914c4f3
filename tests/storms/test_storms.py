"""The storms, short. ``make storm`` plays longer ones, with seeds of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .__main__ import STORMS

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]


def play(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.storms", *arguments, "--seed", "7"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=390, check=False)
    if "skipped:" in done.stdout:
        pytest.skip(done.stdout.splitlines()[0])
    return done


@pytest.mark.parametrize(("storm", "rounds"), [("kills", 4), ("relays", 3), ("forks", 1), ("churn", 2), ("disk", 1)])
def test_nothing_confirmed_is_lost_on_sqlite(storm: str, rounds: int) -> None:
    done = play(storm, "--rounds", str(rounds))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.foundationdb
@pytest.mark.parametrize(("storm", "rounds"), [("kills", 4), ("combiner", 3), ("forks", 1), ("cluster", 4)])
def test_nothing_confirmed_is_lost_on_foundationdb(storm: str, rounds: int) -> None:
    done = play(storm, "--rounds", str(rounds), "--store", "fdb")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_storm_is_played() -> None:
    modules = {
        path.stem
        for path in Path(__file__).parent.glob("*.py")
        if "\ndef run(rounds: int, seed: int" in path.read_text()
    }
    assert modules == set(STORMS)


def test_a_storm_notices_what_is_lost() -> None:
    """Without acks_late the message that a worker has begun is gone with it: guarantees.md promises nothing else."""
    done = play("kills", "--rounds", "0", "--acks", "early")
    assert done.returncode == 1, done.stdout
    _, row, *_ = done.stdout.splitlines()
    assert int(row.split()[4]) > 0, done.stdout
