"""What `make bench` runs, once and with few messages: a benchmark that fails leaves an empty column in its table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
#: With what tox gives those that measure with the test kit.
KIT = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workload", ["publish", "named", "batch", "consume", "publish4"])
def test_workload(workload: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(BENCH / "workloads.py"),
        workload,
        f"fdb+sqlite:///{tmp_path}/bench.db",
        "--count",
        "8",
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    figures = json.loads(found.stdout)
    assert figures
    assert all(figure > 0 for figure in figures.values())


@pytest.mark.timeout(60)
def test_verbs(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "verbs.py"), "verbs", f"fdb+sqlite:///{tmp_path}/bench.db", "--count", "3"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=KIT)
    assert found.returncode == 0, found.stderr
    verbs = json.loads(found.stdout)
    assert {"publish", "batch of 100", "take", "ack"} <= verbs.keys()
    assert all(verb["trips"] >= 2 for verb in verbs.values())  # how many it are, test_costs.py asserts
    assert all(len(verb["seconds"]) == 3 for verb in verbs.values())


@pytest.mark.timeout(60)
def test_threads(tmp_path: Path) -> None:
    url = f"fdb+sqlite:///{tmp_path}/bench.db"
    command = [sys.executable, str(BENCH / "verbs.py"), "threads", url, "--threads", "3", "--count", "4"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=KIT)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["rate"] > 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("script", ["run", "contention", "distances", "fairness", "fleet", "keeping", "tenants"])
def test_help(script: str) -> None:
    """What it needs is there."""
    pytest.importorskip("rich")
    command = [sys.executable, str(BENCH / f"{script}.py"), "--help"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=KIT)
    assert found.returncode == 0, found.stderr
