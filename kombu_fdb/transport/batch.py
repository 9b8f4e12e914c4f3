"""Batches: what ``Producer.batch()`` publishes in one transaction.

Model. A batch is *open* until a flush fails (*failed*) or its context ends with an exception (*aborted*) or normally
(*closed*); only an open batch accepts messages. A flush publishes all buffered messages in their order, in as few
transactions as the store's limits allow: usually one, so all or none of them. When a flush fails, the transactions
before the failed one are stored; the failed one may be stored only if the cause of the ``BatchPublishError`` is
``CommitUnknown``. By kombu's contract, the caller does not retry.

:func:`batched_atomically` and :func:`batched_into` choose two other kinds of batch: the first is one transaction, or an
error before anything is stored; the second writes into the caller's transaction and does not commit.

Kombu has had batches since 5.7. From then on, the producer keeps the batch, one per thread, and gets it from the
channel. An older producer has no batches, and calls ``basic_publish`` for each message, so there the channel keeps the
batch (:class:`BatchKeepingChannel`). The difference: then everything that the thread publishes on this channel during
the batch is part of it, whichever producer it uses.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from kombu.exceptions import KombuError
from kombu.messaging import Producer

from kombu_fdb.engine.messages.publish import BATCH_BYTES, BATCH_MESSAGES, split_batch, weight
from kombu_fdb.errors import ExchangeNotFound, KombuFDBError, LimitExceeded, OptionError
from kombu_fdb.model import Publication
from kombu_fdb.store.protocol import Transaction
from kombu_fdb.transport.channel import Channel
from kombu_fdb.transport.envelope import now_ms
from kombu_fdb.transport.errors import raise_as_amqp

try:
    from kombu.exceptions import BatchPublishError as BatchPublishError
except ImportError:

    class BatchPublishError(KombuError):  # type: ignore[no-redef]  # kombu before 5.7 has none
        """Batch publication failed with an uncertain delivery outcome."""


KOMBU_HAS_BATCHES = hasattr(Producer, "batch")
#: The default of kombu.
DEFAULT_BATCH_SIZE = 1000


def batched(producer: Any, max_size: int = DEFAULT_BATCH_SIZE) -> AbstractContextManager[Any]:
    """``producer.batch(max_size)``, with any kombu. A broker that has no batches publishes each message at once."""
    make = getattr(producer, "batch", None) or getattr(producer.channel, "batched", None)
    context: AbstractContextManager[Any] = nullcontext() if make is None else make(max_size)
    return context


# -- the batch ---------------------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    publication: Publication
    message: dict[str, Any]
    mandatory: bool
    copies: int

    def weight(self) -> tuple[int, int]:
        """Messages and bytes."""
        _, size = weight(self.publication)
        return self.copies, self.copies * size


#: How many messages a caller's transaction already has; kept across its retries, which is harmless.
_stamped: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class PublishBatch:
    """The batch of one outermost ``with producer.batch()``. Used by one thread.

    ``atomic``: all in one transaction when its context ends, whatever ``max_size`` says. ``joined``: the caller's
    transaction, and its wrapper for the engine: the messages are stored if and when the caller commits. FoundationDB's
    errors pass through unchanged, for the caller's retry loop.
    """

    def __init__(
        self, channel: Channel, max_size: int, *, atomic: bool = False, joined: tuple[Any, Transaction] | None = None
    ) -> None:
        self.channel = channel
        self.max_size = max_size
        self._atomic = atomic
        self._joined = joined
        self._entries: list[_Entry] = []
        self._copies = 0
        self._routes: dict[tuple[str, str], int] = {}
        self._unusable: str | None = None
        self._cause: BaseException | None = None

    def publish(
        self,
        message: dict[str, Any],
        exchange: str = "",
        routing_key: str = "",
        mandatory: bool = False,
        **kwargs: Any,
    ) -> None:
        """Buffer a message; flush at ``max_size`` buffered copies. Raises 406 for a message over the maximum."""
        self._check_usable()
        publication = self.channel.encode(message, exchange or "", routing_key or "", now_ms())
        self._check(publication)
        entry = _Entry(publication, message, mandatory, self._count_copies(exchange, routing_key))
        if self._entries and self._copies + entry.copies > self.max_size:
            self.flush()
        self._entries.append(entry)
        self._copies += entry.copies
        if self._copies >= self.max_size:
            self.flush()

    def _check(self, publication: Publication) -> None:
        """Check a message now, not in the flush, so that a bad one does not fail the others."""
        try:
            self.channel.engine.publisher.check(publication)
        except KombuFDBError as error:
            raise_as_amqp(error, "basic_publish")
            raise

    def _count_copies(self, exchange: str, routing_key: str) -> int:
        """Kombu counts operations: a fanout to n queues is n. Routes are looked up once per batch."""
        if not exchange:
            return 1
        key = exchange, routing_key
        if key not in self._routes:
            try:
                self._routes[key] = max(1, len(self.channel.engine.inspect.route(exchange, routing_key)))
            except KombuFDBError as error:
                self.channel.raise_unpublished(error)
                raise
        return self._routes[key]

    def flush(self) -> None:
        """Publish what is buffered. Raises ``BatchPublishError``; then the batch can no longer be used.

        Raises ``LimitExceeded``, with nothing stored, if it is atomic and does not fit into one transaction.
        """
        transactions = sum(1 for _ in split_batch(self._entries, _Entry.weight)) if self._atomic else 1
        if transactions > 1:
            raise LimitExceeded(
                "the messages do not fit into one transaction",
                messages=self._copies,
                transactions=transactions,
                fix=f"It holds {BATCH_MESSAGES:,} messages with {BATCH_BYTES:,} bytes in all: publish fewer at a time.",
            )
        self._check_usable()
        entries, self._entries, self._copies = self._entries, [], 0
        stored = 0
        for part in split_batch(entries, _Entry.weight):
            try:
                reached = self._store([entry.publication for entry in part])
            except KombuFDBError as error:
                if isinstance(error, ExchangeNotFound):
                    self.channel.transport.forget_declared(error.exchange)
                self._cause = error
                self._unusable = f"{stored} of {len(entries)} messages were published before the batch failed: {error}"
                raise BatchPublishError(self._unusable) from error
            stored += len(part)
            for entry, queues in zip(part, reached, strict=True):
                if not queues:
                    self.channel.on_unroutable(entry.message, entry.publication, entry.mandatory)

    def _store(self, publications: Sequence[Publication]) -> list[list[str]]:
        publisher = self.channel.engine.publisher
        if self._joined is None:
            return publisher.publish(publications)
        tr, transaction = self._joined
        reached, _stamped[tr] = publisher.publish_in(transaction, publications, stamped=_stamped.get(tr, 0))
        return reached

    @property
    def aborted(self) -> bool:
        """Whether it was discarded; a failed batch was not."""
        return self._unusable is not None and self._cause is None

    def discard(self) -> None:
        """Forget what is buffered."""
        self._entries.clear()
        self._unusable = self._unusable or "the batch was aborted"

    def close(self) -> None:
        """Forget what is buffered, for good."""
        self.discard()

    def _check_usable(self) -> None:
        if self._cause is not None:
            raise BatchPublishError(self._unusable) from self._cause
        if self._unusable is not None:
            raise RuntimeError(self._unusable)


# -- the channel's part ------------------------------------------------------------------------------------------------


class _SizeOfKind(int):
    """A ``max_size`` that says which kind of batch to make: kombu passes only this from ``batch()`` to the channel."""

    kind: Callable[[Channel, int], PublishBatch]


class BatchingChannel(Channel):
    """A channel that makes batches for ``Producer.batch()``."""

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        """For ``Producer.batch()``."""
        kind = max_size.kind if isinstance(max_size, _SizeOfKind) else PublishBatch
        return kind(self, max_size)


class BatchKeepingChannel(BatchingChannel):
    """The channel for kombu before 5.7: it keeps the batches that a newer kombu's producer would keep.

    Model. A thread has one batch open, or none. The outermost ``batched`` opens it; nested ones join it. It is flushed
    when the outermost one ends, and discarded when any of them ends with an exception. Other threads on the same
    channel publish at once, and so does a flush itself.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Holds the ``batch`` that the thread has open. A dictionary by thread number could give it to a later thread.
        self.of_thread = threading.local()

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
        batch = getattr(self.of_thread, "batch", None)
        publish = super().basic_publish if batch is None else batch.publish
        publish(message, exchange, routing_key, mandatory, immediate=immediate, timeout=timeout, **kwargs)

    @contextmanager
    def batched(self, max_size: int) -> Iterator[PublishBatch]:
        """Store what this thread publishes when the outermost ``batched`` ends, or nothing after an exception."""
        outer: PublishBatch | None = getattr(self.of_thread, "batch", None)
        batch = self.of_thread.batch = outer or self.create_publish_batch(max_size)
        try:
            yield batch
        except BaseException:
            batch.discard()
            raise
        finally:
            self.of_thread.batch = outer
        if outer is None:
            try:
                if not batch.aborted:
                    batch.flush()
            finally:
                batch.close()


