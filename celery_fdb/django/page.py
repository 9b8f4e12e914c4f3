"""What all pages of the admin have in common: who may see them, where they are, and what is shown if the store fails.

A view is made by :func:`page`: it is called with the permission checked and with an open broker. A store that does not
answer, and settings that can't be used, are a page that says so and names the next step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from django.contrib.admin.sites import AdminSite
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse

from celery_fdb.django import store
from celery_fdb.django.models import MANAGE, VIEW, Queue, allows
from celery_fdb.django.rows import Spot
from kombu_fdb.errors import KombuFDBError

__all__ = ["STATES", "View", "message_url", "page", "render", "url_of", "urls_of"]

View = Callable[..., HttpResponse]
STATES = ("ready", "delayed", "leased")


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
    return TemplateResponse(request, f"admin/celery_fdb/{template}.html", context, status=status)


# -- addresses ---------------------------------------------------------------------------------------------------------


def url_of(site: AdminSite, view: str, name: str) -> str:
    return reverse(f"admin:celery_fdb_queue_{view}", args=(quote(name),), current_app=site.name)


def message_url(site: AdminSite, name: str, spot: Spot) -> str:
    return reverse("admin:celery_fdb_queue_message", args=(quote(name), str(spot)), current_app=site.name)


def urls_of(site: AdminSite, name: str) -> dict[str, Any]:
    """The pages of a queue, for templates."""
    views = ("change", "keys", "messages", "action", "history")
    return {"queue_name": name, "urls": {view: url_of(site, view, name) for view in views}}
