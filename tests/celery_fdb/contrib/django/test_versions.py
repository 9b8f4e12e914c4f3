"""What only a newer Django has, or one with the admin."""

import importlib
import sys

import django
import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from kit.processes import run_python

from celery_fdb.contrib.django import checks

BACKEND = "celery_fdb.contrib.django.backend"
OLDER, NEWER = (5, 2, 0, "final", 0), (6, 0, 0, "final", 0)
TASKS = {"default": {"BACKEND": f"{BACKEND}.CeleryBackend"}}


def test_the_backend_of_django_tasks_needs_them(monkeypatch):
    monkeypatch.setattr(django, "VERSION", OLDER)
    monkeypatch.setitem(sys.modules, "django.tasks", None)  # as where there is none
    monkeypatch.delitem(sys.modules, BACKEND, raising=False)
    with pytest.raises(ImproperlyConfigured) as caught:
        importlib.import_module(BACKEND)
    assert f"Django 6.0, and this is Django {django.get_version()}" in str(caught.value)
    assert "Upgrade Django, or use Celery's own tasks" in str(caught.value)


def test_an_import_that_fails_for_another_reason_says_that(monkeypatch):
    monkeypatch.setattr(django, "VERSION", NEWER)
    monkeypatch.setitem(sys.modules, "django.tasks", None)
    monkeypatch.delitem(sys.modules, BACKEND, raising=False)
    with pytest.raises(ImportError, match=r"django\.tasks"):
        importlib.import_module(BACKEND)


@pytest.mark.parametrize(
    ("has_tasks", "tasks", "found"),
    [(False, TASKS, ["celery_fdb.W014"]), (False, {}, []), (False, {"default": {}}, []), (True, TASKS, [])],
)
def test_a_django_that_ignores_tasks_is_told_of(configure, monkeypatch, has_tasks, tasks, found):
    monkeypatch.setattr(django, "VERSION", NEWER if has_tasks else OLDER)
    configure(TASKS=tasks)
    told = list(checks._check_tasks())
    assert [each.id for each in told] == found
    assert all(each.hint for each in told)


WITHOUT_ADMIN = """
import django
from django.conf import settings

installed = ["django.contrib.auth", "django.contrib.contenttypes", "celery_fdb.contrib.django"]
settings.configure(INSTALLED_APPS=installed, CELERY_FDB={"BROKER_URL": "fdb+memory://x", "CHECKS": False})
django.setup()
from celery_fdb.contrib.django import checks, pages, urls

print([each.id for each in checks.check_project()])
"""


def test_without_the_admin_there_are_pages_and_a_warning():
    """Its models can't be imported then."""
    ran = run_python("-c", WITHOUT_ADMIN, exit_code=None)
    assert (ran.stdout, ran.stderr) == ("['celery_fdb.W009']\n", "")


def test_dumpdata_finds_no_rows_of_models_without_a_table(capsys):
    for which in ([], ["--all"]):
        call_command("dumpdata", "celery_fdb", *which)
        assert capsys.readouterr().out.strip() == "[]"
