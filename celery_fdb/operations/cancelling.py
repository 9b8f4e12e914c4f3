"""Cancel: delete the messages that were selected, in any state, and tell whoever waits for their results."""

from __future__ import annotations

from collections.abc import Sequence

from celery_fdb.operations.deed import Outcome, Request
from celery_fdb.operations.wording import names, outcome
from celery_fdb.tasks.revoking import NotTold, tell
from kombu_fdb import Broker
from kombu_fdb.model import Peeked
from kombu_fdb.primitives.plural import plural

__all__ = ["cancel"]


def cancel(broker: Broker, request: Request) -> Outcome:
    queue = broker.queue(request.queue)
    seen = [(each, queue.at(each)) for each in request.spots]
    gone = [(spot, listed.message) for spot, listed in seen if listed is not None and queue.delete(spot)]
    done = f"Cancelled {plural(len(gone), 'message')} of {request.queue}"
    text = f"{done}{names(request, [spot for spot, _ in gone])}. {_tell(request, [each for _, each in gone])}"
    return outcome(text, len(request.spots) - len(gone))


def _tell(request: Request, gone: Sequence[Peeked]) -> str:
    """What is to be said of it."""
    if request.app is None:
        return request.untold
    failures = []
    for each in gone:
        try:
            tell(request.app, each)
        except NotTold as error:
            failures.append(f"{str(error).rstrip('.')}.")
    return " ".join(failures) or "Their results, if any, became REVOKED."
