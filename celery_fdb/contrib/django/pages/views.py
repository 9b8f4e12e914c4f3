"""The pages of the admin that show queues, keys and sessions; for messages see ``message_views.py``.

Each asks the store when it is shown, at a cost that does not grow with the number of messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.contrib import messages
from django.contrib.admin.sites import AdminSite
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.urls import reverse
from django.utils.http import urlencode

from celery_fdb.contrib.django import conf
from celery_fdb.contrib.django.models import Queue, Session
from celery_fdb.contrib.django.pages.page import STATES, page, render, url_of, urls_of
from celery_fdb.inspection import overview
from celery_fdb.inspection.keys import find_keys
from celery_fdb.inspection.moments import age, moment
from celery_fdb.inspection.sessions import heard_s, silent
from celery_fdb.operations.catalogue import offered_on_key, offered_on_queue
from kombu_fdb import Broker
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.errors import QueueNotFound
from kombu_fdb.primitives.masking import masked

__all__ = ["queue", "queue_keys", "queues", "sessions"]

#: Keys on a queue's own page; the others are on theirs.
TOP_KEYS = 20


# -- queues ------------------------------------------------------------------------------------------------------------


@page()
def queues(request: HttpRequest, site: AdminSite, broker: Broker) -> HttpResponse:
    """All queues; those of replies and remote control only if they are asked for."""
    shows_all = "all" in request.GET
    seen = overview.look(broker)
    live = [each for each in seen.live_queues if shows_all or not each.is_internal]
    sessions_ = len([each for each in seen.sessions if each.open])
    if request.GET.get("format") == "json":
        return JsonResponse({"queues": {each.name: _counters(each) for each in live}, "sessions": sessions_})
    context = {
        "title": "Queues",
        "broker": seen.broker,
        "queues": [
            {"view": each, "oldest": _age(each.oldest_age_s), "url": url_of(site, "change", each.name)} for each in live
        ],
        "hidden": len(seen.live_queues) - len(live),
        "shows_all": shows_all,
        "sessions": sessions_,
        "find_url": reverse("admin:celery_fdb_queue_find", current_app=site.name),
    }
    return render(request, site, "queues", Queue, context)


def _counters(view: overview.QueueView) -> dict[str, int | str]:
    counts = {state: getattr(view, state) for state in (*STATES, "dead")}
    return {**counts, "oldest": _age(view.oldest_age_s)}


def _age(seconds: float | None) -> str:
    return age(seconds)


@page()
def queue(request: HttpRequest, site: AdminSite, broker: Broker, *, name: str) -> HttpResponse:
    """One queue: its counters, how it is worked on, its longest keys."""
    try:
        (view,) = overview.look(broker, queues=[name]).queues
    except QueueNotFound:
        messages.warning(request, f"There is no queue “{name}”. It may have been deleted.")
        return HttpResponseRedirect(reverse("admin:celery_fdb_queue_changelist", current_app=site.name))
    keys = overview.look_at_keys(broker, name, top=TOP_KEYS + 1)
    context = {
        "title": name,
        "queue": view,
        # In a template "arguments.items" would be the argument of that name.
        "arguments": sorted((each, masked(each, value)) for each, value in view.arguments.items()),
        "oldest": _age(view.oldest_age_s),
        "control": broker.queue(name).control(),
        "keys": _keys(keys[:TOP_KEYS]),
        "actions": offered_on_queue(view),
        "has_more_keys": len(keys) > TOP_KEYS,
        "dead_url": url_of(site, "messages", name + DEAD_SUFFIX) if view.dead_of is None else None,
        **urls_of(site, name),
    }
    return render(request, site, "queue", Queue, context)


@page()
def queue_keys(request: HttpRequest, site: AdminSite, broker: Broker, *, name: str) -> HttpResponse:
    """A queue's keys by name, in pages, all or those that begin with a text."""
    prefix, after = request.GET.get("prefix", ""), request.GET.get("after")
    found = find_keys(broker, name, conf.read().page_size, prefix=prefix, after=after)
    kept = {"prefix": prefix} if prefix else {}
    context = {
        "title": f"Keys of {name}",
        "keys": _keys(found.keys),
        "prefix": prefix,
        "following": None if found.following is None else urlencode({**kept, "after": found.following}),
        "first": urlencode(kept),
        "is_first": after is None,
        **urls_of(site, name),
    }
    return render(request, site, "keys", Queue, context)


def _keys(found: Sequence[overview.KeyView]) -> list[dict[str, Any]]:
    """With what may be done to each."""
    return [
        {"view": each, "actions": offered_on_key(paused=each.paused, limited=each.limits is not None)} for each in found
    ]


# -- sessions ----------------------------------------------------------------------------------------------------------


@page()
def sessions(request: HttpRequest, site: AdminSite, broker: Broker) -> HttpResponse:
    """The consumer processes."""
    seen = overview.look(broker, queues=(), held=True)
    quiet = silent(seen)
    context = {
        "title": "Sessions",
        "sessions": [
            {
                "view": each,
                "queues": ", ".join(name for name in each.queues if not overview.is_internal(name)),
                "beat": moment(each.beat_ms) if each.beat_ms else None,
                "age": _age(heard_s(seen, each)),
                "is_silent": each in quiet,
            }
            for each in seen.sessions
        ],
    }
    return render(request, site, "sessions", Session, context)
