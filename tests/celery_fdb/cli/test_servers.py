"""``fdb metrics`` among clients that ask by another name, or for half of something."""

import re
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path

import pytest
from kit.processes import DEADLINE_S

from celery_fdb.cli import servers

ROOT = Path(__file__).parents[3]


def test_a_name_that_was_made_to_lead_here_reads_nothing(url, broker):
    """DNS rebinding: names of queues and keys are for the users of this machine, not for pages they look at."""
    broker.queue("jobs").put("a")
    command = [sys.executable, "-m", "celery_fdb", "--broker", url, "metrics", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = re.search(r"http://([^/]+)", process.stderr.readline())[1]
            for host, status in (("evil.example", 421), ("localhost.evil.example:9808", 421), ("localhost:1", 200)):
                with closing(HTTPConnection(address, timeout=DEADLINE_S)) as connection:
                    connection.request("GET", "/metrics", headers={"Host": host})
                    answer = connection.getresponse()
                    assert (answer.status, b"jobs" in answer.read()) == (status, status == 200)
        finally:
            process.kill()


def test_at_an_address_for_others_any_name_will_do():
    """Prometheus asks for whatever name it was given."""
    told = []
    guarded = servers._guarded(lambda *_: [b"metrics"], is_local=False)
    assert guarded({"HTTP_HOST": "shop-metrics:9808"}, lambda *args: told.append(args)) == [b"metrics"]
    assert not told


@pytest.fixture
def endpoint(monkeypatch):
    """Connects to a small one."""

    def app(_environ, start_response):
        start_response("200 OK", [])
        return [b"metrics"]

    monkeypatch.setattr(servers, "MOST_SCRAPES", 3)
    with servers._Server(("127.0.0.1", 0), servers._Handler) as server, ExitStack() as stack:
        server.set_app(app)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()

        def connect(sent):
            client = stack.enter_context(socket.create_connection(server.server_address, DEADLINE_S))
            client.sendall(sent)
            return client

        yield connect
        server.shutdown()
        thread.join(DEADLINE_S)


def test_half_requests_do_not_block_the_metrics(endpoint, monkeypatch):
    """Each holds a thread and a file."""
    monkeypatch.setattr(servers._Handler, "timeout", 10 * DEADLINE_S)
    half = [endpoint(b"GET / HTTP/1.1\r\n") for _ in range(20)]
    whole = endpoint(b"GET / HTTP/1.1\r\n\r\n")
    assert b"metrics" in whole.makefile("rb").read()
    for each in half[:17]:
        assert each.recv(1) == b"", "the oldest are let go"


def test_half_a_request_ends_in_time_and_without_a_word(endpoint, monkeypatch, capfd):
    monkeypatch.setattr(servers._Handler, "timeout", 0.05)
    for sent in (b"", b"GET", b"GET / HTTP/1.1\r\n"):
        assert endpoint(sent).recv(1) == b""
    assert capfd.readouterr().err == ""
