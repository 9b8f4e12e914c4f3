"""Handles ``celery_fdb`` in ``INSTALLED_APPS``, a common first mistake: it is not a Django app.

Without this there would be no error, and no pages, no checks and no ``manage.py fdb``.
"""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig, apps
from django.core.checks import CheckMessage, Warning, register  # noqa: A004 - Django's name

THE_APP = "celery_fdb.contrib.django"


class NotTheApp(AppConfig):
    """The label is not that of ``celery_fdb.contrib.django``, so both entries together start."""

    name = "celery_fdb"
    label = "celery_fdb_package"

    def ready(self) -> None:
        register(check_entry)


def check_entry(**_: Any) -> list[CheckMessage]:
    """W015."""
    if not apps.is_installed(NotTheApp.name):
        return []
    hint = f"Remove it: {THE_APP} is there." if apps.is_installed(THE_APP) else f"Write {THE_APP} instead."
    text = "celery_fdb in INSTALLED_APPS is no Django app: it brings no pages, checks or commands."
    return [Warning(text, hint=hint, id="celery_fdb.W015")]
