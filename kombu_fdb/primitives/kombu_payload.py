"""What stands in front of a kombu message's body.

A payload is ``version (1 byte), length of meta (4 bytes), meta (JSON list), body``.
``transport/envelope.py`` reads and writes all of it; tools that look into queues only need the task.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from kombu_fdb.model import Way

#: The header of a task that waits to be retried: its failed attempts, with time and error
#: (``celery_fdb/tasks/failures.py``).
ATTEMPTS = "fdb_attempts"

#: An older process that meets another number dead-letters the message: a change of this number raises the record's as
#: well (``keyspace/codec.py``), so that the message is kept for a newer process.
VERSION = 1
HEAD = struct.Struct(">BI")
#: Where it stands in meta: content type, content encoding, headers, properties, exchange, routing key.
_HEADERS = 2
_EXCHANGE = 4


def headers_of(payload: bytes) -> dict[str, Any]:
    """The headers of a kombu message; empty if the payload is no such message."""
    meta = _meta(payload)
    headers = meta[_HEADERS] if len(meta) > _HEADERS else None
    return headers if isinstance(headers, dict) else {}


def published_by(payload: bytes) -> Way | None:
    """Exchange and routing key of a kombu message; None if the payload is no such message."""
    way = _meta(payload)[_EXCHANGE:]
    return Way(*way) if [type(each) for each in way] == [str, str] else None


def _meta(payload: bytes) -> list[Any]:
    """Empty if the payload is no kombu message."""
    try:
        version, length = HEAD.unpack_from(payload)
        meta = json.loads(payload[HEAD.size : HEAD.size + length]) if version == VERSION else []
    except (struct.error, ValueError, RecursionError):
        return []
    return meta if isinstance(meta, list) else []
