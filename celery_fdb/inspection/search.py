"""Search: a page of the messages that a filter lets pass, at a bounded cost, honest about how far it has looked.

A queue has no index of its tasks or errors, so a search looks through its messages in their order, in parts, until the
page is full or :data:`MOST_LOOKED_AT` were looked at. Then the page says so, and the next one goes on there: what it
costs does not depend on the queue.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from celery_fdb.inspection.filters import Filter
from kombu_fdb import Broker
from kombu_fdb.api.arguments import State
from kombu_fdb.model import Listed

#: Messages that one page of a search looks at, and of them in one transaction.
MOST_LOOKED_AT = 2_000
PART = 200


class Scope(NamedTuple):
    """Where a search looks: a queue's messages in a state, from the end with ``reverse``."""

    queue: str
    state: State = "ready"
    reverse: bool = False


class Found(NamedTuple):
    """Those that match, how many were looked at for them, and where the next page begins; None at the end."""

    messages: list[Listed]
    looked_at: int
    following: bytes | None


def search(
    broker: Broker, scope: Scope, wanted: Filter, limit: int, after: bytes = b"", most: int = sys.maxsize
) -> Found:
    """Up to ``limit`` messages behind ``after``, which a page before has told as ``following``.

    It looks at ``most`` messages or fewer.
    """
    key = _subqueue(broker, scope, wanted.key)
    matching: list[Listed] = []
    looked_at, following = 0, after or None
    for number in range(1 + MOST_LOOKED_AT // PART):
        size = min(PART if number else limit, most - looked_at)
        page = broker.queue(scope.queue).page(size, state=scope.state, after=following, key=key, reverse=scope.reverse)
        looked_at += len(page.messages)
        following = page.following
        matching += [each for each in page.messages if wanted.matches(each.message)]
        if len(matching) >= limit or following is None or looked_at >= most:
            break
    if len(matching) > limit:
        return Found(matching[:limit], looked_at, matching[limit - 1].position)
    return Found(matching, looked_at, following)


def _subqueue(broker: Broker, scope: Scope, key: str | None) -> str | None:
    """The key among whose messages alone they stand. Dead letters have a key, and stand among those without one."""
    if key is None or scope.state != "ready":
        return None
    found = broker.queue(scope.queue).keys(prefix=key, limit=1)
    return key if key in found and found[key].ready else None
