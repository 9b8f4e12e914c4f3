"""What the admin can do to the store: each action with its question, its deed and its entry in the admin's log.

An action is asked for by POST, shown as a question, and done when the question comes back confirmed, also by POST. Its
log entry is written before the deed and completed after it, however the deed ends, so that nothing is done without an
entry; one without an outcome tells that the process died in between.

A deed acts on messages where they were seen. One that has moved meanwhile, because a worker took it or somebody else
was faster, is left alone and counted as missed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from celery import Celery
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType

from celery_fdb.contrib.django.models import Queue
from celery_fdb.contrib.django.pages.text import fit
from celery_fdb.tasks.revoking import NotTold, tell
from kombu_fdb import Broker, Spot
from kombu_fdb.errors import KombuFDBError
from kombu_fdb.model import Peeked

__all__ = ["ACTIONS", "UNTOLD", "Action", "Outcome", "Request", "perform"]


class Request(NamedTuple):
    """What an action is to act upon."""

    queue: str
    spots: Sequence[Spot] = ()
    #: None: the whole queue.
    key: str | None = None
    #: What people call the messages, by message id.
    names: Mapping[bytes, str] = {}
    #: The project's, for the results of its tasks.
    app: Celery | None = None

    def __str__(self) -> str:
        if self.key is not None:
            return f"key {self.key!r} of {self.queue}"
        return self.queue


class Outcome(NamedTuple):
    """``text``: what was done, for the user and the log. ``missed``: messages that had moved."""

    text: str
    missed: int = 0


@dataclass(frozen=True, slots=True)
class Action:
    """``question`` is formatted with ``target``, ``number`` and ``told``, what becomes of results."""

    name: str
    label: str
    question: str
    deed: Callable[[Broker, Request], Outcome]
    #: Acts on messages that were selected.
    selects: bool = False
    #: Takes something away for good.
    destroys: bool = False


def perform(broker: Broker, action: Action, request: Request, user: Any) -> Outcome:
    """Do it, with a log entry that tells how it ended. Raises what the deed raises."""
    entry = _log(user, request.queue, f"{action.label} ({request}): begun.")
    ending = f"{action.label} ({request}): interrupted"
    try:
        outcome = action.deed(broker, request)
        ending = outcome.text
    except BaseException as error:
        reason = str(error) if isinstance(error, KombuFDBError) else f"{type(error).__name__}: {error}"
        ending = f"{action.label} ({request}): failed, {reason}"
        raise
    finally:
        _complete(entry, ending)
    return outcome


def _log(user: Any, queue: str, text: str) -> LogEntry:
    return LogEntry.objects.create(
        user_id=user.pk,
        content_type_id=ContentType.objects.get_for_model(Queue, for_concrete_model=False).pk,
        object_id=fit(queue),
        object_repr=fit(queue)[:200],
        action_flag=CHANGE,
        change_message=fit(text),
    )


def _complete(entry: LogEntry, text: str) -> None:
    entry.change_message = fit(text)
    entry.save(update_fields=["change_message"])


#: Without the project's Celery app.
UNTOLD = (
    "Results and chords are not updated, because no Celery app is known here. "
    "Set CELERY_FDB['APP'] so that results become REVOKED."
)


# -- deeds -------------------------------------------------------------------------------------------------------------


def _pause(broker: Broker, request: Request) -> Outcome:
    broker.queue(request.queue).pause(request.key)
    return Outcome(f"Paused {request}.")


def _resume(broker: Broker, request: Request) -> Outcome:
    broker.queue(request.queue).resume(request.key)
    return Outcome(f"Resumed {request}.")


def _replay(broker: Broker, request: Request) -> Outcome:
    queue, letters = broker.queue(request.queue), broker.dead_letters(request.queue)
    seen = [(each, queue.at(each)) for each in request.spots]
    replayed = [(spot, listed) for spot, listed in seen if listed is not None and letters.replay(at=[spot])]
    queues = ", ".join(sorted({death.queue for _, listed in replayed for death in listed.message.deaths[:1]}))
    done = f"Replayed {_messages(len(replayed), 'dead letter')}" + (f" to {queues}" if queues else "")
    return _outcome(f"{done}{_names(request, [each for each, _ in replayed])}.", len(request.spots) - len(replayed))


def _replay_all(broker: Broker, request: Request) -> Outcome:
    number = broker.dead_letters(request.queue).replay()
    return Outcome(f"Replayed {_messages(number, 'dead letter')} of {request.queue}.")


def _discard_all(broker: Broker, request: Request) -> Outcome:
    number = broker.dead_letters(request.queue).discard()
    return Outcome(f"Discarded {_messages(number, 'dead letter')} of {request.queue}.")


def _delete(broker: Broker, request: Request, verb: str, noun: str) -> Outcome:
    gone = [each for each in request.spots if broker.queue(request.queue).delete(each)]
    text = f"{verb} {_messages(len(gone), noun)} of {request.queue}{_names(request, gone)}."
    return _outcome(text, len(request.spots) - len(gone))


def _cancel(broker: Broker, request: Request) -> Outcome:
    queue = broker.queue(request.queue)
    seen = [(each, queue.at(each)) for each in request.spots]
    gone = [(spot, listed.message) for spot, listed in seen if listed is not None and queue.delete(spot)]
    done = f"Cancelled {_messages(len(gone), 'message')} of {request.queue}"
    text = f"{done}{_names(request, [spot for spot, _ in gone])}. {_tell(request.app, [each for _, each in gone])}"
    return _outcome(text, len(request.spots) - len(gone))


def _tell(app: Celery | None, gone: Sequence[Peeked]) -> str:
    """Whoever waits for the results; what is to be said of it."""
    if app is None:
        return UNTOLD
    failures = []
    for each in gone:
        try:
            tell(app, each)
        except NotTold as error:
            failures.append(f"{str(error).rstrip('.')}.")
    return " ".join(failures) or "Their results, if any, became REVOKED."


def _discard(broker: Broker, request: Request) -> Outcome:
    return _delete(broker, request, "Discarded", "dead letter")


def _outcome(text: str, missed: int) -> Outcome:
    if missed:
        text += f" Left alone: {_messages(missed, 'message')} that had moved meanwhile."
    return Outcome(text, missed)


def _messages(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _names(request: Request, spots: Sequence[Spot]) -> str:
    names = [request.names.get(each.message_id) or each.message_id.hex() for each in spots]
    return f": {', '.join(names)}" if names else ""


ACTIONS = {
    action.name: action
    for action in (
        Action(
            "pause",
            "Pause",
            "Stop delivering messages of {target}? Messages that workers hold are not affected.",
            _pause,
        ),
        Action("resume", "Resume", "Deliver messages of {target} again?", _resume),
        Action("replay", "Replay", "Replay {number}, each to the queue it died in?", _replay, selects=True),
        Action(
            "replay_all",
            "Replay all",
            "Replay all dead letters of {target}, each to the queue it died in?",
            _replay_all,
        ),
        Action(
            "discard_all",
            "Discard all",
            "Delete all dead letters of {target} for good?",
            _discard_all,
            destroys=True,
        ),
        Action(
            "discard",
            "Discard",
            "Delete {number} of {target} for good?",
            _discard,
            selects=True,
            destroys=True,
        ),
        Action(
            "cancel",
            "Cancel",
            "Delete {number} of {target} for good? A worker that already runs one goes on, and may store its result. "
            "{told}",
            _cancel,
            selects=True,
            destroys=True,
        ),
    )
}
