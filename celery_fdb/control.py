"""Remote control that also acts on what no worker has: ``revoke`` takes a waiting task out of the store.

Celery's own ``revoke`` tells the workers that are there; they remember the id, and drop the task when it reaches them.
A worker that starts later, or restarts, knows nothing of it, and an ETA task stays in its queue for days. Here the
task's messages that nobody holds, be they ready, delayed or dead, are deleted in one transaction, and the task's result
becomes ``REVOKED``, with a chord told as Celery's worker tells it (:mod:`celery_fdb.tasks.revoking`). Then the
workers are told as ever: for the attempt that runs.

In use after ``Celery(control="celery_fdb.control:Control")``, or ``celery_fdb.install(app)``; with another broker it is
Celery's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from celery.app.control import Control as CeleryControl

from celery_fdb.tasks.revoking import tell
from kombu_fdb import Broker
from kombu_fdb.transport.channel import Channel

__all__ = ["Control"]


class Control(CeleryControl):
    """``app.control``."""

    def cancel(self, task_id: str | Iterable[str], connection: Any = None) -> int:
        """Delete what waits of the task (or tasks) and mark it as revoked. Returns how many messages were deleted.

        0 if it is unknown, done, or held by a worker. Raises ``kombu.exceptions.OperationalError`` if the store does
        not answer, :class:`~celery_fdb.tasks.revoking.NotTold` if the result backend does not after the deletion.
        With a broker that is not ours there is nothing to delete.
        """
        wanted = [task_id] if isinstance(task_id, str) else list(task_id)
        with self.app.connection_or_acquire(connection) as connected:
            channel = connected.default_channel
            if not isinstance(channel, Channel):
                return 0
            broker = Broker.of(channel.client)
            return sum(self._cancel(broker, each) for each in wanted)

    def _cancel(self, broker: Broker, task_id: str) -> int:
        taken = broker.cancel(task_id)
        if taken:
            tell(self.app, taken[0])
        return len(taken)

    def revoke(self, task_id: str | list[str], destination: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As Celery's, after :meth:`cancel`; if it is for certain workers only, the store is left alone."""
        if destination is None:
            self.cancel(task_id, kwargs.get("connection"))
        return super().revoke(task_id, destination, *args, **kwargs)
