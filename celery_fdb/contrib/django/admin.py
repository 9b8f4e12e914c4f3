"""Admin entries without tables: their pages are the dashboard's, and never query the database.

The dashboard is at ``celery_fdb/queue/`` of the admin. The pages' addresses of earlier versions redirect to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import quote, unquote
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.urls import URLPattern, path, re_path, reverse

from celery_fdb.contrib.django import conf, models

View = Callable[..., HttpResponseBase]


class StoreAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # not generic when it runs
    """The permissions of an entry, and the addresses of its pages."""

    #: The entry's page, among the dashboard's.
    page = ""
    #: Addresses of earlier versions, with their names, the pages of today, and the fields of these pages' queries.
    old: tuple[tuple[str, str, str, dict[str, str]], ...] = ()

    def get_urls(self) -> list[URLPattern]:
        addresses = [("", "changelist", self.page, dict[str, str]()), *self.old]
        entry = f"celery_fdb_{self.opts.model_name}"
        return [
            path(address, self._view(self._leads_to(page, **given)), name=f"{entry}_{name}")
            for address, name, page, given in addresses
        ]

    def _view(self, view: View) -> Any:
        """For staff only, with CSRF protection, as all pages of the admin; the page says what a browser keeps."""
        return conf.outside_transactions(self.admin_site.admin_view(view, cacheable=True))

    def _address(self, page: str = "") -> str:
        return reverse("admin:celery_fdb_queue_changelist", current_app=self.admin_site.name) + page

    def _leads_to(self, page: str, **given: str) -> View:
        """``given``: the field of the query for each part of the address."""

        def lead(request: HttpRequest, **parts: str) -> HttpResponse:
            query = request.GET.copy()
            for part, text in parts.items():
                query[given[part]] = name_in(text)
            asked = query.urlencode()
            return HttpResponseRedirect(self._address(page) + (f"?{asked}" if asked else ""))

        return lead

    def has_module_permission(self, request: HttpRequest) -> bool:
        return models.allows(request, "view_queue")

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        del obj
        return models.allows(request, "view_queue")

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        del obj
        return models.allows(request, "manage_queue")

    def has_add_permission(self, request: HttpRequest) -> bool:
        del request
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        del request, obj
        return False


@admin.register(models.Queue)
class QueueAdmin(StoreAdmin):
    """The entry at whose addresses the dashboard is."""

    old = (
        ("find/", "find", "task", {}),
        ("<str:name>/change/", "change", "queue", {"name": "queue"}),
        ("<str:name>/keys/", "keys", "keys", {"name": "queue"}),
        ("<str:name>/messages/", "messages", "messages", {"name": "queue"}),
        ("<str:name>/groups/", "groups", "dead", {"name": "queue"}),
        ("<str:name>/message/<str:spot>/", "message", "message", {"name": "queue", "spot": "spot"}),
    )

    def get_urls(self) -> list[URLPattern]:
        _, *old = super().get_urls()
        history = path("<str:object_id>/history/", self._view(self._history), name="celery_fdb_queue_history")
        pages = re_path(r"^(?P<path>.*)$", self._view(self._page), name="celery_fdb_queue_pages")
        first = path("", self._view(self._page), {"path": ""}, name="celery_fdb_queue_changelist")
        return [first, history, *old, pages]

    def _page(self, request: HttpRequest, path: str) -> HttpResponseBase:
        from celery_fdb.contrib.django.pages import page

        site = self.admin_site
        around = {str(site.site_header): reverse("admin:index", current_app=site.name)}
        return page(request, path, around=around, log_of=self._log_of)

    def _log_of(self, queue: str) -> str:
        name = quote(models.fit(queue)) or NO_NAME
        return reverse("admin:celery_fdb_queue_history", args=(name,), current_app=self.admin_site.name)

    def _history(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """The history of a queue, by the queue's name in the log."""
        return self.history_view(request, quote(name_in(object_id)))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> models.Queue:
        """The object of the history page, which shows log entries of any name."""
        del request, from_field
        return models.Queue(name=object_id or "(no name)")


admin.site.register(models.DeadLetter, StoreAdmin, page="dead", old=(("causes/", "causes", "causes", {}),))
admin.site.register(models.Session, StoreAdmin, page="sessions")


#: Spellings in an address that ``quote`` does not give: of an empty name, and of a dot in a name of dots only.
NO_NAME, DOT = "_", "_."


def name_in(text: str) -> str:
    """A queue's name, or a message's token, as it stands in an old address."""
    return "" if text == NO_NAME else unquote(text.replace(DOT, "."))
