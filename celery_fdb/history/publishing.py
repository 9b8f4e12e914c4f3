"""When a task was published: a header of its message, as nothing else tells a worker when that was.

Which application publishes, its own ``AMQP`` knows, which makes the header; what a retry repeats of the attempt before
is laid over it, so its moment is that of the signal, which comes last.
"""

from __future__ import annotations

from typing import Any

from celery.app import amqp
from celery.signals import before_task_publish

from kombu_fdb.primitives.clock import SystemClock

#: In milliseconds since 1970, by the publisher's clock. A retry has its own.
PUBLISHED = "fdb_published"
CLOCK = SystemClock()


class AMQP(amqp.AMQP):
    """Of an application that keeps a history (``installing.py``)."""

    def as_task_v2(self, *args: Any, **kwargs: Any) -> Any:
        """Every message of a task is made here."""
        message = super().as_task_v2(*args, **kwargs)
        message.headers[PUBLISHED] = CLOCK.wall_ms()
        return message


@before_task_publish.connect(weak=False, dispatch_uid=__name__)
def _note(headers: Any = None, **_: Any) -> None:
    if isinstance(headers, dict) and PUBLISHED in headers:
        headers[PUBLISHED] = CLOCK.wall_ms()
