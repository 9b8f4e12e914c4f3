"""A row's signature in JSON, and its messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from celery import Celery
from celery.canvas import Signature
from kombu.exceptions import OperationalError
from kombu.utils.json import dumps, loads

from celery_fdb.contrib.outbox.rows import Row
from celery_fdb.tasks.publishing import everywhere
from kombu_fdb.engine.messages.publish import BATCH_MESSAGES
from kombu_fdb.transport.kombu_versions import batched

#: How long the store remembers a row's messages, in seconds.
DEDUP_WINDOW_S = 7 * 86_400.0


def written(signature: Signature, now_ms: int) -> str:
    """The signature in JSON. ``countdown`` and ``expires`` in seconds become moments, counted from ``now_ms``.

    Raises ``TypeError`` for arguments that are not JSON.
    """
    text = dumps(signature)
    content = loads(text)
    _anchor(content, datetime.fromtimestamp(now_ms / 1000, UTC))
    return str(dumps(content))


def _anchor(signature: dict[str, Any], now: datetime) -> None:
    """In a canvas, anchor also what is published with it, but not what workers publish later."""
    options = signature.get("options") or {}
    if (countdown := options.pop("countdown", None)) is not None:
        options["eta"] = now + timedelta(seconds=countdown)
    if isinstance(options.get("expires"), (int, float)):
        options["expires"] = now + timedelta(seconds=options["expires"])
    for part in _first_parts(signature):
        _anchor(part, now)


def _first_parts(signature: dict[str, Any]) -> Iterable[dict[str, Any]]:
    kwargs = signature.get("kwargs") or {}
    kind, tasks = signature.get("subtask_type"), list(kwargs.get("tasks") or ())
    if kind == "chord":
        header = kwargs.get("header") or ()
        return [header] if isinstance(header, dict) else list(header)
    return tasks[:1] if kind == "chain" else tasks


def send(app: Celery, rows: Iterable[Row]) -> None:
    """Publish in as few transactions as there can be: none, if building a message fails.

    Raises whatever building and publishing raise; :func:`is_brokers` tells them apart.
    """
    if app.conf.task_always_eager:
        for row in rows:
            _signature(app, row).apply_async()
        return
    with app.producer_pool.acquire(block=True) as producer, batched(producer, BATCH_MESSAGES):
        for row in rows:
            with _once(app, producer, row.id) as once:
                _signature(app, row).apply_async(producer=once)


def _signature(app: Celery, row: Row) -> Signature:
    return Signature.from_dict(loads(row.signature), app=app)


def is_brokers(app: Celery, error: BaseException) -> bool:
    """Whether the broker did not answer: no row's fault."""
    with app.connection_for_write() as connection:
        kinds = (OperationalError, *connection.recoverable_connection_errors)
    return isinstance(error, kinds) or isinstance(error.__cause__, kinds)


@contextmanager
def _once(app: Celery, producer: Any, row_id: str) -> Iterator[Any]:
    once = _Once(producer, row_id)
    with everywhere(app, once):
        yield once


class _Once:
    """A producer that gives each message an id made from its row's."""

    def __init__(self, producer: Any, row_id: str) -> None:
        self._producer = producer
        self._row_id = row_id
        self._published = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, headers: dict[str, Any] | None = None, **options: Any) -> Any:
        self._published += 1
        ids = {"once_id": f"outbox:{self._row_id}:{self._published}", "once_window": DEDUP_WINDOW_S}
        return self._producer.publish(body, headers={**(headers or {}), **ids}, **options)
