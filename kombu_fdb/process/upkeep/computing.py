"""Computing: a process that can't beat, because a task of it lets nothing else run, is not dead. Guarantee: NOT-TWICE.

Model. The heartbeat comes from a thread. A task can keep that from running for as long as it likes: C code that does
not let go of the interpreter, and with eventlet, where it is a greenlet, any computation. But what computes can be seen
from outside: the kernel counts how long its threads run, or wait for a core. So an observer that is about to take a
session for dead looks for its process (``primitives/processes.py``). If that is one of this host, and was busy for
:data:`SHARE` of the session's time to live since the session had been silent for half of it, this counts as a beat.

A process that was killed, stopped or frozen, or that hangs without computing, gives no such sign, and is dead when its
time is over (BACK-SOON). A process that computes for ever keeps its messages for ever, like any task that does not end.
On SQLite all processes that share a store are on one host, so each sees all others, but for those in other containers;
on FoundationDB it sees those on its own machine.
"""

from __future__ import annotations

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.upkeep.sweep import Observer
from kombu_fdb.model import SessionId
from kombu_fdb.primitives.processes import see

#: A process has to be busy for this part of the time to live in its second half, a twentieth of the time. A worker that
#: has nothing to do needs a tenth of that; one that computes is busy all the time.
SHARE = 1 / 40


class Computing:
    """Of one observer."""

    def __init__(self) -> None:
        #: How long the process of each session that is half silent had been busy when that was first seen.
        self._before: dict[SessionId, float] = {}

    def spare(self, engine: Engine, observer: Observer[SessionId]) -> None:
        """Those of the silent that compute are not silent. After each look of the observer's."""
        silent = dict(observer.half_silent())
        described = engine.sessions.describe(list(silent)) if silent else []
        before, self._before = self._before, {}
        for (session_id, ttl_s), description in zip(silent.items(), described, strict=True):
            busy_s = _busy_s(description)
            if busy_s is None:
                continue
            began_s = before.get(session_id, busy_s)
            if busy_s - began_s >= ttl_s * SHARE:
                observer.note_alive(session_id)
            else:
                self._before[session_id] = began_s


def _busy_s(description: dict[str, object]) -> float | None:
    """None of a process that is not there any more, or not here."""
    pid = description.get("pid")
    seen = see(pid) if isinstance(pid, int) and pid > 0 else None
    return seen.busy_s if seen is not None and seen.fingerprint == description.get("process") else None
