"""``{% load celery_fdb_time %}``: a moment of a view model, which is in UTC, as Django's settings want it."""

from __future__ import annotations

from datetime import datetime

from django import template
from django.conf import settings
from django.utils import timezone

__all__ = ["local", "register"]

register = template.Library()


@register.filter
def local(moment: datetime | None) -> datetime | None:
    """In the current time zone with ``USE_TZ``, else in the default one, and without a zone."""
    if moment is None or settings.USE_TZ:
        return moment  # templates localise it
    return timezone.make_naive(moment, timezone.get_default_timezone())
