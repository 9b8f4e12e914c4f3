"""The table of :mod:`celery_fdb.contrib.outbox`, so that Django migrates it. Only its statements write to it."""

from __future__ import annotations

import json
from typing import ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from celery_fdb.contrib.outbox import TABLE


class OutboxRow(models.Model):
    """A task that is to be published. Moments are milliseconds since 1970."""

    id: models.CharField[str, str] = models.CharField(_("id"), max_length=32, primary_key=True)
    signature: models.TextField[str, str] = models.TextField(_("signature"))
    created_ms: models.BigIntegerField[int, int] = models.BigIntegerField(_("created"))
    due_ms: models.BigIntegerField[int | None, int | None] = models.BigIntegerField(_("due"), null=True)
    attempts: models.IntegerField[int, int] = models.IntegerField(_("failed attempts"))
    error: models.TextField[str | None, str | None] = models.TextField(_("error"), null=True)  # noqa: DJ001 - none yet

    class Meta:
        db_table = TABLE
        indexes: ClassVar = [models.Index(fields=["due_ms"], name="celery_outbox_due")]
        default_permissions = ("view",)
        verbose_name = _("task in the outbox")
        verbose_name_plural = _("tasks in the outbox")

    def __str__(self) -> str:
        return f"{self.task} ({self.id})"

    @property
    def task(self) -> str:
        """The task's name."""
        try:
            return str(json.loads(self.signature)["task"])
        except (ValueError, LookupError, TypeError):
            return "?"
