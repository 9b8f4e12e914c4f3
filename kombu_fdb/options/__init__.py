"""What the user says: where the store is (the URL), and how to use it (``broker_transport_options``).

Parsed once, here; below there are only typed, valid values. Whatever can be wrong is an
:exc:`~kombu_fdb.errors.OptionError`, with the next step in its ``fix``.
"""

from __future__ import annotations

from kombu_fdb.options.location import (
    SCHEMES,
    ClusterLocation,
    Location,
    SqliteLocation,
    UrlParts,
    default_cluster_file,
    default_sqlite_path,
    is_connection_string,
    locate,
    parse_url,
)
from kombu_fdb.options.settings import Options, options_table, parse_options

__all__ = [
    "SCHEMES",
    "ClusterLocation",
    "Location",
    "Options",
    "SqliteLocation",
    "UrlParts",
    "default_cluster_file",
    "default_sqlite_path",
    "is_connection_string",
    "locate",
    "options_table",
    "parse_options",
    "parse_url",
]
