"""The pages of the admin for dead letters: the queues that hold them, and what those of one or of all died of."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.sites import AdminSite
from django.http import HttpRequest, HttpResponse
from django.utils.http import urlencode

from celery_fdb.contrib.django.models import DeadLetter
from celery_fdb.contrib.django.pages.filtering import filter_form, filter_of
from celery_fdb.contrib.django.pages.page import message_url, page, render, url_of, urls_of
from celery_fdb.inspection import overview
from celery_fdb.inspection.dead_letters.groups import MOST_COUNTED, Group, Groups, group, group_all
from celery_fdb.inspection.dead_letters.queues import dead_queues
from celery_fdb.inspection.filters import Filter
from celery_fdb.inspection.moments import age
from celery_fdb.operations.catalogue import offered_on_cause
from kombu_fdb import Broker
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX

__all__ = ["causes", "dead_letters", "groups"]

#: Groups that are shown.
MOST_GROUPS = 200
#: Queues of one group that are named.
MOST_QUEUES = 5
#: Letters that are counted if somebody asks for more.
MANY_COUNTED = 100_000


@page()
def dead_letters(request: HttpRequest, site: AdminSite, broker: Broker) -> HttpResponse:
    """The queues of dead letters: ``<queue>.dead``, and those that dead-letter exchanges lead to."""
    seen = overview.look(broker)
    homes = dead_queues(broker, seen)
    context = {
        "title": "Dead letters",
        "queues": [
            {
                "view": each,
                "homes": ", ".join(sorted(homes[each.name])),
                "oldest": age(each.oldest_age_s),
                "url": url_of(site, "messages", each.name),
                "groups": url_of(site, "groups", each.name),
            }
            for each in seen.queues
            if each.name in homes
        ],
    }
    return render(request, site, "dead_letters", DeadLetter, context)


@page()
def groups(request: HttpRequest, site: AdminSite, broker: Broker, *, name: str) -> HttpResponse:
    """A queue's dead letters by task, error and reason, counted among the first of them."""
    wanted, counts_more = filter_of(request.GET), "more" in request.GET
    found = group(broker, name, wanted, most=MANY_COUNTED if counts_more else MOST_COUNTED)
    context = {
        "title": f"What died in {name.removesuffix(DEAD_SUFFIX)}",
        "everywhere": False,
        "counts_more": counts_more,
        "actions": offered_on_cause(),
        **_context(site, found, wanted),
        **urls_of(site, name),
    }
    return render(request, site, "groups", DeadLetter, context)


@page()
def causes(request: HttpRequest, site: AdminSite, broker: Broker) -> HttpResponse:
    """The dead letters of all queues by task, error and reason, counted among the first of them."""
    wanted, counts_more = filter_of(request.GET), "more" in request.GET
    seen = overview.look(broker)
    homes = dead_queues(broker, seen)
    queues = [each.name for each in seen.queues if each.name in homes and each.ready]
    found = group_all(broker, queues, wanted, most=MANY_COUNTED if counts_more else MOST_COUNTED)
    context = {
        "title": "What died in all queues",
        "everywhere": True,
        "counts_more": counts_more,
        "actions": offered_on_cause(everywhere=True),
        **_context(site, found, wanted),
        **urls_of(site, ""),
    }
    return render(request, site, "groups", DeadLetter, context)


def _context(site: AdminSite, found: Groups, wanted: Filter) -> dict[str, Any]:
    return {
        "groups": [_shown(site, each) for each in found.groups[:MOST_GROUPS]],
        "hidden": max(len(found.groups) - MOST_GROUPS, 0),
        "found": found,
        "more": urlencode({**wanted.fields(), "more": "1"}),
        **filter_form(wanted),
        "unfiltered": "",
    }


def _shown(site: AdminSite, each: Group) -> dict[str, Any]:
    fields = each.filter.fields()
    queues = [(name, f"{url_of(site, 'messages', name)}?{urlencode(fields)}", n) for name, n in each.queues.items()]
    return {
        "group": each,
        "fields": sorted(fields.items()),
        "queues": queues[:MOST_QUEUES],
        "more_queues": max(len(queues) - MOST_QUEUES, 0),
        "url": queues[0][1],
        "example": message_url(site, each.example_in, each.example),
    }
