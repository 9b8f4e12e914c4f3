"""Remote control that also reaches tasks that no worker holds: ``revoke`` deletes a waiting task from the store.

Celery's own ``revoke`` tells the running workers; they remember the id, and drop the task when it reaches them. A
worker that starts later, or restarts, knows nothing of it, and an ETA task stays in its queue for days. Here one
transaction deletes the task's messages that no worker holds: ready, delayed or dead ones. The task's result becomes
``REVOKED``, and its chord fails as if Celery's worker had done it (:mod:`celery_fdb.tasks.revoking`). Then the workers
are told as usual, for an attempt that is already running.

Turn it on with ``Celery(control="celery_fdb.control:Control")`` or ``celery_fdb.install(app)``. With another broker it
does what Celery's does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from celery.app.control import Control as CeleryControl

from celery_fdb.tasks.revoking import tell
from kombu_fdb import Broker
from kombu_fdb.transport.channel import Channel
from kombu_fdb.transport.errors import operational_errors


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
        with operational_errors():
            taken = broker.cancel(task_id)
        if taken:
            tell(self.app, taken[0])
        return len(taken)

    def revoke(self, task_id: str | list[str], destination: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As Celery's, after :meth:`cancel`; if it is for certain workers only, the store is left alone."""
        if destination is None:
            self.cancel(task_id, kwargs.get("connection"))
        return super().revoke(task_id, destination, *args, **kwargs)
