"""The pages of the admin: GET shows, POST acts (``actions.py``).

Every page asks the store when it is shown, at a cost that does not grow with the number of messages. Each one needs the
permission ``celery_fdb.view_queue``, bodies ``celery_fdb.view_body``, actions ``celery_fdb.manage_queue``. A store that
does not answer, and settings that can't be used, are a page that says so and names the next step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.contrib.admin.sites import AdminSite
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect, JsonResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme, urlencode

from celery_fdb import overview
from celery_fdb.django import conf, store
from celery_fdb.django.actions import ACTIONS, Action, Request, perform
from celery_fdb.django.models import MANAGE, VIEW, VIEW_BODY, DeadLetter, Queue, Session, allows
from celery_fdb.django.rows import Row, Spot, age, body_of, moment, row_of
from kombu_fdb import Broker
from kombu_fdb.clock import SystemClock
from kombu_fdb.errors import KombuFDBError, QueueError, QueueNotFound, StoreError
from kombu_fdb.queue.deadletter import DEAD_SUFFIX

__all__ = ["act", "dead_letters", "find", "message", "queue", "queue_keys", "queue_messages", "queues", "sessions"]

View = Callable[..., HttpResponse]
STATES = ("ready", "delayed", "leased")
#: Keys on a queue's own page; the others are on theirs.
TOP_KEYS = 20
#: Messages that one action may be asked for; Django takes 1,000 fields of a form (DATA_UPLOAD_MAX_NUMBER_FIELDS).
MOST_SELECTED = 500


def page(permission: str = VIEW) -> Callable[[Callable[..., HttpResponse]], View]:
    """A view of the store: with the permission, an open broker, and a page for what can go wrong."""

    def decorate(view: Callable[..., HttpResponse]) -> View:
        @functools.wraps(view)
        def guarded(request: HttpRequest, site: AdminSite, **arguments: str) -> HttpResponse:
            if not allows(request, permission):
                raise PermissionDenied
            try:
                return view(request, site, store.broker(), **{name: unquote(text) for name, text in arguments.items()})
            except KombuFDBError as error:
                store.forget()
                return _unavailable(request, site, error)

        return guarded

    return decorate


def _unavailable(request: HttpRequest, site: AdminSite, error: KombuFDBError) -> HttpResponse:
    fix = error.attributes.get("fix")
    text = str(error).removesuffix(fix).rstrip(". ") if fix else str(error)
    context = {
        "title": "The broker's store is not available",
        "error": text,
        "acted": request.method == "POST",
        "fix": fix,
        "retry": request.get_full_path(),
    }
    return _render(request, site, "unavailable", Queue, context, status=503)


def _render(
    request: HttpRequest, site: AdminSite, template: str, model: Any, context: dict[str, Any], status: int = 200
) -> HttpResponse:
    request.current_app = site.name
    context = {
        **site.each_context(request),
        "opts": model._meta,
        "can_manage": allows(request, MANAGE),
        **context,
    }
    return TemplateResponse(request, f"admin/celery_fdb/{template}.html", context, status=status)


# -- queues ------------------------------------------------------------------------------------------------------------


@page()
def queues(request: HttpRequest, site: AdminSite, broker: Broker) -> HttpResponse:
    """All queues; those of replies and remote control only if they are asked for."""
    shows_all = "all" in request.GET
    seen = overview.look(broker)
    live = [each for each in seen.live_queues if shows_all or not _is_internal(each.name)]
    sessions_ = len([each for each in seen.sessions if each.open])
    if request.GET.get("format") == "json":
        return JsonResponse({"queues": {each.name: _counters(each) for each in live}, "sessions": sessions_})
    context = {
        "title": "Queues",
        "broker": seen.broker,
        "queues": [
            {"view": each, "oldest": _age(each.oldest_age_s), "url": _url(site, "change", each.name)} for each in live
        ],
        "hidden": len(seen.live_queues) - len(live),
        "shows_all": shows_all,
        "sessions": sessions_,
        "find_url": reverse("admin:celery_fdb_queue_find", current_app=site.name),
    }
    return _render(request, site, "queues", Queue, context)


def _counters(view: overview.QueueView) -> dict[str, int | str]:
    counts = {state: getattr(view, state) for state in (*STATES, "dead")}
    return {**counts, "oldest": _age(view.oldest_age_s)}


def _is_internal(name: str) -> bool:
    """Queues that Celery makes for itself: remote control, its replies, events."""
    return name.endswith(".pidbox") or name.startswith("celeryev.")


def _age(seconds: float | None) -> str:
    return "" if seconds is None else age(seconds * 1000)


@page()
def queue(request: HttpRequest, site: AdminSite, broker: Broker, *, name: str) -> HttpResponse:
    """One queue: its counters, how it is worked on, its longest keys."""
    try:
        (view,) = overview.look(broker, queues=[name]).queues
    except QueueNotFound:
        messages.warning(request, f"There is no queue “{name}”. Perhaps it was deleted.")
        return HttpResponseRedirect(reverse("admin:celery_fdb_queue_changelist", current_app=site.name))
    keys = overview.look_at_keys(broker, name, top=TOP_KEYS + 1)
    context = {
        "title": name,
        "queue": view,
        "oldest": _age(view.oldest_age_s),
        "control": broker.engine.control(name),
        "keys": keys[:TOP_KEYS],
        "has_more_keys": len(keys) > TOP_KEYS,
        "dead_url": _url(site, "messages", name + DEAD_SUFFIX) if view.dead_of is None else None,
        **_urls(site, name),
    }
    return _render(request, site, "queue", Queue, context)


@page()
def queue_keys(request: HttpRequest, site: AdminSite, broker: Broker, *, name: str) -> HttpResponse:
    """A queue's keys by name, in pages."""
    size = conf.read().page_size
    found = broker.engine.key_page(name, after=request.GET.get("after"), limit=size)
    views = [
        {"key": key, "ready": counts.ready, "leased": counts.leased, "limits": counts.limits}
        for key, counts in found.items()
    ]
    context = {
        "title": f"Keys of {name}",
        "keys": views,
        "following": urlencode({"after": next(reversed(found))}) if len(found) == size else None,
        "is_first": "after" not in request.GET,
        **_urls(site, name),
    }
    return _render(request, site, "keys", Queue, context)


