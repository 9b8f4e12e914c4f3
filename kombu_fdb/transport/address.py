"""From kombu's connection parameters to a store's location."""

from __future__ import annotations

from kombu.connection import Connection

from kombu_fdb.settings.location import MEMORY_SCHEME, SCHEMES, Location, UrlParts, locate, parse_url
from kombu_fdb.settings.options import Options


def location_of(connection: Connection, options: Options) -> Location:
    """Where the URL points to. Raises ``OptionError``.

    Kombu hands ``fdb+sqlite:///path`` over in two forms: at first as transport "fdb" and hostname "sqlite:///path",
    after a failover taken apart, as transport "fdb+sqlite" without a host. A clone of that has the hostname "fdb+None".
    """
    hostname = connection.hostname
    prefix = f"{connection.uri_prefix}+" if connection.uri_prefix else None
    if hostname and "://" in hostname:
        return locate(parse_url(f"{prefix or 'fdb+'}{hostname}"), options)
    if hostname and prefix and hostname.startswith(prefix):
        hostname = None
    scheme = connection.transport_cls if connection.transport_cls in {*SCHEMES, MEMORY_SCHEME} else SCHEMES[0]
    parts = UrlParts(scheme, hostname, connection.port, connection.userid, connection.password, connection.virtual_host)
    return locate(parts, options)
