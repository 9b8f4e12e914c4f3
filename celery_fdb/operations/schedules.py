"""An entry of beat's schedule: paused and resumed for all beats, or published now.

The request's ``queue`` is the entry's name. Beats that run ``celery_fdb.beat.Scheduler`` obey a pause. What an entry
publishes, the app's configuration tells.
"""

from __future__ import annotations

from celery.beat import Scheduler

from celery_fdb.inspection.schedules import BROKEN, configured, entry_of, schedule_of
from celery_fdb.operations.action import Outcome, Request
from kombu_fdb import Broker
from kombu_fdb.errors import QueueError


def pause(broker: Broker, request: Request) -> Outcome:
    """Beats do not publish it until it is resumed."""
    schedule_of(broker).pause(request.queue)
    return Outcome(f"Paused {request.queue}: beats that run celery_fdb.beat.Scheduler leave out its ticks.")


def resume(broker: Broker, request: Request) -> Outcome:
    """The same, from its next tick on."""
    schedule_of(broker).resume(request.queue)
    return Outcome(f"Resumed {request.queue}, from its next tick on.")


def run_now(_: Broker, request: Request) -> Outcome:
    """Its task is published, besides its ticks and whether or not it is paused."""
    if request.app is None:
        raise QueueError("no Celery app is known here", fix=request.fix_app or None)
    written = configured(request.app).get(request.queue)
    if written is None:
        fix = "Only entries of beat_schedule can be published from here."
        raise QueueError("the app does not configure this entry", entry=request.queue, fix=fix)
    try:
        entry = entry_of(request.app, request.queue, written)
        result = Scheduler(request.app, lazy=True).apply_async(entry, advance=False)
    except BROKEN as error:
        raise QueueError("the entry could not be published", entry=request.queue, reason=str(error)[:500]) from error
    return Outcome(f"Published {entry.task} {result.id} of {request.queue}.")
