"""A broker as a test sees it: point an app at it, then look at what was published there.

Nothing here is a mock. Messages go through the transport into a store, and stay there until a worker takes them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple

from celery import Celery
from kombu.compression import decompress
from kombu.serialization import loads, prepare_accept_content

from celery_fdb import brokers
from celery_fdb.inspection import formats
from celery_fdb.inspection.overview import STATES
from kombu_fdb import Broker
from kombu_fdb.errors import FormatError, OptionError
from kombu_fdb.model import Peeked, is_internal
from kombu_fdb.transport.envelope import open_peeked

URL_VARIABLES = ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL")


class Published(NamedTuple):
    """A message in the store.

    ``task``: the task's name, "" if it is not a task. ``state``: ready, delayed or leased. ``key``: its fairness key.
    """

    task: str
    queue: str
    state: str
    key: str
    headers: dict[str, Any]
    properties: dict[str, Any]
    body: bytes
    content_type: str
    content_encoding: str

    @property
    def eta(self) -> datetime | None:
        """When the task is due, with its time zone."""
        text = self.headers.get("eta")
        return None if text is None else formats.read(text)

    @property
    def args(self) -> list[Any]:
        return list(self.content()[0])

    @property
    def kwargs(self) -> dict[str, Any]:
        return dict(self.content()[1])

    def content(self, accept: tuple[str, ...] = ("json",)) -> Any:
        """The decoded body; of a task ``[args, kwargs, embed]``.

        Raises kombu's ``ContentDisallowed`` for another serializer than those in ``accept``.
        """
        compression = self.headers.get("compression")
        body = decompress(self.body, compression) if compression else self.body
        return loads(body, self.content_type, self.content_encoding, accept=prepare_accept_content(accept))


class BrokerInTest:
    """A broker of a test: its URL, and the messages behind it."""

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url
        self.options = {"session_ttl": 5.0, **options}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {brokers.location_of(self.url, self.options)}>"

    @property
    def config(self) -> dict[str, Any]:
        """Settings for a Celery app, for instance in a ``celery_config`` fixture."""
        return {"broker_url": self.url, "broker_transport_options": dict(self.options)}

    @contextmanager
    def use(self, app: Celery) -> Iterator[None]:
        """Have ``app`` publish and consume here. Raises ``OptionError`` if the environment names another broker."""
        _refuse_environment()
        settings = {**self.config, "broker_read_url": None, "broker_write_url": None, "task_always_eager": False}
        before = {name: app.conf[name] for name in settings}
        app.conf.update(settings)
        _forget_connections(app)
        try:
            yield
        finally:
            app.conf.update(before)
            _forget_connections(app)

    def published(self, queue: str | None = None) -> list[Published]:
        """Every message that waits or is held, of one queue or of all but Celery's own.

        Of each queue first the ready ones, those of one key in their order, then the delayed, then the leased.
        """
        with Broker.open(self.url, **self.options) as broker:
            names = [queue] if queue else [name for name in broker.queues() if not is_internal(name)]
            return [
                _published(peeked) for name in names for state in STATES for peeked in broker.queue(name).each(state)
            ]


def _refuse_environment() -> None:
    named = [name for name in URL_VARIABLES if os.environ.get(name)]
    if named:
        raise OptionError(
            "the environment decides which broker Celery uses", name=named[0], fix=f"Unset {named[0]} for the tests."
        )


def _forget_connections(app: Celery) -> None:
    """Have the app make its pools anew, with the current settings, as Celery does after a fork; and Django's pages."""
    pool = app.__dict__.get("_pool")
    if pool is not None:
        pool.force_close_all()
    app._after_fork()
    if django := sys.modules.get("celery_fdb.contrib.django.conf"):
        django.lazy_broker.close()


def _published(peeked: Peeked) -> Published:
    try:
        message = open_peeked(peeked)
    except FormatError:  # bytes that ``Broker.queue(...).put`` has stored
        message = {"headers": {}, "properties": {}, "body": peeked.payload, "content-type": "", "content-encoding": ""}
    headers = message["headers"]
    return Published(
        str(headers.get("task") or ""),
        peeked.queue,
        peeked.state,
        peeked.key,
        headers,
        message["properties"],
        message["body"],
        message["content-type"] or "application/data",
        message["content-encoding"] or "binary",
    )
