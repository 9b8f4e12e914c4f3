"""Retries by a named schedule: ``backoff="processing-queue"`` waits 1, 5 and 25 minutes before the next attempts.

The names are those of :mod:`kombu_fdb.api.backoff`. A retried task waits in the store, not in a worker. If a task asks
for its own pause (``countdown``, ``eta``, or Celery's ``retry_backoff``), that one applies.
"""

from __future__ import annotations

from typing import Any

from kombu_fdb.api.backoff import seconds


def countdown(name: str, retries: int) -> float:
    """The pause before the next attempt of a task that was retried so often, in seconds. Raises ``OptionError``."""
    return seconds(name, retries + 1)


class Backoff:
    """Mixed into a task class: gives tasks the option ``backoff``, for ``self.retry()`` and ``autoretry_for``."""

    backoff: str | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Raises ``OptionError`` for an unknown schedule when the task is made, not when it first fails."""
        super().__init_subclass__(**options)
        if cls.backoff is not None:
            seconds(cls.backoff, 1)

    def retry(self, *args: Any, eta: Any = None, countdown: float | None = None, **options: Any) -> Any:
        """As Celery's; without ``eta`` and ``countdown`` after the schedule's pause."""
        if eta is None and countdown is None and self.backoff is not None:
            countdown = seconds(self.backoff, self.request.retries + 1)  # type: ignore[attr-defined]  # of the task
        return super().retry(*args, eta=eta, countdown=countdown, **options)  # type: ignore[misc]  # a mixin
