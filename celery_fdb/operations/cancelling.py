"""Cancel: delete messages that were selected, or all in one state that match, and tell who waits for their results.

Those in a worker's hands are cancelled only if they were selected.
"""

from __future__ import annotations

from collections.abc import Sequence

from celery_fdb.inspection.search import PART
from celery_fdb.operations.action import Done, Outcome, Request, each_selected, names
from celery_fdb.operations.parts import in_parts
from celery_fdb.tasks.revoking import NotTold, tell
from kombu_fdb import Broker, Spot
from kombu_fdb.model import Part, Peeked
from kombu_fdb.primitives.plural import plural

#: Of one part: each is deleted in a transaction of its own, and its result may be in another store.
MOST_AT_ONCE = 20


def cancel(broker: Broker, request: Request) -> Outcome:
    """Those that are selected."""
    done = _delete(broker, request)
    text = f"Cancelled {plural(len(done.spots), 'message')} of {request.queue}"
    told = _tell(request, [message for _, message in done.results])
    return done.outcome(f"{text}{names(request, done.spots)}. {told}")


def cancel_all(broker: Broker, request: Request) -> Outcome:
    """All that match, of the ready or, with the field ``state``, of the delayed ones."""
    wanted, about, queue = request.wanted, request.asked, broker.queue(request.queue)
    state = request.state
    told: set[str] = set()

    def part(after: bytes) -> Part:
        page = queue.page(PART, state=state, after=after)
        matching = [each for each in page.messages if wanted(each.message) and about.had_come(each.position)]
        now = matching[:MOST_AT_ONCE]
        done = _delete(broker, request._replace(spots=[each.spot for each in now]))
        if done.results:
            told.add(_tell(request, [message for _, message in done.results]))
        reached = now[: len(now) - done.late]
        is_all = len(reached) == len(matching)
        return Part(len(done.results), page.following if is_all else reached[-1].position)

    done = in_parts(part, request).tell("Cancelled", f"{state} message", request.queue)
    return done._replace(text=" ".join([done.text, *sorted(told)]))


def _delete(broker: Broker, request: Request) -> Done[Peeked]:
    queue = broker.queue(request.queue)

    def act(spot: Spot) -> Peeked | None:
        listed = queue.at(spot)
        return listed.message if listed is not None and queue.delete(spot) else None

    return each_selected(request, act)


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
