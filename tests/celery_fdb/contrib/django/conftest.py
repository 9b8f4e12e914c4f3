"""Django inside the test's process, with a database in memory, and a broker of its own for each test."""

from __future__ import annotations

import runpy
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from kombu_fdb import Broker

django = pytest.importorskip("django", reason="Django is not installed")

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def _django() -> Iterator[None]:
    """Set up once per process: Django can't be set up twice."""
    from django.conf import settings
    from django.core.management import call_command
    from django.db import connection

    if not settings.configured:
        given = runpy.run_path(str(HERE / "settings.py"))
        settings.configure(**{name: value for name, value in given.items() if name.isupper()})
        urls = sys.modules[settings.ROOT_URLCONF] = types.ModuleType(settings.ROOT_URLCONF)
        django.setup()
        from django.contrib import admin
        from django.urls import include, path

        ours = include("celery_fdb.contrib.django.urls")
        urls.urlpatterns = [path("admin/", admin.site.urls), path("ops/fdb/", ours)]  # type: ignore[attr-defined]
    call_command("migrate", verbosity=0)
    yield
    connection.close()


@pytest.fixture
def database() -> Iterator[None]:
    """What a test writes into Django's database is rolled back after it."""
    from django.db import transaction

    with transaction.atomic():
        yield
        transaction.set_rollback(True)


@pytest.fixture
def configure() -> Iterator[Callable[..., None]]:
    """Changes Django's settings until the end of the test."""
    from django.test import override_settings

    changed: list[override_settings] = []

    def configure(**settings: Any) -> None:
        override = override_settings(**settings)
        override.enable()
        changed.append(override)

    yield configure
    for override in reversed(changed):
        override.disable()
    from celery_fdb.contrib.django.conf import lazy_broker

    lazy_broker.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Django's pages are those of ``tests/celery_fdb/web``."""
    return f"fdb+sqlite:///{tmp_path}/broker.db"


@pytest.fixture
def broker(url: str, configure: Callable[..., None]) -> Any:
    """The broker that the pages show."""
    from celery_fdb.contrib.django.conf import lazy_broker

    configure(CELERY_FDB={"BROKER_URL": url, "PAGE_SIZE": 5})
    Broker.open(url).close()
    return lazy_broker.broker()


@pytest.fixture
def app(url: str, new_app: Callable[..., Celery]) -> Celery:
    """A publisher of that broker."""
    app = new_app(url)
    app.conf.task_ignore_result = True
    return app


@pytest.fixture
def login() -> Callable[..., Any]:
    """A client of a member of staff with these permissions."""
    from django.contrib.auth.models import Permission, User
    from django.test import Client

    def login(*permissions: str, staff: bool = True, superuser: bool = False) -> Any:
        user = User.objects.create(username=f"user{User.objects.count()}", is_staff=staff, is_superuser=superuser)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        assert user.user_permissions.count() == len(permissions)
        client = Client(enforce_csrf_checks=True)
        client.force_login(user)
        return client

    return login


@pytest.fixture
def viewer(login: Callable[..., Any]) -> Any:
    return login("view_queue")


@pytest.fixture
def operator(login: Callable[..., Any]) -> Any:
    return login("view_queue", "manage_queue", "view_body")


@pytest.fixture(autouse=True)
def _jobs_are_kept(jobs_are_kept: None) -> None:
    """In each test here."""