#: The channels that connections make, with the installed kombu.
CHANNEL = BatchingChannel if KOMBU_HAS_BATCHES else BatchKeepingChannel


def batched_atomically(producer: Producer) -> AbstractContextManager[None]:
    """``with producer.batch()``, in one transaction: all or nothing.

    Raises ``OptionError`` within another batch, or for other brokers.
    """
    return _batched_as(producer, partial(PublishBatch, atomic=True))


def batched_into(producer: Producer, tr: Any) -> AbstractContextManager[None]:
    """``with producer.batch()``, in ``tr``, the caller's transaction.

    Raises ``OptionError`` if ``tr`` is not on the broker's cluster, within another batch, or for other brokers.
    """

    def join(channel: Channel, max_size: int) -> PublishBatch:
        return PublishBatch(channel, max_size, atomic=True, joined=(tr, channel.transport.store.join(tr)))

    return _batched_as(producer, join)


@contextmanager
def _batched_as(producer: Producer, kind: Callable[[Channel, int], PublishBatch]) -> Iterator[None]:
    channel = producer.channel
    if not isinstance(channel, BatchingChannel):
        raise OptionError(
            "this broker has no transactions",
            transport=producer.connection.transport.driver_name,
            fix="Set broker_url to fdb:// or fdb+sqlite://.",
        )
    ours = getattr(channel.of_thread, "batch", None) if isinstance(channel, BatchKeepingChannel) else None
    if ours or getattr(getattr(producer, "_batch_local", None), "current", None):  # kombu's, since 5.7
        raise OptionError(
            "this thread has a batch open, which would take the messages",
            fix="Pass a producer of another connection, or publish before or after that batch.",
        )
    size = _SizeOfKind(sys.maxsize)
    size.kind = kind
    with batched(producer, size):
        yield
