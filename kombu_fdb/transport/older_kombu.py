"""The channel for a kombu before 5.7: it keeps the batches that a newer kombu's producer would.

Model. A thread has one batch open, or none. The outermost ``batched`` opens it; those within are part of it. It is
flushed when the outermost one ends, and discarded when any of them ends by an exception. Other threads on the same
channel publish at once, and so does what a flush itself publishes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kombu_fdb.transport.batch import PublishBatch
from kombu_fdb.transport.channel import Channel, Connecting


class BatchingChannel(Channel):
    """Publishes into its thread's batch, if there is one."""

    def __init__(self, connection: Connecting, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self._threads = threading.local()

    @property
    def _batch(self) -> PublishBatch | None:
        return getattr(self._threads, "batch", None)

    def basic_publish(
        self,
        message: Any,
        exchange: str = "",
        routing_key: str = "",
        mandatory: bool = False,
        immediate: bool = False,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        batch = self._batch
        publish = super().basic_publish if batch is None else batch.publish
        publish(message, exchange, routing_key, mandatory, immediate=immediate, timeout=timeout, **kwargs)

    @contextmanager
    def batched(self, max_size: int) -> Iterator[PublishBatch]:
        """What this thread publishes is stored when the outermost of these ends, or not at all after an exception."""
        outer = self._batch
        with self._outermost(max_size) if outer is None else _within(outer) as batch:
            yield batch

    @contextmanager
    def _outermost(self, max_size: int) -> Iterator[PublishBatch]:
        batch = self._threads.batch = self.create_publish_batch(max_size)
        try:
            try:
                yield batch
            finally:
                self._threads.batch = None
            if not batch.aborted:
                batch.flush()
        finally:
            batch.close()


@contextmanager
def _within(outer: PublishBatch) -> Iterator[PublishBatch]:
    try:
        yield outer
    except BaseException:
        outer.discard()
        raise
