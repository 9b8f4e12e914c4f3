"""What only a newer Django has. ``django.tasks`` came with 6.0; all else here works with 4.2 and later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import django
from django.core.exceptions import ImproperlyConfigured

HAS_TASKS = django.VERSION >= (6, 0)
NO_TASKS = f"django.tasks came with Django 6.0, and this is Django {django.get_version()}."


@contextmanager
def tasks_needed() -> Iterator[None]:
    """Around imports from ``django.tasks``. Raises ``ImproperlyConfigured`` if this Django has none."""
    try:
        yield
    except ImportError as error:
        if HAS_TASKS:
            raise
        raise ImproperlyConfigured(f"{NO_TASKS} Upgrade Django, or use Celery's own tasks.") from error
