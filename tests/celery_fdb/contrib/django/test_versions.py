"""What only a newer Django has: an older one says so."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import django
import pytest
from django.core.exceptions import ImproperlyConfigured

from celery_fdb.contrib.django import checks, conf

BACKEND = "celery_fdb.contrib.django.backend"
TASKS = {"default": {"BACKEND": f"{BACKEND}.CeleryBackend"}}


def test_the_backend_of_django_tasks_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conf, "HAS_TASKS", False)
    monkeypatch.setitem(sys.modules, "django.tasks", None)  # as where there is none
    monkeypatch.delitem(sys.modules, BACKEND, raising=False)
    with pytest.raises(ImproperlyConfigured) as caught:
        importlib.import_module(BACKEND)
    assert f"Django 6.0, and this is Django {django.get_version()}" in str(caught.value)
    assert "Upgrade Django, or use Celery's own tasks" in str(caught.value)


def test_an_import_that_fails_for_another_reason_says_that() -> None:
    expected = ImportError if conf.HAS_TASKS else ImproperlyConfigured
    with pytest.raises(expected) as caught, conf.tasks_needed():
        raise ImportError("no such thing")
    assert "no such thing" in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize(
    ("has_tasks", "tasks", "found"),
    [(False, TASKS, ["celery_fdb.W014"]), (False, {}, []), (False, {"default": {}}, []), (True, TASKS, [])],
)
def test_a_django_that_ignores_tasks_is_told_of(
    configure: Callable[..., None], monkeypatch: pytest.MonkeyPatch, has_tasks: bool, tasks: Any, found: list[str]
) -> None:
    monkeypatch.setattr(checks, "HAS_TASKS", has_tasks)
    configure(TASKS=tasks)
    told = list(checks._check_tasks())
    assert [each.id for each in told] == found
    assert all(each.hint for each in told)
