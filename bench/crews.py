"""Workers of several kinds at one broker: one, two and four of them with four children each, solo, threads, gevent.

They start on a queue that stays empty. When all of them answer, the tasks are sent to another one, and only then are
they told to consume it: so none is ahead of the others, and nothing is published while they work.
"""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import workloads

__all__ = ["work_off"]

ANSWER_S = 60.0


def work_off(url: str, options: dict[str, Any], count: int, name: str) -> dict[str, float]:
    """Empty tasks per second, late acknowledgement."""
    workers, pool, size = workloads.CREWS[name]
    with tempfile.TemporaryDirectory() as out, contextlib.ExitStack() as stack:
        app = workloads.app_of(url, options, out)
        for number in range(workers):
            flags = ["-Q", "bench.nothing", "-P", pool, "-c", str(size), "-n", f"crew{number}@%h"]
            stack.enter_context(workloads.Worker(out, flags))
        _await_answers(app, workers)
        workloads.preload(app, count)
        told = app.control.add_consumer("celery", reply=True, timeout=ANSWER_S, limit=workers)
        if len(told) < workers:
            raise SystemExit(f"{len(told)} of {workers} workers began to consume: {told}")
        stamps = workloads.await_stamps(out, count)
    return {name: workloads.steady_rate(stamps)}


def _await_answers(app: Any, workers: int) -> None:
    """Until all are up."""
    for _ in range(int(ANSWER_S)):
        if len(app.control.ping(timeout=1.0, limit=workers)) == workers:
            return
    raise SystemExit(f"not all of {workers} workers came up")
