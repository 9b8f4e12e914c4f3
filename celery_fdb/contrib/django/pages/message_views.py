"""The pages of the admin that show messages; what is done to them is in ``deed_views.py``.

A message is named by where it stands (:class:`~kombu_fdb.model.Spot`), so each page costs the same in a queue of any
length. Bodies need the permission ``celery_fdb.view_body``.
"""

from __future__ import annotations

from django.contrib.admin.sites import AdminSite
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.http import urlencode

from celery_fdb.contrib.django import conf
from celery_fdb.contrib.django.models import DeadLetter, Queue
from celery_fdb.contrib.django.pages.filtering import filter_form, filter_of
from celery_fdb.contrib.django.pages.page import (
    STATES,
    allowed,
    may_see_bodies,
    message_url,
    page,
    render,
    spot_of,
    urls_of,
)
from celery_fdb.inspection.message import view_of
from celery_fdb.inspection.search import Scope, search
from celery_fdb.operations.catalogue import offered, offered_on_all
from kombu_fdb import Broker
from kombu_fdb.api.arguments import State
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.primitives.clock import SystemClock

__all__ = ["find", "message", "queue_messages"]


# -- messages ----------------------------------------------------------------------------------------------------------


@page()
def queue_messages(request: HttpRequest, site: AdminSite, broker: Broker, *, name: str) -> HttpResponse:
    """A queue's messages in one state, all or those that match, in pages that cost the same wherever they begin."""
    state, reverse, wanted = _state(request), request.GET.get("order") == "newest", filter_of(request.GET)
    found = search(broker, Scope(name, state, reverse), wanted, conf.read().page_size, _after(request))
    now_ms = SystemClock().wall_ms()
    rows = [view_of(each, now_ms) for each in found.messages]
    counts = broker.queue(name).stats()
    kept = {"state": state, **wanted.fields(), **({"order": "newest"} if reverse else {})}
    is_dead = name.endswith(DEAD_SUFFIX)
    context = {
        "title": f"Dead letters of {name.removesuffix(DEAD_SUFFIX)}" if is_dead else f"Messages of {name}",
        "rows": [{"row": row, "url": message_url(site, name, row.spot)} for row in rows],
        "state": state,
        "states": [(each, getattr(counts, each), urlencode({**kept, "state": each})) for each in STATES],
        "reverse": reverse,
        "turned": urlencode({**kept, "order": "oldest" if reverse else "newest"}),
        "following": None if found.following is None else urlencode({**kept, "after": found.following.hex()}),
        "first": urlencode(kept) if "after" in request.GET else None,
        "is_dead": is_dead,
        "actions": allowed(request, offered(name, rows)),
        "actions_on_all": offered_on_all(name, rows),
        "looked_at": found.looked_at,
        **filter_form(wanted),
        "unfiltered": urlencode({"state": state, **({"order": "newest"} if reverse else {})}),
        **urls_of(site, name),
    }
    return render(request, site, "messages", DeadLetter if is_dead else Queue, context)


def _state(request: HttpRequest) -> State:
    state = request.GET.get("state", "ready")
    for each in STATES:
        if state == each:
            return each
    raise Http404(f"no state {state!r}")


def _after(request: HttpRequest) -> bytes:
    try:
        return bytes.fromhex(request.GET.get("after", ""))
    except ValueError:
        raise Http404("no such page") from None


@page()
def message(request: HttpRequest, site: AdminSite, broker: Broker, *, name: str, spot: str) -> HttpResponse:
    """One message; its body only for those who may see it and ask for it."""
    place = spot_of(spot)
    listed = broker.queue(name).at(place)
    is_dead = name.endswith(DEAD_SUFFIX)
    model = DeadLetter if is_dead else Queue
    if listed is None:
        return render(
            request, site, "moved", model, {"title": "The message is no longer here", **urls_of(site, name)}, status=404
        )
    row = view_of(listed, SystemClock().wall_ms())
    may_see = may_see_bodies(request)
    asked = may_see and "body" in request.GET
    context = {
        "title": row.title,
        "subtitle": row.id,
        "row": row,
        "headers": row.headers(with_arguments=asked),
        "properties": row.properties(),
        "may_see_body": may_see,
        "body": row.body() if asked else None,
        "is_dead": is_dead,
        "actions": allowed(request, offered(name, [row])),
        **urls_of(site, name),
    }
    return render(request, site, "message", model, context)


@page()
def find(request: HttpRequest, site: AdminSite, broker: Broker) -> HttpResponse:
    """A task's messages, wherever they are; what is read does not grow with the store."""
    task_id = request.GET.get("id", "").strip()
    now_ms = SystemClock().wall_ms()
    rows = [view_of(each, now_ms) for each in broker.spots(task_id)] if task_id else []
    context = {
        "title": "Find a task",
        "subtitle": task_id,
        "rows": [{"row": row, "url": message_url(site, row.message.queue, row.spot)} for row in rows],
    }
    return render(request, site, "found", Queue, context)
