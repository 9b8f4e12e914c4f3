"""Policy: what a namespace does with messages that can't be handled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """Sizes in bytes, times in milliseconds."""

    max_message_size: int = 8 * 1024 * 1024
    #: How often a message may come back from a consumer before it is dead-lettered; None for ever.
    delivery_limit: int | None = 20
    #: Whether rejected messages of a queue without a dead-letter exchange are kept in ``<queue>.dead``.
    keep_dead: bool = True
    dead_ttl_ms: int = 14 * 24 * 3600 * 1000
    #: How many of them ``<queue>.dead`` keeps, the newest.
    dead_length: int = 10_000
