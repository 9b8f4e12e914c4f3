"""The audit of deeds as entries of the admin's log."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType

from celery_fdb.contrib.django.models import Queue
from celery_fdb.contrib.django.pages.text import fit

__all__ = ["AdminAudit"]


class AdminAudit:
    """Implements :class:`~celery_fdb.operations.audit.Audit`."""

    def __init__(self, user: Any) -> None:
        self.user = user

    def begin(self, queue: str, text: str) -> AdminEntry:
        entry = LogEntry.objects.create(
            user_id=self.user.pk,
            content_type_id=ContentType.objects.get_for_model(Queue, for_concrete_model=False).pk,
            object_id=fit(queue),
            object_repr=fit(queue)[:200],
            action_flag=CHANGE,
            change_message=fit(text),
        )
        return AdminEntry(entry)


class AdminEntry:
    """Implements :class:`~celery_fdb.operations.audit.Entry`."""

    def __init__(self, entry: LogEntry) -> None:
        self.entry = entry

    def complete(self, text: str) -> None:
        self.entry.change_message = fit(text)
        self.entry.save(update_fields=["change_message"])
