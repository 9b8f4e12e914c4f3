"""The Celery task that runs tasks of ``django.tasks``; their backend is ``backend.py``.

Celery's ``autodiscover_tasks`` finds this module by its name, as that of any installed app; so it must import with a
Django that has no ``django.tasks`` yet.

A task's function is looked up by its path among those that this process has registered (``backend.py``), and gets
arguments that went through JSON. It may run more than once, as any task of Celery with ``acks_late``. A message that
names anything else is rejected into the dead letters, from where it can be replayed to a worker that knows the task;
its result is a failure.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from celery import Task, shared_task

from celery_fdb.contrib.django import conf


@shared_task(bind=True, name=conf.RUN, acks_late=True, typing=False)
def run(self: Task, path: str, args: list[Any], kwargs: dict[str, Any], alias: str, enqueued_at: str) -> dict[str, Any]:
    """Run a Django task. Returns what ``backend.py`` reads a result from. Raises what the task raises.

    Raises ``Reject`` for a task that is not registered.
    """
    from celery_fdb.contrib.django.backend import execute

    started_at = datetime.now(UTC)
    value = execute(
        path,
        args,
        kwargs,
        alias=alias,
        result_id=self.request.id,
        enqueued_at=datetime.fromisoformat(enqueued_at),
        started_at=started_at,
        worker=str(self.request.hostname),
        attempts=self.request.retries + 1,
    )
    return {"return_value": value, "started_at": started_at.isoformat()}
