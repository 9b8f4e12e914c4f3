"""Some seeds of the simulation; ``python -m kombu_fdb.testing.simulation FIRST LAST`` runs more."""

from __future__ import annotations

from pathlib import Path

import pytest

from kombu_fdb.testing.simulation import Violation, simulate, twin

#: Seeds that once failed.
FAILED = [int(line.split()[0]) for line in Path(__file__).with_name("seeds.txt").read_text().splitlines() if line]


@pytest.mark.parametrize("seed", sorted({*range(60), *FAILED}))
def test_no_guarantee_is_violated(seed: int) -> None:
    simulate(seed)


def test_a_seed_is_a_history() -> None:
    assert simulate(3).history == simulate(3).history


@pytest.mark.parametrize(
    "guard",
    [
        "a claim does not conflict on what it takes",
        "an outage counts as silence",
    ],
)
def test_the_simulation_catches_a_missing_guard(guard: str) -> None:
    with twin(guard), pytest.raises((Violation, AssertionError)):
        for seed in range(100):
            simulate(seed)
