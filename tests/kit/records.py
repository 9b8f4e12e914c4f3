"""Records as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kombu_fdb.keyspace.codec import Record, chunks_of
from kombu_fdb.model import Death

__all__ = ["record_of"]


def record_of(
    message_id: bytes,
    payload: bytes,
    *,
    published_ms: int,
    expires_ms: int,
    redeliveries: int = 0,
    deaths: Sequence[Death] = (),
    **more: Any,
) -> Record:
    """The record of a message with this payload."""
    chunks, size = len(chunks_of(payload)), len(payload)
    return Record(message_id, published_ms, expires_ms, redeliveries, chunks, size, payload, tuple(deaths), **more)
