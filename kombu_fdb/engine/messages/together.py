"""Gathering what one thread publishes, so that it is stored in one transaction with something else.

Model. A block *gathers* from its begin to its end, for one engine and one thread or greenlet. Meanwhile what it
publishes is only checked; at the end the engine stores all of it. If the block ends by an exception it is forgotten.
A block inside of a block gathers for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from kombu_fdb.engine.messages.publish import BATCH_BYTES, BATCH_MESSAGES
from kombu_fdb.model import Publication

#: What a message takes beside its payload: keys, record head, conflict ranges.
OVERHEAD_BYTES = 300

_current: ContextVar[tuple[object, list[Publication]] | None] = ContextVar("kombu_fdb_gathering", default=None)


@contextmanager
def gathering(engine: object) -> Iterator[list[Publication]]:
    """Gather what is published through ``engine``."""
    gathered: list[Publication] = []
    token = _current.set((engine, gathered))
    try:
        yield gathered
    finally:
        _current.reset(token)


def gather(engine: object, publications: Sequence[Publication]) -> bool:
    """Keep these for the end of the block. False outside of one."""
    current = _current.get()
    if current is None or current[0] is not engine:
        return False
    current[1].extend(publications)
    return True


def parts(publications: Sequence[Publication]) -> list[list[Publication]]:
    """Consecutive parts that one transaction holds; at least one, which may be empty."""
    found: list[list[Publication]] = [[]]
    size = 0
    for publication in publications:
        added = len(publication.payload) + OVERHEAD_BYTES
        if found[-1] and (size + added > BATCH_BYTES or len(found[-1]) >= BATCH_MESSAGES):
            found.append([])
            size = 0
        found[-1].append(publication)
        size += added
    return found
