import time

import pytest
from celery import Celery
from kit.processes import DEADLINE_S
from kombu import Connection

from kombu_fdb.process import duty_cycle


@pytest.fixture
def apart(monkeypatch):
    """Each connection stands for a process of its own, so the test's own process speaks for none that is silent."""
    monkeypatch.setattr(duty_cycle, "see", lambda _pid: ("", 0.0))


@pytest.fixture
def connect(url):
    """Opens connections that are closed after the test."""
    opened = []

    def connect(**options):
        connection = Connection(url, transport_options={"session_ttl": 5.0, "sweep_interval": 0.5, **options})
        opened.append(connection)
        return connection

    yield connect
    for connection in opened:
        connection.close()


@pytest.fixture
def app(url):
    app = Celery(broker=url, backend="cache+memory://", set_as_current=False, control="celery_fdb.control:Control")
    app.conf.task_default_queue = "q"

    @app.task(name="send", shared=False)
    def send(*args):
        return args

    yield app
    app.close()


@pytest.fixture
def connection(connect):
    return connect()


@pytest.fixture
def channel(connection):
    return connection.default_channel


@pytest.fixture
def drain():
    """Drain until so many messages were received; then assert that no other comes along."""

    def drain(connection, received, number):
        deadline = time.monotonic() + DEADLINE_S
        while len(received) < number:
            connection.drain_events(timeout=max(0.01, deadline - time.monotonic()))
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0)
        assert len(received) == number
        return received

    return drain
