"""Programs that teams run beside their workers, against our broker: Flower, and celery's own commands."""

import importlib.util
import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
from kit.left import Trap

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture
def celery(broker, starter):
    """Runs one of Celery's commands to its end; what it printed."""

    def celery(*arguments, fails=False):
        printed = broker.directory / "command.out"
        with printed.open("w") as output:
            command = starter.start(["-A", "acceptance_app", *arguments], broker.env, broker.directory, output)
        assert (command.wait(120) != 0) == fails, printed.read_text()
        return str(printed.read_text())

    return celery


@contextmanager
def program(broker, *arguments):
    """A program in the background, its output in a file."""
    log = broker.directory / f"{arguments[0]}.out"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "acceptance_app", *arguments],
            env=broker.env,
            cwd=broker.directory,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process, log
        finally:
            process.kill()
            process.wait(10)


# -- Flower ------------------------------------------------------------------------------------------------------------


def test_flower_lists_workers_and_tasks(broker, app, start, until, monkeypatch):
    if importlib.util.find_spec("flower") is None:
        pytest.skip("flower is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("FLOWER_UNAUTHENTICATED_API", "true")
    with program(broker, "flower", f"--port={port}", "--address=127.0.0.1") as (process, log):
        until(lambda: ask(port, "/healthcheck") == "OK", say=log.read_text)
        start("-c", "1", "-E", name="w")
        until(lambda: "w@test" in (ask(port, "/api/workers?refresh=1") or ""), say=log.read_text)
        task_id = app.note.delay("seen").id
        until(lambda: task_id in json.loads(ask(port, "/api/tasks") or "{}"), say=log.read_text)
        until(lambda: json.loads(ask(port, "/api/tasks"))[task_id]["state"] == "SUCCESS", say=log.read_text)
        assert json.loads(ask(port, "/api/tasks"))[task_id]["worker"] == "w@test"
        workers = json.loads(ask(port, "/api/workers?refresh=1"))
        assert [queue["name"] for queue in workers["w@test"]["active_queues"]] == ["celery"]
        for page in ("/workers", "/tasks"):
            assert "<html" in (ask(port, page) or ""), page
        assert "Traceback" not in log.read_text()
        with pytest.raises(urllib.error.HTTPError, match="404"):  # it counts messages in RabbitMQ and Redis only
            urllib.request.urlopen(f"http://127.0.0.1:{port}/broker", timeout=60)
        assert process.poll() is None
        assert ask(port, "/healthcheck") == "OK"


def ask(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


# -- celery's commands -------------------------------------------------------------------------------------------------


def test_inspect_control_and_status_commands(broker, celery, start, until):
    worker = start("-c", "1", name="w")
    assert json.loads(celery("inspect", "ping", "--json"))["w@test"] == {"ok": "pong"}
    assert "1 node online" in celery("status")
    queues = json.loads(celery("inspect", "active_queues", "--json"))["w@test"]
    assert [queue["name"] for queue in queues] == ["celery"]
    assert "acceptance_app.note" in celery("inspect", "registered")
    celery("control", "add_consumer", "more")
    queues = json.loads(celery("inspect", "active_queues", "--json"))["w@test"]
    assert {queue["name"] for queue in queues} == {"celery", "more"}
    celery("call", "acceptance_app.note", "--args", '["called"]', "--queue", "more")
    until(lambda: broker.marks("run", "called"), say=worker.log.read_text)
    celery("control", "cancel_consumer", "more")
    celery("call", "acceptance_app.note", "--args", '["waits"]', "--queue", "more")
    assert "Purged 1 message" in celery("purge", "-f", "-Q", "more")
    celery("control", "shutdown", fails=True)  # a worker that ends sends no reply, with any broker
    assert worker.wait_end() == 0
    assert "No nodes replied" in celery("inspect", "ping", "-t", "0.2", fails=True)


def test_events_dump(broker, app, start, until):
    with program(broker, "events", "--dump") as (_, log):
        until(lambda: "evdump: starting capture" in log.read_text(), say=log.read_text)
        start("-c", "1", "-E", name="w")
        until(lambda: "w@test" in log.read_text(), say=log.read_text)
        app.note.delay("seen")
        until(lambda: "task succeeded" in log.read_text(), say=log.read_text)


def test_multi_starts_and_stops_two_workers(broker, app, celery, until):
    folder = broker.directory
    files = (f"--pidfile={folder}/%n.pid", f"--logfile={folder}/%n.log")
    nodes = ("one@test", "two@test")

    def multi(command, *more):
        celery("multi", command, *nodes, *files, *more)

    multi("start", "-c", "1", "-l", "INFO", "-A", "acceptance_app")
    try:
        until(lambda: all((folder / f"{name}.log").exists() for name in ("one", "two")))
        until(lambda: len(app.app.control.ping(timeout=0.5) or []) == 2)
        app.note.delay("multi")
        until(lambda: broker.marks("run", "multi"))
    finally:
        multi("stopwait")
    assert not list(folder.glob("*.pid"))


# -- safety ------------------------------------------------------------------------------------------------------------


def test_a_worker_fails_a_pickled_task_without_loading_it(broker, app, start, until):
    worker = start("-c", "1")
    app.note.apply_async((Trap(broker.directory / "sprung"),), serializer="pickle")
    app.note.delay("after")
    until(lambda: broker.marks("run", "after"), say=worker.log.read_text)
    until(lambda: worker.said("Refusing to deserialize"), say=worker.log.read_text)
    assert broker.count("run") == {"after": 1}
    assert not (broker.directory / "sprung").exists()
