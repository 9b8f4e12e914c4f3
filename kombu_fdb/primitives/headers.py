"""What stands in front of a kombu message's body.

A payload is ``version (1 byte), length of meta (4 bytes), meta (JSON list), body``.
``transport/encoding/envelope.py`` reads and writes all of it; the queue's tools only want to know the task.
"""

from __future__ import annotations

import json
import struct
from typing import Any

__all__ = ["ATTEMPTS", "HEAD", "VERSION", "headers_of", "routing_key_of"]

#: Of a task that waits to be retried: its failed attempts, with time and error (``celery_fdb/tasks/failures.py``).
ATTEMPTS = "fdb_attempts"

#: An older process that meets another number dead-letters the message: one that is raised raises the record's as well
#: (``keyspace/codec.py``), by which the message is kept for who can read it.
VERSION = 1
HEAD = struct.Struct(">BI")
#: Where it stands in meta: content type, content encoding, headers, properties, exchange, routing key.
_HEADERS = 2
_ROUTING_KEY = 5


def headers_of(payload: bytes) -> dict[str, Any]:
    """The headers of a kombu message; empty if the payload is no such message."""
    headers = _meta(payload, _HEADERS)
    return headers if isinstance(headers, dict) else {}


def routing_key_of(payload: bytes) -> str:
    """With which a kombu message was published; "" if the payload is no such message."""
    routing_key = _meta(payload, _ROUTING_KEY)
    return routing_key if isinstance(routing_key, str) else ""


def _meta(payload: bytes, place: int) -> Any:
    try:
        version, length = HEAD.unpack_from(payload)
        return json.loads(payload[HEAD.size : HEAD.size + length])[place] if version == VERSION else None
    except (struct.error, ValueError, RecursionError, LookupError, TypeError):
        return None
