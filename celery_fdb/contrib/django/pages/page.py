"""What all pages of the admin have in common: who may see them, where they are, and what is shown if the store fails.

A view is made by :func:`page`: it is called with the permission checked and with an open broker. A store that does not
answer, and settings that can't be used, are a page that says so and names the next step. Whatever is stored, and
whatever is asked for, a page answers: bytes that can't be read are a page that says so, and never the server's fault.
"""

from __future__ import annotations

import functools
import logging
import struct
from collections.abc import Callable, Sequence
from typing import Any

from django.contrib.admin.sites import AdminSite
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse

from celery_fdb.contrib.django import conf
from celery_fdb.contrib.django.models import MANAGE, VIEW, VIEW_BODY, Queue, allows
from celery_fdb.contrib.django.pages import store
from celery_fdb.contrib.django.pages.text import fit
from celery_fdb.operations.deed import Deed
from kombu_fdb import Broker, Spot
from kombu_fdb.api.arguments import State
from kombu_fdb.errors import FormatError, KombuFDBError, LimitExceeded, QueueError
from kombu_fdb.primitives.masking import masked_text

__all__ = [
    "STATES",
    "View",
    "allowed",
    "may_see_bodies",
    "message_url",
    "name_in",
    "page",
    "render",
    "spot_of",
    "url_of",
    "urls_of",
]

logger = logging.getLogger(__name__)

View = Callable[..., HttpResponse]
STATES: tuple[State, ...] = ("ready", "delayed", "leased")


#: The store answered: something in it, or in the request, is not as it should be.
_REFUSED = (QueueError, LimitExceeded, FormatError)
#: What reading bytes of another shape than ours ends in, wherever that happens.
_UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, struct.error)
#: In an address, the queue whose name is empty; ``quote`` never writes it.
_NO_NAME = "_"
#: Likewise, a dot of a name that has nothing else.
_DOT = "_."


def page(permission: str = VIEW) -> Callable[[Callable[..., HttpResponse]], View]:
    """A view of the store: with the permission, an open broker, and a page for what can go wrong."""

    def decorate(view: Callable[..., HttpResponse]) -> View:
        @functools.wraps(view)
        def guarded(request: HttpRequest, site: AdminSite, **arguments: str) -> HttpResponse:
            if not allows(request, permission):
                raise PermissionDenied
            try:
                named = {name: name_in(text) for name, text in arguments.items()}
                return _answer(view, request, site, store.broker(), named)
            except KombuFDBError as error:
                store.forget()
                return _unavailable(request, site, error)

        return guarded

    return decorate


def _answer(
    view: Callable[..., HttpResponse], request: HttpRequest, site: AdminSite, broker: Broker, named: dict[str, str]
) -> HttpResponse:
    """The view's, rendered: a template may be the first to look at what is stored. Raises what the store raises."""
    try:
        answer = view(request, site, broker, **named)
        return answer.render() if isinstance(answer, TemplateResponse) else answer
    except _REFUSED as error:
        return _unreadable(request, site, str(error))
    except _UNREADABLE as error:
        logger.exception("a page of the broker can't be shown")
        return _unreadable(request, site, repr(error))


def _unreadable(request: HttpRequest, site: AdminSite, reason: str) -> HttpResponse:
    context = {"title": "Unreadable", "reason": masked_text(reason), "acted": request.method == "POST"}
    return render(request, site, "unreadable", Queue, context, status=422)


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
    return render(request, site, "unavailable", Queue, context, status=503)


def render(
    request: HttpRequest, site: AdminSite, template: str, model: Any, context: dict[str, Any], status: int = 200
) -> HttpResponse:
    request.current_app = site.name
    context = {
        **site.each_context(request),
        "opts": model._meta,
        "can_manage": allows(request, MANAGE),
        **context,
    }
    return _Page(request, f"admin/celery_fdb/{template}.html", context, status=status)


class _Page(TemplateResponse):
    @property
    def rendered_content(self) -> str:
        return fit(super().rendered_content)


# -- who may -----------------------------------------------------------------------------------------------------------


def may_see_bodies(request: HttpRequest) -> bool:
    """Whether anybody may, and this user does."""
    return conf.read().show_bodies and allows(request, VIEW_BODY)


def allowed(request: HttpRequest, deeds: Sequence[Deed]) -> list[Deed]:
    """Without those whose form would show what the user may not see."""
    sees = may_see_bodies(request)
    return [each for each in deeds if sees or not each.shows_body]


# -- addresses ---------------------------------------------------------------------------------------------------------


def name_in(text: str) -> str:
    """A name, or a message's token, as it stands in an address."""
    return "" if text == _NO_NAME else unquote(text.replace(_DOT, "."))


def _quoted(name: str) -> str:
    # A browser takes "." and ".." for parts of the path.
    return _DOT * len(name) if name in {".", ".."} else quote(name) or _NO_NAME


def url_of(site: AdminSite, view: str, name: str) -> str:
    return reverse(f"admin:celery_fdb_queue_{view}", args=(_quoted(name),), current_app=site.name)


def message_url(site: AdminSite, name: str, spot: Spot | None) -> str:
    return reverse("admin:celery_fdb_queue_message", args=(_quoted(name), str(spot)), current_app=site.name)


def spot_of(token: str) -> Spot:
    """Where a message stands, as an address or a form names it."""
    try:
        return Spot.parse(token)
    except ValueError:
        raise Http404("no such message") from None


def urls_of(site: AdminSite, name: str) -> dict[str, Any]:
    """The pages of a queue, for templates."""
    views = ("change", "keys", "messages", "groups", "action", "history")
    return {"queue_name": name, "urls": {view: url_of(site, view, name) for view in views}}
