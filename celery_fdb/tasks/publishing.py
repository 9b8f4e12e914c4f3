"""Publish several tasks at once, or inside the application's own transaction.

Both build messages as ``apply_async`` does, with all its options, signals and routes, through one producer whose batch
(:mod:`kombu_fdb.transport.batch`) decides what becomes of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import repeat
from typing import Any

from celery import Celery, Task, current_app
from celery.canvas import Signature

from kombu_fdb.engine.messages.publish import BATCH_MESSAGES
from kombu_fdb.errors import KombuFDBError
from kombu_fdb.transport.batch import BatchPublishError, batched, batched_atomically, batched_into


def publish_many(
    signatures: Iterable[Signature], *, app: Celery | None = None, atomic: bool = False, producer: Any = None
) -> list[Any]:
    """Publish signatures (also groups, chains, chords) in as few transactions as there can be; their results, in order.

    One transaction holds up to 2,000 messages with a total of 4,000,000 bytes, and stores all of them or none. More
    messages are published in several such transactions. If one fails, ``kombu_fdb.transport.BatchPublishError``
    (that of kombu, since 5.7) says how many messages were stored before it, and its cause says why.

    ``atomic``: publish all in one transaction; if they don't fit, raise ``LimitExceeded`` and store nothing.
    ``publish_many([group(...)], atomic=True)`` is an atomic group: a worker sees all of its tasks or none.

    ``app``: the first signature's if not given. With another broker there are no transactions: the tasks are published
    one by one, and ``atomic`` raises ``OptionError``.
    """
    listed = list(signatures)
    if not listed:
        return []
    chosen = app or listed[0].app or current_app
    if chosen.conf.task_always_eager:
        return [each.apply_async() for each in listed]
    with chosen.producer_or_acquire(producer) as acquired:
        batch = batched_atomically(acquired) if atomic else batched(acquired, BATCH_MESSAGES)
        with batch, unrepeated(chosen, acquired) as once:
            return [each.apply_async(producer=once) for each in listed]


def enqueue(tr: Any, task: Task | Signature, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
    """Publish inside the caller's own FoundationDB transaction; returns the result, as ``apply_async`` does.

    ::

        @fdb.transactional
        def place(tr, order):
            tr[orders.pack((order.id,))] = order.pack()
            enqueue(tr, confirm, (order.id,))

        place(db, order)

    The order and its task are committed together, or neither is. ``task``: a task, or a signature, group, chain
    or chord without ``args``. ``options``: those of ``apply_async``, so delays, keys, priorities, queues and
    exchanges work.

    The transaction is the caller's: nothing is stored before it commits, its loop runs the function again after a
    conflict, and ``FDBError`` passes through. If the commit's result may be unknown and the function is not idempotent,
    pass a ``dedup_id``: within its window a second run stores nothing. A transaction holds 10,000,000 bytes.

    Raises ``OptionError`` if the broker is not on the cluster of ``tr``, or this thread has a batch open on
    ``producer``; else what publishing raises, with nothing stored. Celery's signal ``after_task_publish`` comes before
    the commit.
    """
    signature = task if isinstance(task, Signature) else task.signature(args or (), kwargs or {})
    if signature is task and (args or kwargs):
        signature = task.clone(args, kwargs)
    app = signature.app or current_app
    with (
        app.producer_or_acquire(options.pop("producer", None)) as producer,
        _the_reason(),
        batched_into(producer, tr),
        unrepeated(app, producer) as once,
    ):
        return signature.apply_async(**options, producer=once)


#: The producer that publishes a batch, by application: chains and chords don't hand on the one they are given.
_producers: ContextVar[dict[int, Any]] = ContextVar("_producers", default={})  # noqa: B039 - never changed in place


@contextmanager
def unrepeated(app: Celery, producer: Any, headers: Iterator[dict[str, Any]] | None = None) -> Iterator[Any]:
    """Send everything that this thread publishes with ``app`` through ``producer``, and repeat no publish.

    Gives the producer that does so. ``headers``: further ones of each message in turn.
    """
    if "producer_or_acquire" not in vars(app):
        _consult_producers(app)
    once = _Unrepeated(producer, headers or repeat({}))
    token = _producers.set({**_producers.get(), id(app): once})
    try:
        yield once
    finally:
        _producers.reset(token)


class _Unrepeated:
    """A producer that repeats no publish: a repetition gets another channel, which does not have the batch.

    Not an option of the signatures: it would go into a chord's messages, and the worker would not repeat its body.
    """

    def __init__(self, producer: Any, headers: Iterator[dict[str, Any]]) -> None:
        self._producer = producer
        self._headers = headers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, headers: dict[str, Any] | None = None, **options: Any) -> Any:
        if self.connection.transport.driver_type == "fdb":
            options["retry"] = False
        return self._producer.publish(body, headers={**(headers or {}), **next(self._headers)}, **options)


def _consult_producers(app: Celery) -> None:
    acquire = app.producer_or_acquire

    def producer_or_acquire(producer: Any = None) -> Any:
        return acquire(producer or _producers.get().get(id(app)))

    app.producer_or_acquire = producer_or_acquire


@contextmanager
def _the_reason() -> Iterator[None]:
    """Raise why a batch failed: where the caller commits, "0 of 3 messages were published before" says less."""
    try:
        yield
    except BatchPublishError as error:
        if isinstance(error.__cause__, KombuFDBError):
            raise error.__cause__ from None
        raise
