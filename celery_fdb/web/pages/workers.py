"""``/workers`` and ``/sessions``: the running workers, and the consumer processes.

``/workers`` shows what the running workers answer through Celery's remote control. They have :data:`TIMEOUT_S` to
answer. A worker that is still starting, or frozen, is missing there, but its session is on the page of sessions. A
question reaches all workers, so it is asked once for all visitors who open the page within :data:`FRESH_S`. It is asked
in a thread of its own, so that no other page waits for the answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import Celery
from celery.app.control import Control
from starlette.responses import Response

from celery_fdb.control import ask_workers
from celery_fdb.inspection.overview import look
from celery_fdb.operations.action import Action
from celery_fdb.operations.catalogue import named
from celery_fdb.web.page import Shared
from celery_fdb.web.request_context import MOST_SHOWN, RequestContext
from kombu_fdb import Broker
from kombu_fdb.model import SessionFacts, controlled_worker, is_internal

# -- sessions ----------------------------------------------------------------------------------------------------------


def sessions(context: RequestContext, broker: Broker) -> Response:
    """The sessions, the silent ones first."""
    seen = look(broker, queues=(), held=True)
    rows = [row_of(each, seen.heard_s(each)) for each in seen.sessions]
    rows.sort(key=lambda row: (row["state"] != "silent", row["session"].host, row["session"].pid or 0))
    return context.page("sessions", sessions=rows[:MOST_SHOWN], total=len(rows), asides=seen.asides)


def row_of(session: SessionFacts, age_s: float | None) -> dict[str, Any]:
    """A session as the page shows it. ``age_s``: seconds since its last heartbeat.

    ``worker``: the name of the Celery worker, known by its queue for remote control; "" for other processes.
    """
    return {
        "session": session,
        "age_s": age_s,
        "state": session.state(age_s),
        "queues": [name for name in session.consumed if not is_internal(name)],
        "worker": next(filter(None, map(controlled_worker, session.consumed)), ""),
    }


# -- workers -----------------------------------------------------------------------------------------------------------


#: Seconds to wait for the answers to each of the three questions.
TIMEOUT_S = 1.0
#: For how many seconds an answer is shown again.
FRESH_S = 2.0


def workers(told: Shared[list[dict[str, Any]]], context: RequestContext, broker: Broker) -> Response:
    """The page of workers. ``told``: their answers, which the dashboard's visitors share."""
    del broker  # remote control uses the app's own connection
    app, clock = context.settings.app, context.settings.clock
    found = None if app is None else told.get(lambda: ask(app, clock.wall_ms() / 1000), clock, FRESH_S)
    return context.page("workers", workers=found, offered=_offered)


#: Pools that can be resized while they run, and pools that enforce both time limits.
RESIZABLE = frozenset({"prefork", "gevent", "eventlet"})
LIMITING = frozenset({"prefork"})


def _offered(pool: str) -> list[Action]:
    """The actions on a worker. ``pool``: the worker's, as Celery's option ``-P`` names it."""
    resizing = ["worker_grow", "worker_shrink"] if pool in RESIZABLE else []
    limiting = ["worker_time_limit"] if pool in LIMITING else []
    return named(*resizing, *limiting, "worker_rate", "worker_quiet", "worker_shutdown")


def ask(app: Celery, now_s: float) -> list[dict[str, Any]]:
    """The workers that answered, by name. Raises ``StoreUnavailable``."""
    stats, active, queues = ask_workers(app, _ask)
    names = sorted({str(each) for each in (*stats, *active, *queues)})
    return [worker_of(name, stats.get(name), active.get(name), queues.get(name), now_s) for name in names]


def _ask(control: Control) -> tuple[dict[Any, Any], ...]:
    inspect = control.inspect(timeout=TIMEOUT_S)
    return inspect.stats() or {}, inspect.active() or {}, inspect.active_queues() or {}


def worker_of(name: str, stats: Any, active: Any, queues: Any, now_s: float) -> dict[str, Any]:
    """A worker as the page shows it, from its answers, which may have any shape.

    ``ran``: how many tasks it has run since its start. ``queues``: where it takes tasks from. ``active``: the tasks
    that run now, each with its ``id``, its name as ``task``, and for how many ``seconds``, None if the worker did not
    say.
    """
    stats = stats if isinstance(stats, Mapping) else {}
    pool, total = (found if isinstance(found := stats.get(part), Mapping) else {} for part in ("pool", "total"))
    pids = pool.get("processes")  # the pool's limit stays as it was when the pool grows
    running = [_active(each, now_s) for each in _maps(active)]
    return {
        "name": name,
        "pool": str(pool.get("implementation", "")).partition(":")[0].rpartition(".")[2],
        "processes": len(pids) if isinstance(pids, list) else _whole(pool.get("max-concurrency")),
        "prefetch": _whole(stats.get("prefetch_count")),
        "uptime_s": _whole(stats.get("uptime")),
        "pid": _whole(stats.get("pid")),
        "ran": sum(_whole(each) or 0 for each in total.values()),
        "queues": sorted(str(each["name"]) for each in _maps(queues) if "name" in each),
        "active": sorted(running, key=lambda each: -(each["seconds"] or 0.0)),
    }


def _maps(answer: Any) -> list[Mapping[str, Any]]:
    return [each for each in answer if isinstance(each, Mapping)] if isinstance(answer, list) else []


def _active(told: Mapping[str, Any], now_s: float) -> dict[str, Any]:
    began = told.get("time_start")
    seconds = max(now_s - began, 0.0) if isinstance(began, int | float) and began else None
    return {"id": str(told.get("id", "")), "task": str(told.get("name", "")), "seconds": seconds}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
