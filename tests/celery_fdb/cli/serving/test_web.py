"""``fdb web``: who may connect, how it starts, serves and ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.processes import DEADLINE_S

from kombu_fdb import Broker

pytest.importorskip("uvicorn", reason="the dashboard's libraries are not installed")

ROOT = Path(__file__).parents[4]
TOKEN = "a token of enough letters"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be served, and how."""
    found: list[Any] = []
    module = "celery_fdb.cli.serving.web"
    monkeypatch.setattr(f"{module}._serve", lambda application, listener, given: found.append((application, given)))
    return found


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_other_hosts_need_a_token(run: Callable[..., Any], served: list[Any], address: str, tmp_path: Path) -> None:
    refused = run("web", "--port", "0", "--address", address)
    assert refused.code == 1
    assert "--token-file" in refused.err
    assert not served
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert run("web", "--port", "0", "--address", address, "--token-file", str(file)).code == 0
    assert run("web", "--port", "0", "--address", address, "--without-login").code == 0
    assert len(served) == 2


def test_a_short_token_is_refused(run: Callable[..., Any], served: list[Any]) -> None:
    result = run("web", "--port", "0", "--token", "short")
    assert result.code == 2
    assert "fewer than 16" in result.err
    assert not served


@pytest.mark.parametrize("options", [[], ["--allow-host", "shop.example.com"], ["--address", "::1"]])
def test_on_the_loopback_other_names_are_refused(
    run: Callable[..., Any], served: list[Any], options: list[str]
) -> None:
    from starlette.testclient import TestClient

    assert run("web", "--port", "0", *options).code == 0
    with TestClient(served[0][0]) as client:
        for host, status in (("localhost:1", 200), ("evil.example", 421)):
            assert client.get("/login", headers={"host": host}).status_code == status
        named = client.get("/login", headers={"host": "shop.example.com"}).status_code
    assert named == (200 if "--allow-host" in options else 421)


def test_without_a_login_no_other_name_leads_here(run: Callable[..., Any], served: list[Any]) -> None:
    """DNS rebinding: a page of another site has its own name in the address bar, whatever it leads to."""
    from starlette.testclient import TestClient

    assert run("web", "--port", "0", "--address", "0.0.0.0", "--without-login").code == 0
    with TestClient(served[0][0]) as client:
        for host, status in (("evil.example", 421), ("10.0.0.7:9810", 200), ("[fd00::7]:9810", 200)):
            assert client.get("/login", headers={"host": host}).status_code == status


def test_a_port_that_is_taken_is_refused_in_one_line(run: Callable[..., Any]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("web", "--port", str(taken.getsockname()[1]))
    assert result.code == 1
    assert "--port" in result.err


def test_without_its_libraries_it_says_what_to_install(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "celery_fdb.web", None)
    result = run("web")
    assert result.code == 1
    assert "pip install 'celery-fdb[web]'" in result.err


def test_its_package_says_what_to_install() -> None:
    """In a process of its own, in which nothing of it is imported yet."""
    code = "import sys; sys.modules['starlette'] = None; import celery_fdb.web"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "pip install 'celery-fdb[web]'" in result.stderr.splitlines()[-1]


@contextmanager
def serving(url: str, *options: str) -> Iterator[tuple[str, Any]]:
    """Its address and its process."""
    command = [sys.executable, "-m", "celery_fdb", "--broker", url, "web", "--port", "0", *options]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield re.search(r"http://\S+", process.stderr.readline())[0].rstrip("/"), process  # type: ignore[index]
        finally:
            process.kill()


@pytest.mark.process
def test_it_serves_until_it_is_told_to_end_also_to_pages_that_are_live(url: str, broker: Broker) -> None:
    broker.queue("jobs").put("a")
    with serving(url) as (address, process):
        with urllib.request.urlopen(f"{address}/queues", timeout=DEADLINE_S) as answer:
            assert b"jobs" in answer.read()
        with urllib.request.urlopen(f"{address}/events", timeout=DEADLINE_S) as live:
            while b"event: look" not in live.readline():
                pass
            process.send_signal(signal.SIGTERM)
            process.wait(DEADLINE_S)


@pytest.mark.process
@pytest.mark.parametrize("prefix", ["/fdb/", "fdb"])
def test_behind_a_proxy_that_removes_the_prefix(url: str, broker: Broker, prefix: str) -> None:
    broker.queue("jobs").put("a")
    with serving(url, "--root-path", prefix) as (address, _):
        with urllib.request.urlopen(f"{address}/queues", timeout=DEADLINE_S) as answer:
            page = answer.read().decode()
        assert 'href="/fdb/queue?queue=jobs"' in page
        static = re.search(r"/fdb(/static/dashboard\.css\?v=\w+)", page)
        assert static is not None
        with urllib.request.urlopen(f"{address}{static[1]}", timeout=DEADLINE_S) as answer:
            assert answer.status == 200
