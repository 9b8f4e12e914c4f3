"""All actions by name, and which of them a page offers."""

from __future__ import annotations

from collections.abc import Sequence

from celery_fdb.inspection.message import MessageView
from celery_fdb.inspection.overview import QueueView
from celery_fdb.operations import messages, queues, workers
from celery_fdb.operations.action import Action
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX

_ON_QUEUES_AND_KEYS = (
    Action(
        "pause",
        "Pause",
        "Stop delivering messages of {target}? Messages that workers hold are not affected.",
        queues.pause,
        takes_key=True,
    ),
    Action("resume", "Resume", "Deliver messages of {target} again?", queues.resume, takes_key=True),
    Action(
        "limit",
        "Set limits",
        "Set these limits of {target}? They apply from the next message on. Without a key they hold for every key that "
        "has no limits of its own.",
        queues.limit,
        fields=queues.LIMITS,
        prefill=queues.limits,
        takes_key=True,
    ),
    Action(
        "unlimit",
        "Remove limits",
        "Remove the limits of {target}? A key has the limits of every key again.",
        queues.unlimit,
        takes_key=True,
    ),
)
_ON_QUEUES = (
    Action(
        "publish",
        "Publish a task",
        "Publish a task to {target}?",
        messages.publish,
        fields=messages.PUBLISH,
        doubt=messages.unknown,
    ),
    Action(
        "move",
        "Move messages",
        "Move {number} of {target} to the end of another queue, as they are?",
        queues.move,
        fields=queues.MOVE,
        on_whole=True,
        takes_key=True,
    ),
    Action(
        "purge",
        "Purge",
        "Delete {number} of {target} for good? Their results stay as they are: to have them REVOKED, cancel the "
        "messages instead.",
        queues.purge,
        destroys=True,
        on_whole=True,
    ),
    Action(
        "delete_queue",
        "Delete queue",
        "Delete {target} with its bindings, its limits and {number} for good?",
        queues.delete,
        destroys=True,
        on_whole=True,
    ),
)
_ON_DEAD_LETTERS = (
    Action("replay", "Replay", "Replay {number}, each to the queue it died in?", messages.replay, selects=True),
    Action(
        "edit",
        "Edit and replay",
        "Replay {number} of {target} with these arguments, to the queue it died in?",
        messages.edit,
        selects=True,
        selects_one=True,
        fields=messages.EDIT_FIELDS,
        prefill=messages.arguments,
        shows_body=True,
    ),
    Action(
        "discard",
        "Discard",
        "Delete {number} of {target} for good?",
        messages.discard,
        selects=True,
        destroys=True,
    ),
    Action(
        "replay_all",
        "Replay all",
        "Replay {number} of {target}{which}, each to the queue it died in?",
        messages.replay_all,
        by_filter=True,
    ),
    Action(
        "discard_all",
        "Discard all",
        "Delete {number} of {target}{which} for good?",
        messages.discard_all,
        destroys=True,
        by_filter=True,
    ),
    Action(
        "replay_everywhere",
        "Replay all",
        "Replay {number} of {target}{which}, each to the queue it died in?",
        messages.replay_everywhere,
        by_filter=True,
        everywhere=True,
    ),
    Action(
        "discard_everywhere",
        "Discard all",
        "Delete {number} of {target}{which} for good?",
        messages.discard_everywhere,
        destroys=True,
        by_filter=True,
        everywhere=True,
    ),
)
_ON_MESSAGES = (
    Action(
        "run_now",
        "Run now",
        "Make {number} of {target} ready now, instead of waiting until due?",
        messages.run_now,
        selects=True,
    ),
    Action(
        "reschedule",
        "Reschedule",
        "Make {number} of {target} due at another moment?",
        messages.reschedule,
        selects=True,
        fields=messages.RESCHEDULE_FIELDS,
        prefill=messages.in_an_hour,
    ),
    Action(
        "cancel",
        "Cancel",
        "Delete {number} of {target} for good? A worker that already runs one goes on, and may store its result. "
        "{told}",
        messages.cancel,
        selects=True,
        destroys=True,
    ),
    Action(
        "cancel_all",
        "Cancel all",
        "Delete {number} of {target}{which} for good? {told}",
        messages.cancel_all,
        destroys=True,
        by_filter=True,
        on_waiting=True,
    ),
)

_ON_SCHEDULES = (
    Action("schedule_pause", "Pause", "Stop publishing {target} until it is resumed?", workers.pause_entry),
    Action("schedule_resume", "Resume", "Publish {target} again, from its next tick on?", workers.resume_entry),
    Action("schedule_run", "Run now", "Publish the task of {target} now, besides its ticks?", workers.run_entry),
)

ACTIONS = {
    each.name: each for each in (*_ON_QUEUES_AND_KEYS, *_ON_QUEUES, *_ON_DEAD_LETTERS, *_ON_MESSAGES, *_ON_SCHEDULES)
}


def offered(queue: str, rows: Sequence[MessageView]) -> list[Action]:
    """For messages that are selected, all in one state.

    Dead letters are replayed and discarded, wherever a dead-letter exchange has put them; others are cancelled, or due
    at another moment unless a worker holds them.
    """
    states = {row.message.state for row in rows}
    if queue.endswith(DEAD_SUFFIX) and states <= {"ready"}:
        return _named("replay", "edit", "discard")
    has_strangers = any(row.home not in ("", queue) and row.message.state == "ready" for row in rows)
    due = ["run_now", "reschedule"] if "delayed" in states else ["reschedule"] if "ready" in states else []
    return _named(*(["replay", "edit"] if has_strangers else []), *due, "cancel")


def offered_on_all(queue: str, rows: Sequence[MessageView]) -> list[Action]:
    """For all messages of the queue in the state of the rows, or all that match a filter."""
    states = {row.message.state for row in rows}
    if queue.endswith(DEAD_SUFFIX):
        return _named("replay_all", "discard_all") if states == {"ready"} else []
    return _named("cancel_all") if states and "leased" not in states else []


def offered_on_cause(*, everywhere: bool = False) -> list[Action]:
    """For the dead letters of one cause, of a queue or of all queues."""
    return _named("replay_everywhere", "discard_everywhere") if everywhere else _named("replay_all", "discard_all")


def offered_on_queue(view: QueueView) -> list[Action]:
    """For the queue as a whole."""
    pausing_ = "resume" if view.paused else "pause"
    return _named(pausing_, "limit", "unlimit", "publish", "move", "purge", "delete_queue")


def offered_on_key(*, paused: bool, limited: bool) -> list[Action]:
    """For one key of a queue."""
    return _named("resume" if paused else "pause", "limit", *(["unlimit"] if limited and not paused else []), "move")


def offered_on_schedule(*, told: bool, paused: bool, configured: bool) -> list[Action]:
    """``told``: a beat that obeys pauses has reported it. ``configured``: the app says what it publishes."""
    pausing = ["schedule_resume"] if paused else ["schedule_pause"] if told else []
    return _named(*pausing, *(["schedule_run"] if configured else []))


def _named(*found: str) -> list[Action]:
    return [ACTIONS[name] for name in found]
