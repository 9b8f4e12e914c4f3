"""All deeds by name, and which of them a page offers."""

from __future__ import annotations

from collections.abc import Sequence

from celery_fdb.inspection.row import Row
from celery_fdb.operations import cancelling, dead_letters, pausing
from celery_fdb.operations.deed import Deed
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX

__all__ = ["DEEDS", "offered", "offered_on_all"]

DEEDS = {
    each.name: each
    for each in (
        Deed(
            "pause",
            "Pause",
            "Stop delivering messages of {target}? Messages that workers hold are not affected.",
            pausing.pause,
        ),
        Deed("resume", "Resume", "Deliver messages of {target} again?", pausing.resume),
        Deed(
            "replay",
            "Replay",
            "Replay {number}, each to the queue it died in?",
            dead_letters.replay,
            selects=True,
        ),
        Deed(
            "replay_all",
            "Replay all",
            "Replay all dead letters of {target}, each to the queue it died in?",
            dead_letters.replay_all,
        ),
        Deed(
            "discard_all",
            "Discard all",
            "Delete all dead letters of {target} for good?",
            dead_letters.discard_all,
            destroys=True,
        ),
        Deed(
            "discard",
            "Discard",
            "Delete {number} of {target} for good?",
            dead_letters.discard,
            selects=True,
            destroys=True,
        ),
        Deed(
            "cancel",
            "Cancel",
            "Delete {number} of {target} for good? A worker that already runs one goes on, and may store its result. "
            "{told}",
            cancelling.cancel,
            selects=True,
            destroys=True,
        ),
    )
}


def offered(queue: str, rows: Sequence[Row]) -> list[Deed]:
    """For messages that are selected.

    Dead letters are replayed and discarded, wherever a dead-letter exchange has put them; others are cancelled.
    """
    if queue.endswith(DEAD_SUFFIX):
        return [DEEDS["replay"], DEEDS["discard"]]
    has_strangers = any(row.home not in ("", queue) and row.spot.state == "ready" for row in rows)
    return [DEEDS["replay"], DEEDS["cancel"]] if has_strangers else [DEEDS["cancel"]]


def offered_on_all(queue: str, rows: Sequence[Row]) -> list[Deed]:
    """For all messages of the queue together."""
    return [DEEDS["replay_all"], DEEDS["discard_all"]] if queue.endswith(DEAD_SUFFIX) and rows else []
