"""Tests of what only a newer Celery has."""

from __future__ import annotations

import celery
import pytest

CELERY = celery.VERSION.major, celery.VERSION.minor


def since_celery(major: int, minor: int) -> pytest.MarkDecorator:
    """A mark for a test, or a parameter, that needs this Celery or a newer one."""
    return pytest.mark.skipif((major, minor) > CELERY, reason=f"Celery {major}.{minor} brought it")
