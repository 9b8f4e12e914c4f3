"""What is done from the pages (:mod:`celery_fdb.operations`).

A deed is asked for by POST, shown as a question with its form, and done when that comes back confirmed, also by POST.
One in parts shows how far it is, and goes on if asked to.

Deeds need the permission ``celery_fdb.manage_queue``; one whose form shows arguments, ``celery_fdb.view_body`` as well.
"""

from __future__ import annotations

from django.contrib import messages
from django.contrib.admin.sites import AdminSite
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.utils.http import url_has_allowed_host_and_scheme

from celery_fdb.contrib.django import conf
from celery_fdb.contrib.django.models import MANAGE, Queue
from celery_fdb.contrib.django.pages.audit import AdminAudit
from celery_fdb.contrib.django.pages.filtering import zone
from celery_fdb.contrib.django.pages.page import allowed, page, render, spot_of, url_of, urls_of
from celery_fdb.contrib.django.pages.text import fit
from celery_fdb.operations.asked import AskedAnew
from celery_fdb.operations.catalogue import DEEDS
from celery_fdb.operations.deed import Deed, Field, Outcome, Request, names_of, perform
from kombu_fdb import Broker
from kombu_fdb.errors import KombuFDBError, StoreError

__all__ = ["act"]

#: Messages that one deed may be asked for; Django takes 1,000 fields of a form (DATA_UPLOAD_MAX_NUMBER_FIELDS).
MOST_SELECTED = 500
#: Without the project's Celery app.
FIX_APP = "Set CELERY_FDB['APP'] so that results become REVOKED."


@page(MANAGE)
def act(request: HttpRequest, site: AdminSite, broker: Broker, *, name: str) -> HttpResponse:
    """Ask, and when the answer is yes, act."""
    if request.method != "POST":
        return HttpResponseNotAllowed(["POST"])
    deed, back = DEEDS.get(request.POST.get("action", "")), _back(request, site, name)
    tokens = request.POST.getlist("selected")[:MOST_SELECTED]
    if deed is None or (deed.selects and not tokens) or (deed.selects_one and len(tokens) > 1):
        number = "one message" if deed is not None and deed.selects_one else "the messages"
        messages.warning(request, f"Choose an action and select {number} for it. Nothing was changed.")
        return HttpResponseRedirect(back)
    if not allowed(request, [deed]):
        raise PermissionDenied
    asked = _asked(request, broker, deed, name, tokens)
    try:
        if "confirmed" not in request.POST:
            return _ask(request, site, broker, deed, asked, back)
        outcome = perform(broker, deed, asked, AdminAudit(request.user))
    except StoreError:
        raise
    except AskedAnew as error:
        return _ask(request, site, broker, deed, asked, back, str(error))
    except KombuFDBError as error:
        return _refuse(request, site, deed, asked, back, error)
    if outcome.following:
        return _go_on(request, site, deed, asked, back, outcome)
    (messages.warning if outcome.missed else messages.success)(request, fit(outcome.text))
    return HttpResponseRedirect(back)


def _asked(request: HttpRequest, broker: Broker, deed: Deed, name: str, tokens: list[str]) -> Request:
    spots, name = [spot_of(token) for token in tokens], deed.target(name)
    key, fields = deed.read({each: str(value) for each, value in request.POST.items()})
    return Request(
        name,
        spots,
        key,
        names_of(broker, name, spots),
        conf.app_of_broker(conf.read()),
        FIX_APP,
        fields,
        request.POST.get("mark", ""),
        zone(),
    )


def _ask(
    request: HttpRequest, site: AdminSite, broker: Broker, deed: Deed, asked: Request, back: str, error: str = ""
) -> HttpResponse:
    return _show(request, site, deed, deed.ask(broker, asked), back, deed.form(broker, asked), error=error)


def _go_on(
    request: HttpRequest, site: AdminSite, deed: Deed, asked: Request, back: str, outcome: Outcome
) -> HttpResponse:
    """Some of it is done; the rest, if the user wants it."""
    asked = asked._replace(mark=outcome.following)
    fields = [each._replace(kind="hidden", value=asked.fields.get(each.name, "")) for each in deed.fields]
    return _show(request, site, deed, asked, back, fields, done=outcome.text)


def _refuse(
    request: HttpRequest, site: AdminSite, deed: Deed, asked: Request, back: str, error: KombuFDBError
) -> HttpResponse:
    """A form is shown again as it came, with what is wrong in it."""
    if deed.fields and "confirmed" in request.POST:
        form = [each._replace(value=asked.fields.get(each.name, "")) for each in deed.fields]
        return _show(request, site, deed, asked, back, form, error=str(error))
    messages.error(request, fit(str(error)))
    return HttpResponseRedirect(back)


def _show(
    request: HttpRequest,
    site: AdminSite,
    deed: Deed,
    asked: Request,
    back: str,
    form: list[Field],
    *,
    done: str = "",
    error: str = "",
) -> HttpResponse:
    visible = {each.name for each in deed.fields}
    context = {
        "title": "Go on?" if done else "Are you sure?",
        "action": deed,
        "question": deed.question(asked),
        "spots": [(str(each), asked.names.get(each.message_id)) for each in asked.spots],
        "key": asked.key,
        "form": form,
        "hidden_fields": [(name, value) for name, value in asked.fields.items() if name not in visible],
        "mark": asked.mark,
        "done": done,
        "error": error,
        "back": back,
        "everywhere": deed.everywhere,
        **urls_of(site, "" if deed.everywhere else asked.queue),
    }
    return render(request, site, "confirm", Queue, context, status=422 if error else 200)


def _back(request: HttpRequest, site: AdminSite, name: str) -> str:
    """Where the user came from, if that is one of our pages."""
    back = request.POST.get("back", "")
    is_ours = url_has_allowed_host_and_scheme(back, allowed_hosts=None) and back.startswith("/")
    return back if is_ours else url_of(site, "messages", name)
