"""``/act``: a person asks for an action, sees a question with its form, and confirms it; then the action runs.

The question is a page with an address of its own, so that going back, reloading and bookmarks work. An action that
destroys nothing and is undone by one click runs at once. The audit records who did it, before and after. An action on
very many messages runs in parts, one for each request: the page goes on by itself, and a person may stop it.
"""

from __future__ import annotations

import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.responses import Response

from celery_fdb.inspection.message import MessageView
from celery_fdb.operations.action import Action, AskedAnew, Request
from celery_fdb.operations.catalogue import ACTIONS
from celery_fdb.web.page import MOST_BYTES, READING
from celery_fdb.web.request_context import MOST_SHOWN, RequestContext, carried, spot_of
from kombu_fdb import Broker
from kombu_fdb.errors import KombuFDBError, StoreError
from kombu_fdb.model import Spot

#: The most messages that one action may be asked for.
MOST_SELECTED = 500
#: The share of a page's time that an action may take; then it ends, and says how far it is.
SHARE = 0.4
AT_ONCE = frozenset({"pause", "resume", "schedule_pause", "schedule_resume"})
#: The longest address of a question, as servers refuse longer ones; a longer question has no address of its own.
LONGEST_ADDRESS = 4_000
#: The field of an address with the selected messages, packed.
PACKED = "packed"


def act(context: RequestContext, broker: Broker) -> Response:
    """Show the question or, once it is confirmed, do the action."""
    action = ACTIONS.get(context.sent("action"))
    if action is None:
        raise HTTPException(404, "There is no such action. Nothing was changed.")
    if action.on_workers and not context.user.may_act_on_workers:
        return context.page("error", 403, title="Not allowed", text="You may not act on workers.")
    tells_arguments = action.shows_body or (action.by_filter and context.sent("arguments"))
    if tells_arguments and not context.may_see_bodies:
        return context.page("error", 403, title="Not allowed", text="It shows arguments, which are hidden here.")
    spots = [spot_of(token) for token in _selected(context)[:MOST_SELECTED]]
    if action.selects and not spots:
        return context.back("Select messages first. Nothing was changed.")
    if action.selects_one and len(spots) > 1:
        return context.back("Select one message only. Nothing was changed.")
    asked = _request(context, broker, action, spots)
    if context.request.method in READING:
        return _ask(context, broker, action, asked)
    if context.sent("confirmed") or action.name in AT_ONCE:
        return _do(context, broker, action, asked)
    address = _address(context)
    return context.redirect(address) if len(address) <= LONGEST_ADDRESS else _ask(context, broker, action, asked)


def _address(context: RequestContext) -> str:
    """The address of the question that a form asks for."""
    sent = {name: values[0] for name, values in context.fields.items() if name not in {"selected", context.form_field}}
    if selected := context.fields.get("selected"):
        sent[PACKED] = urlsafe_b64encode(zlib.compress(" ".join(selected).encode())).decode()
    return context.url("act", **dict(carried(*each) for each in sent.items()))


def _selected(context: RequestContext) -> list[str]:
    if not context.sent(PACKED):
        return context.fields.get("selected", [])
    try:
        packed = urlsafe_b64decode(context.sent(PACKED))
        return zlib.decompressobj().decompress(packed, MOST_BYTES).decode().split()
    except (ValueError, zlib.error):
        raise HTTPException(404, "There is no such message.") from None


def _request(context: RequestContext, broker: Broker, action: Action, spots: Sequence[Spot]) -> Request:
    queue = action.target(context.sent("queue"))
    key, fields = action.read({name: values[0] for name, values in context.fields.items()})
    return Request(
        queue,
        spots,
        key,
        _names_of(broker, queue, spots, context.settings.clock.wall_ms()),
        context.settings.app,
        context.settings.fix_app,
        fields,
        context.sent("mark"),
        context.zone,
        seconds=context.settings.timeout_s * SHARE,
        clock=context.settings.clock,
    )


def _names_of(broker: Broker, queue: str, spots: Sequence[Spot], now_ms: int) -> dict[bytes, str]:
    """Task and id of the selected messages that are still there, by message id."""
    seen = [broker.queue(queue).at(each) for each in spots]
    rows = [MessageView.of(each, now_ms) for each in seen if each is not None]
    return {row.message.message_id: f"{row.title} {row.id}" for row in rows}


def _ask(context: RequestContext, broker: Broker, action: Action, asked: Request, error: str = "") -> Response:
    asked, form = action.ask(broker, asked), action.form(broker, asked)
    named = {each.name for each in form}
    return context.page(
        "question",
        status=422 if error else 200,
        action=action,
        asked=asked,
        question=action.question(asked),
        form=form,
        kept={name: value for name, value in asked.fields.items() if name not in named},
        choices={each.kind: _choices(context, broker, each.kind) for each in form if each.kind in {"queue", "task"}},
        back=context.sent("back"),
        error=error,
    )


def _choices(context: RequestContext, broker: Broker, kind: str) -> list[str]:
    """The names to choose from. Names that an input would change are left out: they would become other names."""
    if kind == "task":
        return context.tasks()
    return sorted(each for each in broker.queues() if each.isprintable())[:MOST_SHOWN]


def _do(context: RequestContext, broker: Broker, action: Action, asked: Request) -> Response:
    try:
        outcome = action.perform(broker, asked, context.audit)
    except StoreError:
        raise
    except KombuFDBError as error:
        is_asked = action.fields or isinstance(error, AskedAnew)
        return _ask(context, broker, action, asked, str(error)) if is_asked else context.back(str(error))
    if outcome.following:
        return context.page("part", action=action, asked=asked, outcome=outcome, back=context.sent("back"))
    return context.back(outcome.text)