# -- messages ----------------------------------------------------------------------------------------------------------


@page()
def queue_messages(request: HttpRequest, site: AdminSite, broker: Broker, *, name: str) -> HttpResponse:
    """A queue's messages in one state, in pages that cost the same wherever they begin."""
    state, key, reverse = _state(request), request.GET.get("key"), request.GET.get("order") == "newest"
    found = broker.engine.page(name, state, conf.read().page_size, after=_after(request), key=key, reverse=reverse)
    now_ms = SystemClock().wall_ms()
    rows = [row_of(each, now_ms) for each in found.messages]
    counts = broker.queue(name).stats()
    kept = {"state": state, **({} if key is None else {"key": key}), **({"order": "newest"} if reverse else {})}
    is_dead = name.endswith(DEAD_SUFFIX)
    context = {
        "title": f"Dead letters of {name.removesuffix(DEAD_SUFFIX)}" if is_dead else f"Messages of {name}",
        "rows": [{"row": row, "url": _message_url(site, name, row.spot)} for row in rows],
        "state": state,
        "states": [(each, getattr(counts, each), urlencode({**kept, "state": each})) for each in STATES],
        "key": key,
        "reverse": reverse,
        "turned": urlencode({**kept, "order": "oldest" if reverse else "newest"}),
        "following": None if found.following is None else urlencode({**kept, "after": found.following.hex()}),
        "first": urlencode(kept) if "after" in request.GET else None,
        "is_dead": is_dead,
        "actions": _actions(name, rows),
        "actions_on_all": [ACTIONS["replay_all"], ACTIONS["discard_all"]] if is_dead and rows else [],
        **_urls(site, name),
    }
    return _render(request, site, "messages", DeadLetter if is_dead else Queue, context)


