"""Cancel: delete messages that were selected, or all in one state that match, and tell who waits for their results.

Those in a worker's hands are cancelled only if somebody has selected them.
"""

from __future__ import annotations

from collections.abc import Sequence

from celery_fdb.inspection.search import PART
from celery_fdb.operations.deed import Outcome, Request, names, outcome
from celery_fdb.operations.parts import in_parts
from celery_fdb.tasks.revoking import NotTold, tell
from kombu_fdb import Broker, Spot
from kombu_fdb.model import Part, Peeked
from kombu_fdb.primitives.plural import plural

__all__ = ["cancel", "cancel_all"]


def cancel(broker: Broker, request: Request) -> Outcome:
    """Those that are selected."""
    gone = _delete(broker, request)
    done = f"Cancelled {plural(len(gone), 'message')} of {request.queue}"
    text = f"{done}{names(request, [spot for spot, _ in gone])}. {_tell(request, [each for _, each in gone])}"
    return outcome(text, len(request.spots) - len(gone))


def cancel_all(broker: Broker, request: Request) -> Outcome:
    """All that match, of the ready or, with the field ``state``, of the delayed ones."""
    wanted, queue = request.filter, broker.queue(request.queue)
    state = request.state
    told: set[str] = set()

    def part(after: bytes) -> Part:
        page = queue.page(PART, state=state, after=after)
        matching = [each.spot for each in page.messages if wanted.matches(each.message)]
        gone = _delete(broker, request._replace(spots=matching))
        if gone:
            told.add(_tell(request, [each for _, each in gone]))
        return Part(len(gone), page.following)

    done = in_parts(part, request.mark, 10).tell("Cancelled", f"{state} message", request.queue)
    return done._replace(text=" ".join([done.text, *sorted(told)]))


def _delete(broker: Broker, request: Request) -> list[tuple[Spot, Peeked]]:
    queue = broker.queue(request.queue)
    seen = [(each, queue.at(each)) for each in request.spots]
    return [(spot, listed.message) for spot, listed in seen if listed is not None and queue.delete(spot)]


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
