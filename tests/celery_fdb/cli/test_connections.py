"""The dashboard's server among clients that send half of something, or read nothing."""

import asyncio
import socket
import threading
from contextlib import ExitStack

import pytest
from kit.processes import DEADLINE_S

uvicorn = pytest.importorskip("uvicorn", reason="the dashboard's libraries are not installed")

connections = pytest.importorskip("celery_fdb.cli.connections")

HALF = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
REST = b"connection: close\r\n\r\n"


class Site:
    """Answers with so many bytes; ``ended``: a client that was to read them is gone."""

    def __init__(self):
        self.size = 2
        self.ended = threading.Event()

    async def __call__(self, scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(0, self.size, 65_536):
                await send({"type": "http.response.body", "body": b"x" * min(self.size, 65_536), "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.ended.set()


@pytest.fixture
def site():
    return Site()


@pytest.fixture
def connect(site):
    """To a server with these connections."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(site, http=connections.TimedProtocol, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=asyncio.run, args=(server.serve(sockets=[listener]),))
    thread.start()
    with ExitStack() as stack:

        def connect(sent, **options):
            made = stack.enter_context(socket.socket())
            for name, value in options.items():
                made.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
            made.settimeout(DEADLINE_S)
            made.connect(listener.getsockname())
            made.sendall(sent)
            return made

        try:
            yield connect
        finally:
            server.should_exit = True
            thread.join(DEADLINE_S)


def told(client):
    """All that it is sent until it is closed."""
    found = b""
    try:
        while part := client.recv(65_536):
            found += part
    except ConnectionResetError:
        pass
    return found


def test_half_a_request_ends_in_time(connect, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    second = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" + HALF
    for sent, answers in ((b"", 0), (b"G", 0), (HALF, 0), (second, 1)):
        client = connect(sent)
        assert told(client).count(b"HTTP/1.1 200") == answers


def test_a_request_that_was_begun_in_time_is_answered(connect):
    client = connect(HALF)
    client.sendall(REST)
    assert told(client).startswith(b"HTTP/1.1 200")


def test_half_requests_leave_files_for_others(connect, monkeypatch):
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 3)
    waiting = [connect(HALF) for _ in range(3)]
    waiting[0].sendall(REST)
    assert told(waiting[0]).startswith(b"HTTP/1.1 200"), "all three are known"
    waiting[0] = connect(HALF + b"x")
    assert told(connect(HALF + REST)).startswith(b"HTTP/1.1 503")
    waiting[1].sendall(REST)
    assert told(waiting[1]).startswith(b"HTTP/1.1 200")
    assert told(connect(HALF + REST)).startswith(b"HTTP/1.1 200"), "there is a place again"


def test_who_reads_nothing_is_let_go(connect, site, monkeypatch):
    monkeypatch.setattr(connections, "READ_S", 0.2)
    site.size = 50_000_000
    client = connect(HALF + REST, SO_RCVBUF=4_096)
    assert site.ended.wait(DEADLINE_S)
    assert len(told(client)) < site.size


def test_it_never_takes_more_files_than_half_of_what_there_are():
    import resource

    assert 16 <= connections.MOST_CONNECTIONS <= max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 16)
