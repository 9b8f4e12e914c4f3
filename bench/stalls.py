"""Who keeps a read of FoundationDB waiting: the client library, the server, or the machine.

A thread reads one key again and again. When an answer takes long, it compares for how long each thread of its process,
and of the server, was ready meanwhile and waited for a core (``/proc/PID/task/*/schedstat``, Linux). While a thread
that waits for a core has the interpreter's lock, no other thread of the process runs any Python, such as
that which would hand on what the library has long received.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import NamedTuple

from kombu_fdb.engine.facade.engine import Engine

SLOW_S, PAUSE_S = 0.1, 0.02
LIBRARY = "fdb-network-thread"


class Stall(NamedTuple):
    """A slow read, in ms. For how long a thread of each had no core: the one that waited longest of our own threads."""

    took: float
    ours: float
    library: float
    server: float


def watch(engine: Engine, server: int, over: threading.Event, found: list[Stall]) -> None:
    """Read until it is over. ``server``: its process."""
    while not over.wait(PAUSE_S):
        before, began_s = [_waited("self"), _waited(server)], time.monotonic()
        engine.inspect.counts("nothing")
        took_s = time.monotonic() - began_s
        if took_s >= SLOW_S:
            here, there = (
                {task: (now[task] - then[task]) / 1e6 for task in now.keys() & then.keys()}
                for now, then in zip([_waited("self"), _waited(server)], before, strict=True)
            )
            library = next((each.native_id for each in threading.enumerate() if each.name == LIBRARY), None)
            its = here.pop(library or 0, 0.0)
            found.append(Stall(1e3 * took_s, max(here.values()), its, max(there.values(), default=0.0)))


def _waited(process: int | str) -> dict[int, int]:
    """Nanoseconds for which each thread has waited for a core."""
    found = {}
    for task in Path("/proc", str(process), "task").iterdir():
        try:
            found[int(task.name)] = int((task / "schedstat").read_text().split()[1])
        except OSError:  # it has ended
            continue
    return found
