"""The result backend while its store is away."""

import time

import pytest
from celery.exceptions import TimeoutError as CeleryTimeoutError

pytestmark = [pytest.mark.process, pytest.mark.own_cluster, pytest.mark.timeout(300)]

LONG_S = 40.0


def test_the_store_stops_and_starts(tasks, work, broker, until):
    """``get`` ends in time or waits; the worker stores its result when the store is back."""
    if broker.cluster is None:
        pytest.skip("a file does not stop")
    work()
    result = tasks.wait.delay("a")
    until(lambda: broker.marks("start", "a"))
    broker.cluster.stop()
    begun = time.monotonic()
    with pytest.raises(CeleryTimeoutError):
        result.get(timeout=1.0)
    assert time.monotonic() - begun < 10
    broker.allow("a")
    until(lambda: broker.marks("end", "a"))
    broker.cluster.start()
    assert result.get(timeout=LONG_S) == "a"
