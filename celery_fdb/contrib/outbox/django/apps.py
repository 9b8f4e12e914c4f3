from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Error, register
from django.utils.translation import gettext_lazy as _


class CeleryOutboxConfig(AppConfig):
    """The label is ``celery_outbox``: the permission to see rows is ``celery_outbox.view_outboxrow``."""

    name = "celery_fdb.contrib.outbox.django"
    label = "celery_outbox"
    verbose_name = _("Celery outbox")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        register(check_table, deploy=True)


def check_table(**_: Any) -> list[CheckMessage]:
    """``celery_outbox.E001`` of ``check --deploy``: the outbox has no table, so that every ``delay`` of it fails."""
    from django.db import Error as DatabaseError
    from django.db import connections, router

    from celery_fdb.contrib.outbox import TABLE
    from celery_fdb.contrib.outbox.django.models import OutboxRow

    text, hint = "The outbox's table is missing.", "Run manage.py migrate celery_outbox."
    try:
        if TABLE in connections[router.db_for_write(OutboxRow)].introspection.table_names():
            return []
    except DatabaseError as error:
        text, hint = f"The outbox's database does not answer: {error}.", "Start it, or correct DATABASES."
    return [Error(text, hint=hint, id="celery_outbox.E001")]
