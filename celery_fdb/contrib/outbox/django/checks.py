"""``manage.py check --deploy``."""

from __future__ import annotations

from typing import Any

from django.core.checks import CheckMessage, Error
from django.db import Error as DatabaseError
from django.db import connections, router

from celery_fdb.contrib.outbox.django.models import OutboxRow
from celery_fdb.contrib.outbox.rows import TABLE


def check_table(**_: Any) -> list[CheckMessage]:
    """``celery_outbox.E001``: the outbox has no table, so that every ``delay`` of it fails."""
    connection = connections[router.db_for_write(OutboxRow)]
    try:
        if TABLE in connection.introspection.table_names():
            return []
    except DatabaseError as error:
        return [_error(f"The outbox's database does not answer: {error}.", "Start it, or correct DATABASES.")]
    return [_error("The outbox's table is missing.", "Run manage.py migrate celery_outbox.")]


def _error(text: str, hint: str) -> CheckMessage:
    return Error(text, hint=hint, id="celery_outbox.E001")
