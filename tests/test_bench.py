"""What `make bench` runs, once and with few messages: a benchmark that fails leaves an empty column in its table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workload", ["publish", "named", "batch", "consume", "raw", "publish4"])
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
@pytest.mark.parametrize("script", ["run", "contention", "fairness", "keeping", "scaling", "tenants"])
def test_help(script: str) -> None:
    """What it needs is there."""
    pytest.importorskip("rich")
    command = [sys.executable, str(BENCH / f"{script}.py"), "--help"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
