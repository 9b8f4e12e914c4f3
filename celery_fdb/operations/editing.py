"""Edit and replay: a dead letter goes back to the queue it died in, with other arguments.

One transaction takes the old message out and stores the new one, which has the same id, key, priority and history.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from celery_fdb.operations.action import Done, Field, Outcome, Request, names
from celery_fdb.operations.task_message import Arguments, arguments_of, read_json, with_arguments
from kombu_fdb import Broker
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.errors import InvalidArgument
from kombu_fdb.model import Listed

FIELDS = (
    Field("args", "Arguments", "json", "A JSON list.", "[]", required=True),
    Field("kwargs", "Keyword arguments", "json", "A JSON object.", "{}", required=True),
)
_SURROGATE = re.compile("[\ud800-\udfff]")


def arguments(broker: Broker, request: Request) -> Mapping[str, str]:
    """Those that the task has. Raises ``QueueError`` if they can't be edited."""
    listed = _look(broker, request)
    if listed is None:
        return {}
    args, kwargs = arguments_of(listed.message.payload)
    return {"args": _written(args), "kwargs": _written(kwargs)}


def _written(value: Any) -> str:
    """For a form; a lone surrogate, which no page can hold, is spelt out."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return json.dumps(value, indent=2) if _SURROGATE.search(text) else text


def edit(broker: Broker, request: Request) -> Outcome:
    """With those of the fields ``args`` and ``kwargs``, which are JSON; one that is not there stays as it is."""
    listed = _look(broker, request)
    missed: Done[None] = Done([], 1, 0)
    if listed is None:
        return missed.outcome(f"Replayed nothing of {request.queue}.")
    payload = with_arguments(listed.message.payload, _given(request, arguments_of(listed.message.payload)))
    if not broker.dead_letters(request.queue).replay_changed(listed.spot, payload):
        return missed.outcome(f"Replayed nothing of {request.queue}.")
    home = listed.message.deaths[0].queue if listed.message.deaths else request.queue.removesuffix(DEAD_SUFFIX)
    return Outcome(f"Replayed 1 dead letter to {home} with other arguments{names(request, [listed.spot])}.")


def _given(request: Request, old: Arguments) -> Arguments:
    args, kwargs = (request.fields.get(each.name) for each in FIELDS)
    return Arguments(
        old.args if args is None else read_json("args", args, list),
        old.kwargs if kwargs is None else read_json("kwargs", kwargs, dict),
    )


def _look(broker: Broker, request: Request) -> Listed | None:
    if len(request.spots) != 1:
        raise InvalidArgument("one message can be edited at a time", fix="Select one.")
    return broker.queue(request.queue).at(request.spots[0])
