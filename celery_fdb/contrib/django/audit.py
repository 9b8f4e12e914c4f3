"""The audit of actions as entries of the admin's log."""

from __future__ import annotations

import re
from typing import Any

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType

from celery_fdb.contrib.django.models import Queue

#: What UTF-8 can't write (lone surrogates) and PostgreSQL can't store (NUL).
_UNFIT = re.compile("[\x00\ud800-\udfff]")


def fit(text: str) -> str:
    """Text from the store for Django's database: each such character becomes U+FFFD, so that it is seen."""
    return _UNFIT.sub("\ufffd", text)


class AdminAudit:
    """Implements :class:`~celery_fdb.operations.audit.Audit`, and its own entry once it has begun one."""

    def __init__(self, user: Any, entry: LogEntry | None = None) -> None:
        self.user = user
        self.entry = entry

    def begin(self, queue: str, text: str) -> AdminAudit:
        entry = LogEntry.objects.create(
            user_id=self.user.pk,
            content_type_id=ContentType.objects.get_for_model(Queue, for_concrete_model=False).pk,
            object_id=fit(queue),
            object_repr=fit(queue)[:200],
            action_flag=CHANGE,
            change_message=fit(text),
        )
        return AdminAudit(self.user, entry)

    def complete(self, text: str) -> None:
        assert self.entry is not None
        self.entry.change_message = fit(text)
        self.entry.save(update_fields=["change_message"])
