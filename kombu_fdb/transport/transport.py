"""The transport: what kombu and Celery read about it before they connect, and the channels that it makes.

Once they connect, the transport is the connection (``connection.py``).
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from kombu.connection import Connection
from kombu.transport import virtual

from kombu_fdb.routing.tables import EXCHANGE_TYPES
from kombu_fdb.transport.batch import CHANNEL
from kombu_fdb.transport.connection import BrokerConnection
from kombu_fdb.transport.errors import (
    CHANNEL_ERRORS,
    CONNECTION_ERRORS,
    RECOVERABLE_CONNECTION_ERRORS,
    ExchangeVanished,
)
from kombu_fdb.transport.worker import join_workers


class Transport(BrokerConnection):
    """``fdb://`` and ``fdb+sqlite://``."""

    Channel = CHANNEL
    driver_type = "fdb"
    driver_name = "celery-fdb"
    can_parse_url = False
    default_port = None
    #: A drain waits for messages; it does not poll.
    polling_interval = None  # type: ignore[assignment]  # kombu declares a narrower type than it accepts
    connection_errors = CONNECTION_ERRORS  # type: ignore[assignment]  # kombu declares a narrower type than it accepts
    channel_errors = CHANNEL_ERRORS  # type: ignore[assignment]  # kombu declares a narrower type than it accepts
    recoverable_connection_errors = RECOVERABLE_CONNECTION_ERRORS
    recoverable_channel_errors = (ExchangeVanished,)
    implements = virtual.Transport.implements.extend(
        asynchronous=True,
        batch_publish=True,
        exchange_type=EXCHANGE_TYPES,
        heartbeats=False,
    )

    def __init__(self, client: Connection, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.polling_interval = None
        #: Kombu reads this from the class to learn whether to parse URLs, and from the transport whether to format
        #: them.
        self.can_parse_url = True
        join_workers(self.driver_type)

    def driver_version(self) -> str:
        try:
            return metadata.version("celery-fdb")
        except metadata.PackageNotFoundError:  # a source tree on the path
            return "unknown"

    @property
    def default_connection_params(self) -> dict[str, Any]:
        """Empty, as no host is needed: kombu must not warn that it assumes one."""
        return {}

    def create_channel(self, connection: BrokerConnection) -> virtual.Channel:
        channel = self.Channel(connection)
        self.channels.append(channel)
        return channel
