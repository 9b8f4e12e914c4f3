"""What a transaction costs that is far from its cluster."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

import pytest
from kit.processes import until

from .box import Box, Client
from .release import ROOT

pytestmark = [pytest.mark.foundationdb, pytest.mark.process, pytest.mark.xdist_group("box")]

TRIP_S = 0.01
#: The library learns how long an answer takes; then the fastest call of as many as it takes is what counts.
READER = """
import sys, time
from kombu_fdb import Broker

enough_s = float(sys.argv[2])
with Broker.open(sys.argv[1]) as broker:
    jobs = broker.queue("jobs")
    deadline, fastest, calls = time.monotonic() + 60, 60.0, 0
    while calls < 50 or (fastest >= enough_s and time.monotonic() < deadline):
        begun = time.perf_counter()
        jobs.stats()
        calls += 1
        if calls >= 50:
            fastest = min(fastest, time.perf_counter() - begun)
    print(fastest)
"""


@pytest.fixture(scope="module")
def distant(box: Box) -> Iterator[Client]:
    found = box.machines.get("distant")  # the module's tests may come in two parts
    client = found if isinstance(found, Client) else box.client("distant")
    box.delay(client, box.servers, TRIP_S / 2)
    yield client
    box.delay(client, box.servers, 0)


def test_a_read_costs_two_round_trips_and_no_half_of_one(box: Box, distant: Client) -> None:
    """The library waits for half a round trip before it asks for a read version, or 5 ms, unless it is told not to."""
    enough_s = 2 * TRIP_S + 0.004
    command = [sys.executable, "-c", READER, f"fdb:///{box.cluster_file}", str(enough_s)]
    fastest = float(distant.run(command, 120, env={**os.environ, "PYTHONPATH": str(ROOT)}))
    assert 2 * TRIP_S <= fastest < enough_s


def test_the_doctor_measures_one_round_trip(box: Box, distant: Client) -> None:
    """It measures too much while this machine is busy, and too little at no time."""
    command = [sys.executable, "-m", "kombu_fdb.doctor", f"fdb:///{box.cluster_file}"]

    def is_near() -> bool:
        printed = distant.run(command, 120, env={**os.environ, "PYTHONPATH": str(ROOT)})
        found = re.search(r"distance        a round trip takes ([\d.]+) ms, a commit ([\d.]+) ms", printed)
        assert found, printed
        trip_ms, commit_ms = map(float, found.groups())
        assert min(trip_ms, commit_ms) >= 1000 * TRIP_S
        return trip_ms < 1500 * TRIP_S

    until(is_near)
