"""``fdb web``: who may connect, how it starts, serves and ends."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from kit.processes import DEADLINE_S, run_python

pytest.importorskip("uvicorn", reason="the dashboard's libraries are not installed")

ROOT = Path(__file__).parents[3]
TOKEN = "a token of enough letters"


@pytest.fixture
def served(monkeypatch):
    """What would be served, and how."""
    found = []
    module = "celery_fdb.cli.servers"
    monkeypatch.setattr(f"{module}._serve", lambda application, listener, given: found.append((application, given)))
    return found


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_other_hosts_need_a_token(run, served, address, tmp_path):
    refused = run("web", "--port", "0", "--address", address)
    assert refused.code == 1
    assert "--token-file" in refused.err
    assert not served
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert run("web", "--port", "0", "--address", address, "--token-file", str(file)).code == 0
    for options, told in (((), "may look;"), (("--write",), "may look and act;")):
        opened = run("web", "--port", "0", "--address", address, "--without-login", *options)
        assert opened.code == 0
        assert told in opened.err
    assert len(served) == 3


@pytest.mark.parametrize("option", [["--root-path", "/fdb"], ["--allow-host", "shop.example.com"]])
def test_what_a_proxy_lets_others_reach_needs_a_token(run, served, option):
    assert "--token-file" in run("web", "--port", "0", *option).err
    assert not served
    assert run("web", "--port", "0", *option, "--token", TOKEN).code == 0


@pytest.mark.parametrize("value", ["", "   "])
def test_an_empty_token_is_not_no_token(run, served, monkeypatch, value):
    """As ``CELERY_FDB_WEB_TOKEN=${SECRET}`` is where SECRET is not set."""
    monkeypatch.setenv("CELERY_FDB_WEB_TOKEN", value)
    assert run("web", "--port", "0").code != 0
    assert not served


def test_a_token_that_others_can_read_is_told(run, served, tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN)
    for mode, told in ((0o644, True), (0o600, False)):
        file.chmod(mode)
        assert (f"chmod go= {file}" in run("web", "--port", "0", "--token-file", str(file)).err) is told
    assert len(served) == 2


def test_no_option_comes_from_an_environment_that_was_not_made_for_it(url, broker):
    """A Kubernetes service called celery-fdb-web sets CELERY_FDB_WEB_PORT in every pod; WITHOUT_LOGIN opens a door."""
    environ = {**os.environ, "CELERY_FDB_STATUS_JSON": "1", "CELERY_FDB_WEB_PORT": "tcp://10.0.0.1:9810"}
    broker.queue("jobs").put("a")
    command = ("-m", "celery_fdb", "--broker", url)
    assert not run_python(*command, "status", cwd=ROOT, env=environ).stdout.startswith("{")
    served = (*command, "web", "--address", "nowhere.invalid")
    refused = run_python(*served, cwd=ROOT, env=environ, exit_code=None)
    assert "valid integer" not in refused.stderr


def test_a_short_token_is_refused(run, served):
    result = run("web", "--port", "0", "--token", "short")
    assert result.code == 2
    assert "fewer than 16" in result.err
    assert not served


@pytest.mark.parametrize("options", [[], ["--allow-host", "shop.example.com", "--without-login"], ["--address", "::1"]])
def test_on_the_loopback_other_names_are_refused(run, served, options):
    from starlette.testclient import TestClient

    assert run("web", "--port", "0", *options).code == 0
    with TestClient(served[0][0]) as client:
        for host, status in (("localhost:1", 200), ("evil.example", 421)):
            assert client.get("/login", headers={"host": host}).status_code == status
        named = client.get("/login", headers={"host": "shop.example.com"}).status_code
    assert named == (200 if "--allow-host" in options else 421)


def test_without_a_login_no_other_name_leads_here(run, served):
    """DNS rebinding: a page of another site has its own name in the address bar, whatever it leads to."""
    from starlette.testclient import TestClient

    assert run("web", "--port", "0", "--address", "0.0.0.0", "--without-login").code == 0
    with TestClient(served[0][0]) as client:
        for host, status in (("evil.example", 421), ("10.0.0.7:9810", 200), ("[fd00::7]:9810", 200)):
            assert client.get("/login", headers={"host": host}).status_code == status


@pytest.mark.parametrize("command", ["metrics", "web"])
def test_a_port_that_is_taken_is_refused_in_one_line(run, command):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run(command, "--port", str(taken.getsockname()[1]))
    assert result.code == 1
    assert "--port" in result.err


def test_without_its_libraries_it_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "celery_fdb.web", None)
    result = run("web")
    assert result.code == 1
    assert "pip install 'celery-fdb[web]'" in result.err


def test_its_package_says_what_to_install():
    """In a process of its own, in which nothing of it is imported yet."""
    code = "import sys; sys.modules['starlette'] = None; import celery_fdb.web"
    result = run_python("-c", code, cwd=ROOT, exit_code=1)
    assert "pip install 'celery-fdb[web]'" in result.stderr.splitlines()[-1]


@contextmanager
def serving(url, *options):
    """Its address and its process."""
    command = [sys.executable, "-m", "celery_fdb", "--broker", url, "web", "--port", "0", *options]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = iter(process.stderr.readline, "")  # a note comes first where there is no login
            found = next(match for line in lines if (match := re.search(r"serving (http://\S+)", line)))
            yield found[1].rstrip("/"), process
        finally:
            process.kill()


@pytest.mark.process
def test_it_serves_until_it_is_told_to_end_also_to_pages_that_are_live(url, broker):
    broker.queue("jobs").put("a")
    with serving(url) as (address, process):
        with urllib.request.urlopen(f"{address}/queues", timeout=DEADLINE_S) as answer:
            assert b"jobs" in answer.read()
        with urllib.request.urlopen(f"{address}/events", timeout=DEADLINE_S) as live:
            while b"event: look" not in live.readline():
                pass
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0


@pytest.mark.process
@pytest.mark.parametrize("prefix", ["/fdb/", "fdb"])
def test_behind_a_proxy_that_removes_the_prefix(url, broker, prefix):
    broker.queue("jobs").put("a")
    with serving(url, "--root-path", prefix, "--without-login") as (address, _):
        with urllib.request.urlopen(f"{address}/queues", timeout=DEADLINE_S) as answer:
            page = answer.read().decode()
        assert 'href="/fdb/queue?queue=jobs"' in page
        static = re.search(r"/fdb(/static/dashboard\.css\?v=\w+)", page)
        with urllib.request.urlopen(f"{address}{static[1]}", timeout=DEADLINE_S) as answer:
            assert answer.status == 200
