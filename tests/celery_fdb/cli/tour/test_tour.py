"""The tour judges itself: nothing that was sent is lost. Its judgement is judged in ``test_verdict.py``."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from celery_fdb.cli.tour.processes import wait
from kombu_fdb import Broker

ROOT = Path(__file__).parents[4]

pytestmark = pytest.mark.process


def run(*arguments, **options):
    command = [sys.executable, "-m", "celery_fdb", "tour", *arguments]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=400, check=False, **options
    )


@pytest.mark.parametrize("store", ["sqlite", pytest.param("fdb", marks=pytest.mark.foundationdb)])
def test_the_tour_comes_to_its_end_without_a_terminal(store, tmp_path):
    done = run("--store", store, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5. Closing time" in done.stdout
    assert done.stdout.endswith(" sent, 0 lost.\n")
    assert "FAIL" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_told_in_one_line(tmp_path):
    """As in an environment without the extra."""
    (tmp_path / "starlette.py").write_text("raise ImportError('no', name='starlette')")
    done = run(env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"Error: .*missing='starlette'.* pip install 'celery-fdb\[web\]'\n", done.stderr)


def test_a_node_that_can_not_be_had_is_told_in_one_line(tmp_path):
    done = run("--store", "fdb", env={**os.environ, "PATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"Error: .*fdbserver is not on PATH.* leave out --store fdb\.?\n", done.stderr)


def test_its_pictures_are_those_of_the_documentation():
    docs = ROOT / "docs"
    taken = set(re.findall(r'\.take(?:_watched)?\(\s*"([\w-]+)"', (ROOT / "release" / "pictures.py").read_text()))
    assert taken == {path.stem for path in docs.glob("dashboard-*.png")}
    pages = "".join(page.read_text() for page in (*docs.glob("*.md"), ROOT / "README.md"))
    assert [name for name in sorted(taken) if f"{name}.png)" not in pages] == []


def test_a_tour_that_is_killed_leaves_no_process(tmp_path):
    command = [sys.executable, "-u", "-m", "celery_fdb", "tour"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environ) as tour:
        said = "".join(iter(tour.stdout.readline, "1. The shop is open\n"))
        tour.kill()
    port = int(re.search(r"http://127.0.0.1:(\d+)", said)[1])
    wait("no dashboard", lambda: not answers(port))
    with Broker.open(re.search(r"fdb\S+", said)[0]) as broker:
        wait("workers to say goodbye", lambda: not broker.inspect.sessions())


def answers(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