def _actions(queue: str, rows: list[Row]) -> list[Action]:
    """Dead letters are replayed and discarded, wherever a dead-letter exchange has put them; others are cancelled."""
    if queue.endswith(DEAD_SUFFIX):
        return [ACTIONS["replay"], ACTIONS["discard"]]
    has_strangers = any(row.home not in ("", queue) and row.spot.state == "ready" for row in rows)
    return [ACTIONS["replay"], ACTIONS["cancel"]] if has_strangers else [ACTIONS["cancel"]]


def _state(request: HttpRequest) -> str:
    state = request.GET.get("state", "ready")
    if state not in STATES:
        raise Http404(f"no state {state!r}")
    return state


def _after(request: HttpRequest) -> bytes:
    try:
        return bytes.fromhex(request.GET.get("after", ""))
    except ValueError:
        raise Http404("no such page") from None


@page()
def message(request: HttpRequest, site: AdminSite, broker: Broker, *, name: str, spot: str) -> HttpResponse:
    """One message; its body only for those who may see it and ask for it."""
    place = _spot(spot)
    listed = broker.engine.read_at(name, place.state, place.position)
    is_dead = name.endswith(DEAD_SUFFIX)
    model = DeadLetter if is_dead else Queue
    if listed is None or listed.message.message_id != place.message_id:
        return _render(
            request, site, "moved", model, {"title": "It is no longer there", **_urls(site, name)}, status=404
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
        "actions": _actions(name, [row]),
        **_urls(site, name),
    }
    return _render(request, site, "message", model, context)


@page()
def find(request: HttpRequest, site: AdminSite, broker: Broker) -> HttpResponse:
    """A task's messages, wherever they are; what is read does not grow with the store."""
    task_id = request.GET.get("id", "").strip()
    now_ms = SystemClock().wall_ms()
    rows = [row_of(each, now_ms) for each in broker.engine.list_task(task_id)] if task_id else []
    context = {
        "title": "Find a task",
        "subtitle": task_id,
        "rows": [{"row": row, "url": _message_url(site, row.listed.message.queue, row.spot)} for row in rows],
    }
    return _render(request, site, "found", Queue, context)


def _spot(token: str) -> Spot:
    try:
        return Spot.parse(token)
    except ValueError:
        raise Http404("no such message") from None


# -- dead letters and sessions -----------------------------------------------------------------------------------------


@page()
def dead_letters(request: HttpRequest, site: AdminSite, broker: Broker) -> HttpResponse:
    """The queues of dead letters: ``<queue>.dead``, and those that dead-letter exchanges lead to."""
    seen = overview.look(broker).queues
    homes = {each.name: {each.dead_of} for each in seen if each.dead_of is not None}
    for each in seen:
        for name in _dead_letter_queues(broker, each):
            homes.setdefault(name, set()).add(each.name)
    context = {
        "title": "Dead letters",
        "queues": [
            {
                "view": each,
                "homes": ", ".join(sorted(homes[each.name])),
                "oldest": _age(each.oldest_age_s),
                "url": _url(site, "messages", each.name),
            }
            for each in seen
            if each.name in homes
        ],
    }
    return _render(request, site, "dead_letters", DeadLetter, context)


def _dead_letter_queues(broker: Broker, view: overview.QueueView) -> list[str]:
    exchange = view.arguments.get("x-dead-letter-exchange")
    if exchange is None:
        return []
    try:
        return broker.engine.route(exchange, view.arguments.get("x-dead-letter-routing-key") or view.name)
    except QueueError:  # it is not there, so the letters are in <queue>.dead
        return []


