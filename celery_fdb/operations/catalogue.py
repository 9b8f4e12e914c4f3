"""All actions by name."""

from __future__ import annotations

from dataclasses import replace

from celery_fdb.operations import messages, queues, workers
from celery_fdb.operations.action import Action

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
_REPLAY_ALL = Action(
    "replay_all",
    "Replay all",
    "Replay {number} of {target}{which}, {to}?",
    messages.replay_all,
    by_filter=True,
)
_DISCARD_ALL = Action(
    "discard_all",
    "Discard all",
    "Delete {number} of {target}{which} for good?",
    messages.discard_all,
    destroys=True,
    by_filter=True,
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
    _REPLAY_ALL,
    _DISCARD_ALL,
    replace(_REPLAY_ALL, name="replay_everywhere", run=messages.replay_everywhere, everywhere=True),
    replace(_DISCARD_ALL, name="discard_everywhere", run=messages.discard_everywhere, everywhere=True),
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
    each.name: each
    for each in (
        *_ON_QUEUES_AND_KEYS,
        *_ON_QUEUES,
        *_ON_DEAD_LETTERS,
        *_ON_MESSAGES,
        *_ON_SCHEDULES,
        *workers.ON_WORKERS,
    )
}


def named(*names: str) -> list[Action]:
    """The actions of these names, as a page offers them."""
    return [ACTIONS[each] for each in names]
