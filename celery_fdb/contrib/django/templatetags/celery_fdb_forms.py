"""``{% load celery_fdb_forms %}``: hidden fields that come back as they were sent."""

from __future__ import annotations

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

from celery_fdb.operations.deed import carried

__all__ = ["hidden_field", "register"]

register = template.Library()


@register.simple_tag
def hidden_field(name: str, value: str) -> SafeString:
    """A queue or key of any name."""
    return format_html('<input type="hidden" name="{}" value="{}">', *carried(name, str(value)))