@page()
def sessions(request: HttpRequest, site: AdminSite, broker: Broker) -> HttpResponse:
    """The consumer processes."""
    now_ms = SystemClock().wall_ms()
    seen = overview.look(broker, queues=(), held=True).sessions
    context = {
        "title": "Sessions",
        "sessions": [
            {
                "view": each,
                "queues": ", ".join(name for name in each.queues if not _is_internal(name)),
                "beat": moment(each.beat_ms) if each.beat_ms else None,
                "age": age(now_ms - each.beat_ms) if each.beat_ms else "",
                "is_silent": bool(each.beat_ms) and now_ms - each.beat_ms > each.ttl_s * 1000,
            }
            for each in seen
        ],
    }
    return _render(request, site, "sessions", Session, context)


# -- actions -----------------------------------------------------------------------------------------------------------


@page(MANAGE)
def act(request: HttpRequest, site: AdminSite, broker: Broker, *, name: str) -> HttpResponse:
    """Ask, and when the answer is yes, act."""
    if request.method != "POST":
        return HttpResponseNotAllowed(["POST"])
    action = ACTIONS.get(request.POST.get("action", ""))
    spots = [_spot(token) for token in request.POST.getlist("selected")[:MOST_SELECTED]]
    back = _back(request, site, name)
    if action is None or (action.selects and not spots):
        messages.warning(request, "Choose an action and select what it is for. Nothing was changed.")
        return HttpResponseRedirect(back)
    asked = Request(name, spots, request.POST.get("key"), _names(broker, name, spots))
    if "confirmed" not in request.POST:
        return _ask(request, site, action, asked, back)
    try:
        outcome = perform(broker, action, asked, request.user)
    except StoreError:
        raise
    except KombuFDBError as error:
        messages.error(request, str(error))
    else:
        (messages.warning if outcome.missed else messages.success)(request, outcome.text)
    return HttpResponseRedirect(back)


def _names(broker: Broker, name: str, spots: list[Spot]) -> dict[bytes, str]:
    now_ms = SystemClock().wall_ms()
    seen = [broker.engine.read_at(name, each.state, each.position) for each in spots]
    rows = [row_of(each, now_ms) for each in seen if each is not None]
    return {row.spot.message_id: f"{row.title} {row.id}" for row in rows}


def _ask(request: HttpRequest, site: AdminSite, action: Action, asked: Request, back: str) -> HttpResponse:
    number = f"{len(asked.spots)} message{'' if len(asked.spots) == 1 else 's'}"
    context = {
        "title": "Are you sure?",
        "action": action,
        "question": action.question.format(target=asked, number=number),
        "spots": [(str(each), asked.names.get(each.message_id)) for each in asked.spots],
        "key": asked.key,
        "back": back,
        **_urls(site, asked.queue),
    }
    return _render(request, site, "confirm", Queue, context)


def _back(request: HttpRequest, site: AdminSite, name: str) -> str:
    """Where the user came from, if that is one of our pages."""
    back = request.POST.get("back", "")
    is_ours = url_has_allowed_host_and_scheme(back, allowed_hosts=None) and back.startswith("/")
    return back if is_ours else _url(site, "messages", name)


# -- addresses ---------------------------------------------------------------------------------------------------------


def _url(site: AdminSite, view: str, name: str) -> str:
    return reverse(f"admin:celery_fdb_queue_{view}", args=(quote(name),), current_app=site.name)


def _message_url(site: AdminSite, name: str, spot: Spot) -> str:
    return reverse("admin:celery_fdb_queue_message", args=(quote(name), str(spot)), current_app=site.name)


def _urls(site: AdminSite, name: str) -> dict[str, Any]:
    """The pages of a queue, for templates."""
    views = ("change", "keys", "messages", "action", "history")
    return {"queue_name": name, "urls": {view: _url(site, view, name) for view in views}}
