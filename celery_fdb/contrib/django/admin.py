"""Admin entries for what has no tables: their pages are views of our own, and never ask the database."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import quote
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path

from celery_fdb.contrib.django.models import MANAGE, VIEW, DeadLetter, Queue, Session, allows
from celery_fdb.contrib.django.pages import dead_letter_views, deed_views, message_views, views
from celery_fdb.contrib.django.pages.page import name_in, url_of
from celery_fdb.contrib.django.pages.text import fit

__all__ = ["DeadLetterAdmin", "QueueAdmin", "SessionAdmin"]


class StoreAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # not generic when it runs
    """Permissions of an entry, and the way its pages are reached."""

    changelist: Callable[..., HttpResponse]

    def get_urls(self) -> list[URLPattern]:
        name = self.opts.model_name
        return [path("", self._page(type(self).changelist), name=f"celery_fdb_{name}_changelist")]

    def _page(self, view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
        """Staff only, and with CSRF protection, as all pages of the admin."""
        bound = update_wrapper(partial(view, site=self.admin_site), view)
        return self.admin_site.admin_view(bound)

    def has_module_permission(self, request: HttpRequest) -> bool:
        return allows(request, VIEW)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        del obj
        return allows(request, VIEW)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        del obj
        return allows(request, MANAGE)

    def has_add_permission(self, request: HttpRequest) -> bool:
        del request
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        del request, obj
        return False


@admin.register(Queue)
class QueueAdmin(StoreAdmin):
    changelist = staticmethod(views.queues)
    object_history_template = "admin/celery_fdb/history.html"

    def get_urls(self) -> list[URLPattern]:
        return [
            *super().get_urls(),
            path("find/", self._page(message_views.find), name="celery_fdb_queue_find"),
            path("<str:name>/change/", self._page(views.queue), name="celery_fdb_queue_change"),
            path("<str:name>/keys/", self._page(views.queue_keys), name="celery_fdb_queue_keys"),
            path("<str:name>/messages/", self._page(message_views.queue_messages), name="celery_fdb_queue_messages"),
            path("<str:name>/groups/", self._page(dead_letter_views.groups), name="celery_fdb_queue_groups"),
            path("<str:name>/message/<str:spot>/", self._page(message_views.message), name="celery_fdb_queue_message"),
            path("<str:name>/action/", self._page(deed_views.act), name="celery_fdb_queue_action"),
            path(
                "<str:object_id>/history/",
                self.admin_site.admin_view(self._history),
                name="celery_fdb_queue_history",
            ),
        ]

    def _history(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """By the name as it stands in the log."""
        name = name_in(object_id)
        context = {"queue_url": url_of(self.admin_site, "change", name)}
        return self.history_view(request, quote(fit(name)), context)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Queue:
        """For the history page, which shows log entries of any name."""
        del request, from_field
        return Queue(name=object_id)


@admin.register(DeadLetter)
class DeadLetterAdmin(StoreAdmin):
    changelist = staticmethod(dead_letter_views.dead_letters)

    def get_urls(self) -> list[URLPattern]:
        causes = path("causes/", self._page(dead_letter_views.causes), name="celery_fdb_deadletter_causes")
        return [*super().get_urls(), causes]


@admin.register(Session)
class SessionAdmin(StoreAdmin):
    changelist = staticmethod(views.sessions)
