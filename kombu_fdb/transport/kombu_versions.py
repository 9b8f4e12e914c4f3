"""What kombu has since 5.7 and we need with 5.5 and 5.6 too: ``Producer.batch()`` and its error.

A newer kombu's producer keeps the batch, a thread at a time, and asks the channel for it. An older one knows none and
calls ``basic_publish`` for each message, so there the channel keeps it (``transport/older_kombu.py``). The difference:
all that the thread publishes on this channel meanwhile is part of the batch, with whichever producer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from kombu.exceptions import KombuError
from kombu.messaging import Producer

__all__ = ["KOMBU_HAS_BATCHES", "BatchPublishError", "batched"]

try:
    from kombu.exceptions import BatchPublishError
except ImportError:

    class BatchPublishError(KombuError):  # type: ignore[no-redef]  # kombu before 5.7 has none
        """Batch publication failed with an uncertain delivery outcome."""


KOMBU_HAS_BATCHES = hasattr(Producer, "batch")
#: As in kombu.
DEFAULT_BATCH_SIZE = 1000


def batched(producer: Any, max_size: int = DEFAULT_BATCH_SIZE) -> AbstractContextManager[Any]:
    """``producer.batch(max_size)``, with any kombu. A broker that has no batches publishes each message at once."""
    if hasattr(producer, "batch"):
        context: AbstractContextManager[Any] = producer.batch(max_size=max_size)
        return context
    return _batched_by_channel(producer, max_size)


@contextmanager
def _batched_by_channel(producer: Any, max_size: int) -> Iterator[Any]:
    batched_by = getattr(producer.channel, "batched", None)
    if batched_by is None:
        yield None
        return
    with batched_by(max_size) as batch:
        yield batch
