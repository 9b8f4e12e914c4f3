"""Two releases side by side: ``python bench/compare.py 5.7.0 5.8.0``, of what ``run.py --save RELEASE`` has kept.

Figures of one machine only tell about another by their ratios, and those of two days by luck: the command says so if
the machines differ.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tables
from rich.console import Console
from rich.table import Table

HISTORY = Path(__file__).parent / "history"
PACKAGES = ("celery-fdb", "kombu", "celery", "foundationdb")
#: Of a change that is less than what single rounds differ by, nothing is said.
NOISE = 0.1


def machine() -> dict[str, str]:
    """What the figures depend on besides the code."""
    return {
        "system": platform.system(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "load before": f"{os.getloadavg()[0]:.1f}",
        "Python": platform.python_version(),
        "SQLite": sqlite3.sqlite_version,
        **{name: _version(name) for name in PACKAGES},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def save(release: str, about: Mapping[str, str], results: Mapping[str, Mapping[str, Sequence[float]]]) -> Path:
    HISTORY.mkdir(exist_ok=True)
    path = HISTORY / f"{release}.json"
    kept = {"release": release, "day": datetime.now(UTC).date().isoformat(), "machine": dict(about), "results": results}
    path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    return path


def load(release: str) -> dict[str, Any]:
    path = HISTORY / f"{release}.json"
    if not path.exists():
        known = ", ".join(sorted(each.stem for each in HISTORY.glob("*.json"))) or "none"
        raise SystemExit(f"nothing is kept of {release}: run.py --save {release} does. Known releases: {known}.")
    kept: dict[str, Any] = json.loads(path.read_text())
    return kept


def table(old: Mapping[str, Any], new: Mapping[str, Any]) -> Table:
    """Of each figure that both have: new, and as a multiple of the old one."""
    shown = Table(title=f"{new['release']} ({new['day']}) as a multiple of {old['release']} ({old['day']})")
    shown.add_column("broker")
    columns = {**tables.SPEED, **tables.CROWDS, **tables.WORKERS}
    for name in columns.values():
        shown.add_column(name, justify="right")
    for broker in new["results"]:
        if broker in old["results"]:
            cells = [_cell(old["results"], new["results"], broker, column) for column in columns]
            shown.add_row(broker, *cells)
    return shown


def _cell(old: Any, new: Any, broker: str, column: str) -> str:
    before, now = tables.median(old, broker, column), tables.median(new, broker, column)
    if not before or not now:
        return "-"
    ratio = now / before
    said = "" if abs(ratio - 1) < NOISE else f" ({ratio:.2f})"
    return f"{tables.cell(now, column)}{said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", metavar="RELEASE")
    parser.add_argument("new", metavar="RELEASE")
    given = parser.parse_args()
    old, new = load(given.old), load(given.new)
    console = Console(width=200)
    console.print(table(old, new))
    for name, value in new["machine"].items():
        if old["machine"].get(name) != value:
            console.print(f"{name}: {old['machine'].get(name, '-')} -> {value}")


if __name__ == "__main__":
    main()
