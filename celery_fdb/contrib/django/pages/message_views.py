"""The pages of the admin that show messages and act upon them: GET shows, POST acts (:mod:`celery_fdb.operations`).

A message is named by where it stands (:class:`~kombu_fdb.model.Spot`), so each page costs the
same in a queue of any length. Bodies need the permission ``celery_fdb.view_body``, actions ``celery_fdb.manage_queue``.
"""

from __future__ import annotations

from django.contrib import messages
from django.contrib.admin.sites import AdminSite
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.utils.http import url_has_allowed_host_and_scheme, urlencode

from celery_fdb.contrib.django import conf
from celery_fdb.contrib.django.models import MANAGE, VIEW_BODY, DeadLetter, Queue, allows
from celery_fdb.contrib.django.pages.audit import AdminAudit
from celery_fdb.contrib.django.pages.page import STATES, message_url, page, render, url_of, urls_of
from celery_fdb.contrib.django.pages.text import fit
from celery_fdb.inspection.row import body_of, row_of
from celery_fdb.operations.catalogue import DEEDS, offered, offered_on_all
from celery_fdb.operations.deed import Deed, Request, names_of, perform
from kombu_fdb import Broker, Spot
from kombu_fdb.api.arguments import State
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.errors import KombuFDBError, StoreError
from kombu_fdb.primitives.clock import SystemClock

__all__ = ["act", "find", "message", "queue_messages"]

#: Messages that one action may be asked for; Django takes 1,000 fields of a form (DATA_UPLOAD_MAX_NUMBER_FIELDS).
MOST_SELECTED = 500
#: Without the project's Celery app.
FIX_APP = "Set CELERY_FDB['APP'] so that results become REVOKED."


# -- messages ----------------------------------------------------------------------------------------------------------


@page()
def queue_messages(request: HttpRequest, site: AdminSite, broker: Broker, *, name: str) -> HttpResponse:
    """A queue's messages in one state, in pages that cost the same wherever they begin."""
    state, key, reverse = _state(request), request.GET.get("key"), request.GET.get("order") == "newest"
    size = conf.read().page_size
    found = broker.queue(name).page(size, state=state, after=_after(request), key=key, reverse=reverse)
    now_ms = SystemClock().wall_ms()
    rows = [row_of(each, now_ms) for each in found.messages]
    counts = broker.queue(name).stats()
    kept = {"state": state, **({} if key is None else {"key": key}), **({"order": "newest"} if reverse else {})}
    is_dead = name.endswith(DEAD_SUFFIX)
    context = {
        "title": f"Dead letters of {name.removesuffix(DEAD_SUFFIX)}" if is_dead else f"Messages of {name}",
        "rows": [{"row": row, "url": message_url(site, name, row.spot)} for row in rows],
        "state": state,
        "states": [(each, getattr(counts, each), urlencode({**kept, "state": each})) for each in STATES],
        "key": key,
        "reverse": reverse,
        "turned": urlencode({**kept, "order": "oldest" if reverse else "newest"}),
        "following": None if found.following is None else urlencode({**kept, "after": found.following.hex()}),
        "first": urlencode(kept) if "after" in request.GET else None,
        "is_dead": is_dead,
        "actions": offered(name, rows),
        "actions_on_all": offered_on_all(name, rows),
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
    place = _spot(spot)
    listed = broker.queue(name).at(place)
    is_dead = name.endswith(DEAD_SUFFIX)
    model = DeadLetter if is_dead else Queue
    if listed is None:
        return render(
            request, site, "moved", model, {"title": "The message is no longer here", **urls_of(site, name)}, status=404
        )
    row = row_of(listed, SystemClock().wall_ms())
    may_see = conf.read().show_bodies and allows(request, VIEW_BODY)
    asked = may_see and "body" in request.GET
    context = {
        "title": row.title,
        "subtitle": row.id,
        "row": row,
        "headers": row.headers(with_arguments=asked),
        "properties": row.properties(),
        "may_see_body": may_see,
        "body": body_of(row) if asked else None,
        "is_dead": is_dead,
        "actions": offered(name, [row]),
        **urls_of(site, name),
    }
    return render(request, site, "message", model, context)


@page()
def find(request: HttpRequest, site: AdminSite, broker: Broker) -> HttpResponse:
    """A task's messages, wherever they are; what is read does not grow with the store."""
    task_id = request.GET.get("id", "").strip()
    now_ms = SystemClock().wall_ms()
    rows = [row_of(each, now_ms) for each in broker.spots(task_id)] if task_id else []
    context = {
        "title": "Find a task",
        "subtitle": task_id,
        "rows": [{"row": row, "url": message_url(site, row.listed.message.queue, row.spot)} for row in rows],
    }
    return render(request, site, "found", Queue, context)


def _spot(token: str) -> Spot:
    try:
        return Spot.parse(token)
    except ValueError:
        raise Http404("no such message") from None


# -- actions -----------------------------------------------------------------------------------------------------------


@page(MANAGE)
def act(request: HttpRequest, site: AdminSite, broker: Broker, *, name: str) -> HttpResponse:
    """Ask, and when the answer is yes, act."""
    if request.method != "POST":
        return HttpResponseNotAllowed(["POST"])
    deed = DEEDS.get(request.POST.get("action", ""))
    spots = [_spot(token) for token in request.POST.getlist("selected")[:MOST_SELECTED]]
    back = _back(request, site, name)
    if deed is None or (deed.selects and not spots):
        messages.warning(request, "Choose an action and select the messages for it. Nothing was changed.")
        return HttpResponseRedirect(back)
    app = conf.app_of_broker(conf.read())
    asked = Request(name, spots, request.POST.get("key"), names_of(broker, name, spots), app, FIX_APP)
    if "confirmed" not in request.POST:
        return _ask(request, site, deed, asked, back)
    try:
        outcome = perform(broker, deed, asked, AdminAudit(request.user))
    except StoreError:
        raise
    except KombuFDBError as error:
        messages.error(request, fit(str(error)))
    else:
        (messages.warning if outcome.missed else messages.success)(request, fit(outcome.text))
    return HttpResponseRedirect(back)


def _ask(request: HttpRequest, site: AdminSite, deed: Deed, asked: Request, back: str) -> HttpResponse:
    context = {
        "title": "Are you sure?",
        "action": deed,
        "question": deed.question(asked),
        "spots": [(str(each), asked.names.get(each.message_id)) for each in asked.spots],
        "key": asked.key,
        "back": back,
        **urls_of(site, asked.queue),
    }
    return render(request, site, "confirm", Queue, context)


def _back(request: HttpRequest, site: AdminSite, name: str) -> str:
    """Where the user came from, if that is one of our pages."""
    back = request.POST.get("back", "")
    is_ours = url_has_allowed_host_and_scheme(back, allowed_hosts=None) and back.startswith("/")
    return back if is_ours else url_of(site, "messages", name)
