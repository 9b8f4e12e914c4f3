"""What `make bench` runs, once and with few messages: a benchmark that fails leaves an empty column in its table."""

import importlib
import json
import os
import re
from pathlib import Path

import pytest
from kit.processes import run_python

BENCH = Path(__file__).parent.parent / "bench"
DOCS = BENCH.parent / "docs"
#: A verb's round trips, by the table of what distance costs.
COUNTED = {
    name: int(trips)
    for name, trips in re.findall(
        r"^\| ([\w ]+) (?:\| [\d.]+ \([\d.]+\) ){4}\| [\d.]+ \| (\d+) \|$",
        (DOCS / "benchmarks.md").read_text(),
        re.MULTILINE,
    )
}
#: Of the page's curves: a message's processor time in µs, of the consumer that claims and of the one that acknowledges.
PROCESSOR_US = {"no keys": (124.2, 228), "1,000 keys": (247.5, 228)}
#: With what tox gives those that measure with the test kit.
KIT = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}

pytestmark = pytest.mark.timeout(60)


def measured(script, *arguments):
    return json.loads(run_python(BENCH / script, *arguments, env=KIT).stdout)


@pytest.fixture
def url(tmp_path):
    return f"fdb+sqlite:///{tmp_path}/bench.db"


@pytest.mark.parametrize("workload", ["publish", "named", "batch", "consume", "publish4"])
def test_workload(workload, url):
    figures = measured("workloads.py", workload, url, "--count", 8)
    assert figures
    assert all(figure > 0 for figure in figures.values())


def test_verbs(url):
    verbs = measured("verbs.py", "verbs", url, "--count", 3)
    assert {"publish", "batch of 100", "take", "ack"} <= COUNTED.keys()
    assert {name: verb["trips"] for name, verb in verbs.items() if name in COUNTED} == COUNTED
    assert all(len(verb["seconds"]) == 3 for verb in verbs.values())


@pytest.fixture
def scaling(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("scaling")


def test_the_curves_of_the_page_are_those_of_the_model(scaling):
    page = (DOCS / "how-to" / "capacity.md").read_text()
    workers = [10, 50, 100, 500, 1000, 5000]
    assert "| 10 workers | 50 | 100 | 500 | 1,000 | 5,000 |" in page
    rows = re.findall(r"^\| (none|1,000) \| ([\d.]+) ms, (\d+) ms ((?:\| [\d,]+ )+)\|$", page, re.MULTILINE)
    assert len(rows) == 6
    for named, round_trip_ms, commit_ms, cells in rows:
        keys = "no keys" if named == "none" else f"{named} keys"
        serving, own = (us / 1e6 for us in PROCESSOR_US[keys])
        costs = scaling.Costs(float(round_trip_ms) / 1e3, float(commit_ms) / 1e3, serving, own)
        shown = [int(cell.replace(",", "")) for cell in cells.split("|")[1:]]
        assert shown == pytest.approx([scaling.rate(costs, number, keys) for number in workers], rel=1e-3)


def test_threads(url):
    assert measured("verbs.py", "threads", url, "--threads", 3, "--count", 4)["rate"] > 0


@pytest.mark.parametrize("script", ["run", "contention", "distances", "fairness", "fleet", "keeping", "tenants"])
def test_help(script):
    """What it needs is there."""
    pytest.importorskip("rich")
    run_python(BENCH / f"{script}.py", "--help", env=KIT)


def test_with_no_more_distance_the_model_gives_what_was_measured(scaling):
    for workers, messages in ((1, 10.0), (8, 35.0), (50, 250.0), (200, 74.0)):
        assert scaling.at_distance(3000.0, messages, "no keys", workers, 0.0) == pytest.approx(3000.0)
        assert scaling.at_distance(3000.0, messages, "no keys", workers, 0.005) < 3000.0


def test_services_grow_with_the_distance(scaling):
    """As more workers have come back to the line when the next one begins, which makes up for most of the distance."""
    few, many = (scaling.at_distance(4000.0, 74.0, "no keys", workers, 0.005) for workers in (8, 200))
    assert few < 2000.0
    assert many > 3000.0
