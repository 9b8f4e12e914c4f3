"""The command line as users start it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.processes import run_python, until

from celery_fdb.inspection.overview import look

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
SOURCES = (str(ROOT), str(ROOT / "tests"))
APP = """
import os
import threading

from celery import Celery

app = Celery("shop", broker=os.environ["SHOP_BROKER"])


app.conf.broker_transport_options = {"session_ttl": 4}


@app.task
def pay(order):
    pass


@app.task(acks_late=True)
def hang():
    threading.Event().wait()
"""


@pytest.fixture
def program(url, tmp_path):
    """Runs a program beside an app ``shop`` on the test's broker."""
    (tmp_path / "shop.py").write_text(APP)
    env = {**os.environ, "SHOP_BROKER": url, "PYTHONPATH": os.pathsep.join([*SOURCES, str(tmp_path)])}

    def program(*arguments, **more):
        return run_python("-m", *arguments, cwd=tmp_path, env={**env, **more}, exit_code=None)

    return program


def test_celery_fdb_reads_the_apps_broker(program, broker):
    broker.queue("jobs").put("a")
    assert "\njobs " in program("celery", "-A", "shop", "fdb", "status").stdout
    assert json.loads(program("celery", "-A", "shop", "fdb", "status", "--json").stdout)["totals"]["ready"] == 1


def test_celery_call_and_fdb_find_and_cancel(program, broker):
    sent = program("kit.celery_program", "-A", "shop", "call", "shop.pay", "--args", "[1]", "--countdown", "1000")
    task_id = sent.stdout.strip()
    found = json.loads(program("kit.celery_program", "-A", "shop", "fdb", "find", task_id, "--json").stdout)
    assert [(each["task"], each["state"]) for each in found] == [("shop.pay", "delayed")]
    assert program("kit.celery_program", "-A", "shop", "fdb", "cancel", task_id).returncode == 0
    missing = program("kit.celery_program", "-A", "shop", "fdb", "find", task_id)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert len(missing.stderr.splitlines()) == 1


def test_without_an_app(program, broker, url):
    broker.queue("jobs").put("a")
    assert json.loads(program("celery_fdb", "--broker", url, "queues", "--json").stdout)[0]["ready"] == 1
    assert json.loads(program("celery_fdb", "queues", "--json", CELERY_FDB_BROKER=url).stdout)[0]["ready"] == 1


def test_an_option_in_the_wrong_place_has_no_traceback(program):
    result = program("kit.celery_program", "-A", "shop", "fdb", "status", "-A", "shop")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_celery_starts_without_loading_our_commands(program):
    """Also a worker: what it has no need of, it does not import."""
    unwanted = {"rich", "kombu_fdb.api.broker", "celery_fdb.cli.status"}
    code = f"import sys, celery.bin.celery; print(sorted({unwanted} & set(sys.modules)))"
    done = run_python("-c", code, cwd=ROOT)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def worker(url, tmp_path, program):
    """A real worker of the app, that holds a task until it is killed."""
    env = {**os.environ, "SHOP_BROKER": url, "PYTHONPATH": os.pathsep.join([*SOURCES, str(tmp_path)])}
    command = [sys.executable, "-m", "kit.celery_program", "-A", "shop", "worker", "-P", "solo", "--without-mingle"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log) as process,
    ):
        yield process
        process.kill()


def test_a_real_worker_is_seen_keeps_an_export_waiting_and_leaves_nothing_behind(program, broker, worker, tmp_path):
    """It holds a task and is killed: the export takes that along when it is told so, and finds it ready."""
    sent = program("kit.celery_program", "-A", "shop", "call", "shop.hang")
    until(lambda: [each.state for each in broker.find(sent.stdout.strip())] == ["leased"])
    until(lambda: "celery" in (look(broker).sessions or [None])[0].consumed)
    sessions = json.loads(program("kit.celery_program", "-A", "shop", "fdb", "sessions", "--json").stdout)
    assert [(each["pid"], each["leased"], each["open"]) for each in sessions] == [(worker.pid, 1, True)]
    refused = program("kit.celery_program", "-A", "shop", "fdb", "export", "all.jsonl")
    assert (refused.returncode, (tmp_path / "all.jsonl").exists()) == (1, False)
    worker.kill()
    worker.wait()
    assert program("kit.celery_program", "-A", "shop", "fdb", "export", "all.jsonl", "--leased").returncode == 0
    target = f"fdb+sqlite:///{tmp_path}/target.db"
    assert program("celery_fdb", "--broker", target, "import", "all.jsonl").returncode == 0
    (found,) = json.loads(program("celery_fdb", "--broker", target, "find", sent.stdout.strip(), "--json").stdout)
    assert (found["task"], found["state"], found["redeliveries"]) == ("shop.hang", "ready", 1)
