"""The result store over the memory store, SQLite and a real FoundationDB; the backend over the latter two."""

import os
import time

import pytest
from celery import Celery, _state
from celery.app.task import Context
from kombu.serialization import prepare_accept_content

from celery_fdb.results.store import ResultStore
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.process.connect import open_store
from kombu_fdb.settings.location import locate, parse_url
from kombu_fdb.settings.options import parse_options
from kombu_fdb.testing.clock import ManualClock


@pytest.fixture
def database(any_store):
    database = open_store(locate(parse_url(any_store), parse_options()), parse_options(), timeout_s=10.0).database
    yield database
    database.close()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def store(database, clock):
    return ResultStore(database, os.urandom(6).hex(), clock=clock, timeout_s=30.0)


def scan(store):
    """Every key of the results."""
    return [key for key, _ in store._read(lambda tr: tr.get_range(*range_of(store.keys.prefix)))]


@pytest.fixture(name="scan")
def _scan():
    return scan


def add(x, y):
    return x + y


def total(numbers):
    return sum(numbers)


def errback(*args):
    pass


def report(task_id):
    pass


@pytest.fixture
def make_app(url):
    """Applications with three tasks; closed after the test."""
    made = []
    before = _state.get_current_app()

    def make_app(backend=None, **conf):
        app = Celery("results", broker=url, backend=backend or url)
        app.conf.update(broker_connection_timeout=5.0, **conf)
        for task in (add, total, errback, report):
            app.task(name=task.__name__)(task)
        made.append(app)
        return app

    yield make_app
    _state._set_current_app(before)
    for app in made:
        app.pool.force_close_all()
        if app._backend is not None and app.backend._client is not None:
            app.backend._client.detach(app.backend)
        app.close()


@pytest.fixture
def app(make_app):
    return make_app()


@pytest.fixture
def backend(app):
    return app.backend


@pytest.fixture(name="clock_of_backend")
def _clock(backend):
    """At the real time until it is moved."""
    clock = ManualClock(wall_ms=time.time_ns() // 1_000_000)
    backend._clock = clock
    return clock


class Received:
    """A task message, and the request a worker would make of it."""

    def __init__(self, message, app):
        message.accept = prepare_accept_content(app.conf.accept_content)
        args, kwargs, embed = message.decode()
        self.args, self.kwargs = args, kwargs
        #: As a worker hands them to the tracer.
        self.fields = {**message.headers, **embed, "args": args, "kwargs": kwargs, "is_eager": False}
        self.fields.update(delivery_info={"redelivered": False}, hostname="w@h")
        self.request = Context(self.fields)

    @property
    def id(self):
        return self.request.id


@pytest.fixture
def receive():
    """Take all task messages that are ready, in their order."""

    def receive(app):
        found = []
        with app.connection_for_read() as connection:
            while (message := connection.default_channel.basic_get("celery")) is not None:
                found.append(Received(message, app))
                message.ack()
        return found

    return receive
