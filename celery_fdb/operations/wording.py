"""How outcomes tell of messages."""

from __future__ import annotations

from collections.abc import Sequence

from celery_fdb.operations.deed import Outcome, Request
from kombu_fdb import Spot
from kombu_fdb.primitives.plural import plural

__all__ = ["names", "outcome"]


def outcome(text: str, missed: int) -> Outcome:
    """With a sentence about those that were missed."""
    if missed:
        text += f" Left alone: {plural(missed, 'message')} that had moved meanwhile."
    return Outcome(text, missed)


def names(request: Request, spots: Sequence[Spot]) -> str:
    """A colon and what people call them; nothing for none."""
    found = [request.names.get(each.message_id) or each.message_id.hex() for each in spots]
    return f": {', '.join(found)}" if found else ""
