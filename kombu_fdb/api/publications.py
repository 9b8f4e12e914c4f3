"""What ``put`` is given, as the engine takes it: checked at once, in its units."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kombu_fdb.api.job import due_at
from kombu_fdb.engine.messages.publish import BATCH_BYTES, BATCH_MESSAGES
from kombu_fdb.errors import InvalidArgument
from kombu_fdb.model import NO_PRIORITY, URGENT, Publication
from kombu_fdb.primitives.clock import random_id
from kombu_fdb.primitives.ranges import is_number, milliseconds, utf8, utf8_bytes
from kombu_fdb.settings.options import Options

__all__ = ["parts", "positive_ms", "publication"]


def publication(
    options: Options,
    queue: str,
    payload: bytes | str,
    *,
    key: str,
    priority: int | None,
    delay: float,
    ttl: float | None,
    ttr: float | None,
) -> Publication:
    """Raises ``InvalidArgument``."""
    utf8_bytes("key", key)
    return Publication(
        "",
        queue,
        _bytes(payload),
        priority=_priority(options, priority),
        due_ms=due_at(delay),
        ttl_ms=None if ttl is None else positive_ms("ttl", ttl),
        key=key,
        ttr_ms=0 if ttr is None else positive_ms("ttr", ttr),
        message_id=random_id(),
    )


def _priority(options: Options, given: int | None) -> int:
    zero_first = options.priority_order == "redis"
    priority = 0 if given is None else given
    if priority not in range(NO_PRIORITY, URGENT + 1):
        raise InvalidArgument("priority must be 0 to 9", given=given)
    return URGENT - priority if zero_first else priority


def _bytes(payload: bytes | str) -> bytes:
    if isinstance(payload, str):
        return utf8("payload", payload)
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        given = type(payload).__name__
        raise InvalidArgument("a payload is bytes or a string", given=given, fix="Try json.dumps(payload).")
    return bytes(payload)


def positive_ms(name: str, seconds: float) -> int:
    """Rounded up to whole milliseconds. Raises ``InvalidArgument``."""
    if not is_number(seconds, 0, math.inf) or seconds == 0:
        raise InvalidArgument(f"{name} must be more than 0 seconds", given=seconds)
    return milliseconds(name, seconds)


def parts(publications: Sequence[Publication]) -> Iterator[list[Publication]]:
    """In the same order, each as many as one transaction holds."""
    part: list[Publication] = []
    size = 0
    for each in publications:
        if part and (len(part) == BATCH_MESSAGES or size + len(each.payload) > BATCH_BYTES):
            yield part
            part, size = [], 0
        part.append(each)
        size += len(each.payload)
    if part:
        yield part
