from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import register
from django.utils.translation import gettext_lazy as _


class CeleryOutboxConfig(AppConfig):
    """The label is ``celery_outbox``: the permission to see rows is ``celery_outbox.view_outboxrow``."""

    name = "celery_fdb.contrib.outbox.django"
    label = "celery_outbox"
    verbose_name = _("Celery outbox")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from celery_fdb.contrib.outbox.django import checks

        register(checks.check_table, deploy=True)
