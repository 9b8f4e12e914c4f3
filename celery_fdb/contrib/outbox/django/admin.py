"""A list of what is in the outbox, to look at. Arguments are not shown."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.conf import settings
from django.contrib import admin
from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from celery_fdb.contrib.outbox.django.models import OutboxRow
from celery_fdb.inspection import formats
from kombu_fdb.primitives.masking import masked_text


def _moment(milliseconds: int) -> datetime:
    """A moment as Django shows it in its time zone: without ``USE_TZ`` it changes none that names its zone."""
    found = formats.moment(milliseconds)
    return found if settings.USE_TZ else timezone.make_naive(found, timezone.get_default_timezone())


@admin.register(OutboxRow)
class OutboxRowAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # not generic when it runs
    """The rows; those that failed for good come first."""

    list_display = ("id", "task", "created", "due", "attempts", "masked_error")
    fields = list_display
    readonly_fields = list_display
    ordering = ("-attempts", "created_ms")
    show_full_result_count = False

    def lookup_allowed(self, lookup: str, value: Any, request: Any = None) -> bool:  # noqa: ARG002 - as Django asks
        """Refuse lookups by arguments, which are hidden: a reader could guess them letter by letter."""
        return lookup.split("__", maxsplit=1)[0] in {"id", "attempts", "created_ms", "due_ms"}

    @admin.display(description=_("task"))
    def task(self, row: OutboxRow) -> str:
        return row.task

    @admin.display(description=_("created"), ordering="created_ms")
    def created(self, row: OutboxRow) -> datetime:
        return _moment(row.created_ms)

    @admin.display(description=_("due"), ordering="due_ms")
    def due(self, row: OutboxRow) -> Any:
        if row.due_ms is None:
            return _("failed for good")
        return _moment(row.due_ms) if row.due_ms else _("now")

    @admin.display(description=_("error"))
    def masked_error(self, row: OutboxRow) -> str | None:
        """Masked here, too, as earlier versions stored the error as it was."""
        return row.error and masked_text(row.error)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse all changes, whatever permissions a user has: only a relay changes rows."""
        del request, obj
        return False

    has_add_permission = has_delete_permission = has_change_permission
