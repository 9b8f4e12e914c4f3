"""A dashboard inside the test's process, over a store of its own."""

import os
from contextlib import ExitStack

import pytest

pytest.importorskip("starlette", reason="the dashboard's libraries are not installed")

from kit.browser import chromium
from kit.dashboard import Person

from celery_fdb.web import dashboard
from kombu_fdb.testing.stores import MemoryStores


@pytest.fixture
def url():
    """No page asks which store it reads. Those on the others: ``test_every_page_over_a_store``, and the browser's."""
    with MemoryStores():
        yield f"fdb+memory://{os.urandom(6).hex()}"


@pytest.fixture
def app(url, new_app):
    """A publisher of that broker."""
    app = new_app(url)
    app.conf.task_ignore_result = True
    return app


@pytest.fixture
def visit(url, broker):
    """Makes a person at a dashboard with these settings; it is open to all unless they say otherwise."""
    with ExitStack() as stack:

        def visit(given=url, **settings):
            if not {"token", "user"} & settings.keys():
                settings = {"anonymous": True, "hosts": ("testserver",), **settings}
            return stack.enter_context(Person(dashboard(given, **settings), raise_server_exceptions=True))

        yield visit


@pytest.fixture
def viewer(visit):
    return visit()


@pytest.fixture
def operator(visit, app):
    return visit(app=app, read_only=False, show_bodies=True)


@pytest.fixture(scope="session", name="chromium")
def _chromium(tmp_path_factory):
    """One for all tests of a process."""
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser
