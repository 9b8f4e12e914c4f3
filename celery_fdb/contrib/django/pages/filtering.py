"""The filter of a page, in its address and as a form; moments are in the time zone of the pages."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import tzinfo
from typing import Any

from django.conf import settings
from django.utils import timezone

from celery_fdb.inspection.filters import Filter
from celery_fdb.inspection.moments import moment

__all__ = ["filter_form", "filter_of", "zone"]

#: Sent by the form, in which an empty input asks for nothing; in an address, an empty key is that of messages without.
OF_THE_FORM = "filter"
#: Name, label, type of the input, what is written into it.
INPUTS = (
    ("task", "Task", "search", "shop.pay or shop.*"),
    ("error", "Error", "search", "KeyError, or - for none"),
    ("reason", "Reason", "search", "rejected, expired, ..."),
    ("key", "Key", "search", ""),
    ("text", "Id contains", "search", ""),
    ("since", "Since", "datetime-local", ""),
    ("until", "Until", "datetime-local", ""),
)


def zone() -> tzinfo:
    """In which moments without a zone are meant."""
    return timezone.get_current_timezone() if settings.USE_TZ else timezone.get_default_timezone()


def filter_of(given: Mapping[str, str]) -> Filter:
    """Raises ``InvalidArgument``."""
    fields = {name: value for name, value in given.items() if value or OF_THE_FORM not in given}
    return Filter.of(fields, zone())


def filter_form(wanted: Filter) -> dict[str, Any]:
    """For the templates: what the filter is called, its inputs, and its fields for deeds on all that match."""
    values = {
        **wanted.fields(),
        "since": _local(wanted.since_ms),
        "until": _local(wanted.until_ms),
    }
    return {
        "filtered": str(wanted),
        "filter_inputs": [(*each, values.get(each[0], "")) for each in INPUTS],
        "filter_fields": sorted(wanted.fields().items()),
    }


def _local(ms: int | None) -> str:
    return "" if ms is None else f"{moment(ms).astimezone(zone()):%Y-%m-%dT%H:%M:%S}"
