"""Options of celery-fdb on tasks that don't have them: Celery makes attributes of those, and nothing reads them.

A task has the options of its class, which ``celery_fdb.install(app)`` sees to. Without it nothing of ``celery_fdb`` is
loaded, so the transport looks when a worker has started, and the doctor does when it is given an app.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger(__name__)

OPTIONS = ("fair_key", "max_in_flight", "rate_limit_key", "dedup_id", "dedup_window", "dead_letter", "backoff")
PACKAGE = "celery_fdb."
#: The setting, and the worker's step that ``celery_fdb.tasks.failures.install`` adds, which sees to it.
SETTING = "fdb_dead_letter_failures"
SEES_TO_FAILURES = "celery_fdb.tasks.failures"


def without_effect(app: Any) -> list[str]:
    """The tasks of a Celery app with options that nothing heeds, and its setting if that is so."""
    keeps_failures = any(getattr(step, "__module__", "") == SEES_TO_FAILURES for step in app.steps["consumer"])
    heeded = {"dead_letter"} if keeps_failures else set()
    found = [
        f"{name} ({', '.join(options)})"
        for name, task in sorted(app.tasks.items())
        if (options := [each for each in _given(type(task)) if each not in heeded])
    ]
    if app.conf.get(SETTING) and not keeps_failures:
        found.append(f"the setting {SETTING}")
    return found


def _given(task: type) -> Iterator[str]:
    """Options that a task's class has, and none of its bases is for."""
    ours = [base for base in task.__mro__ if base.__module__.startswith(PACKAGE)]
    for name in OPTIONS:
        value = inspect.getattr_static(task, name, None)
        # An application may have a ``backoff`` of its own, which is no name of a schedule.
        if value is None or (name == "backoff" and not isinstance(value, str)):
            continue
        if not any(name in vars(base) for base in ours):
            yield name


def warn(app: Any) -> None:
    """In the log of a worker that starts."""
    found = without_effect(app)
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        logger.warning(
            "Options of celery-fdb without effect: %s%s. Call celery_fdb.install(app) right after Celery(...).",
            ", ".join(found[:5]),
            more,
        )
