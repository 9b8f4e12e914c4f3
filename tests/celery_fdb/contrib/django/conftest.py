"""Django inside the test's process, with a database in memory, and a broker of its own for each test."""

import runpy
import sys
import types
from pathlib import Path

import pytest

from kombu_fdb import Broker

django = pytest.importorskip("django", reason="Django is not installed")

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def _django():
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
        urls.urlpatterns = [path("admin/", admin.site.urls), path("ops/fdb/", ours)]
    call_command("migrate", verbosity=0)
    yield
    connection.close()


@pytest.fixture
def database():
    """What a test writes into Django's database is rolled back after it."""
    from django.db import transaction

    with transaction.atomic():
        yield
        transaction.set_rollback(True)


@pytest.fixture
def configure():
    """Changes Django's settings until the end of the test."""
    from django.test import override_settings

    changed = []

    def configure(**settings):
        override = override_settings(**settings)
        override.enable()
        changed.append(override)

    yield configure
    for override in reversed(changed):
        override.disable()
    from celery_fdb.contrib.django.conf import lazy_broker

    lazy_broker.close()


@pytest.fixture
def url(tmp_path):
    """Django's pages are those of ``tests/celery_fdb/web``."""
    return f"fdb+sqlite:///{tmp_path}/broker.db"


@pytest.fixture
def broker(url, configure):
    """The broker that the pages show."""
    from celery_fdb.contrib.django.conf import lazy_broker

    configure(CELERY_FDB={"BROKER_URL": url, "PAGE_SIZE": 5})
    Broker.open(url).close()
    return lazy_broker.broker()


@pytest.fixture
def app(url, new_app):
    """A publisher of that broker."""
    app = new_app(url)
    app.conf.task_ignore_result = True
    return app


@pytest.fixture
def login():
    """A client of a member of staff with these permissions."""
    from django.contrib.auth.models import Permission, User
    from django.test import Client

    def login(*permissions, staff=True, superuser=False):
        user = User.objects.create(username=f"user{User.objects.count()}", is_staff=staff, is_superuser=superuser)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        assert user.user_permissions.count() == len(permissions)
        client = Client(enforce_csrf_checks=True)
        client.force_login(user)
        return client

    return login


@pytest.fixture
def viewer(login):
    return login("view_queue")


@pytest.fixture
def operator(login):
    return login("view_queue", "manage_queue", "view_body")


@pytest.fixture(autouse=True)
def _jobs_are_kept(jobs_are_kept):
    """In each test here."""
