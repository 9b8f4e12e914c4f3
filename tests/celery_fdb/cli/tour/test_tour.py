"""The tour judges itself: nothing that was sent is lost. Its judgement is judged in ``test_verdict.py``."""

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from celery_fdb.cli.tour import wait

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
    assert re.fullmatch(r"Error: .*missing: starlette.* pip install 'celery-fdb\[web\]'\n", done.stderr)


def test_a_node_that_can_not_be_had_is_told_in_one_line(tmp_path):
    done = run("--store", "fdb", env={**os.environ, "PATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"Error: .*fdbserver is not on PATH.* leave out --store fdb\.?\n", done.stderr)


@pytest.mark.foundationdb
def test_a_node_that_does_not_start_is_told_in_one_line_with_what_it_said(tmp_path):
    """At once, and not after several times half a minute."""
    server = tmp_path / "fdbserver"
    server.write_text("#!/bin/sh\necho 'Fatal Error: Platform error' >&2; exit 1\n")
    server.chmod(0o755)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(temporary)}
    done = run("--store", "fdb", env=environ)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"Error: .*Fatal Error: Platform error.* leave out --store fdb\.?\n", done.stderr)
    assert list(temporary.iterdir()) == []


def test_its_pictures_are_those_of_the_documentation():
    """Each page in each look, all of them shown, and no other one kept."""
    pictures = runpy.run_path(str(ROOT / "release" / "pictures.py"))
    taken = {f"{page}-{look}.png" for page in pictures["PAGES"] for look in pictures["LOOKS"]}
    assert taken == {path.name for path in (ROOT / "docs" / "pages").iterdir()}
    page = (ROOT / "docs" / "pages.md").read_text()
    assert [name for name in sorted(taken) if f"(pages/{name})" not in page] == []


def test_a_tour_that_is_killed_leaves_no_process_and_no_folder(tmp_path):
    command = [sys.executable, "-u", "-m", "celery_fdb", "tour"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environ) as tour:
        said = "".join(iter(tour.stdout.readline, "1. The shop is open\n"))
        tour.kill()
    port = int(re.search(r"http://127.0.0.1:(\d+)", said)[1])
    wait("no dashboard", lambda: not answers(port))
    wait("its processes, which hold the folder", lambda: list(tmp_path.iterdir()) == [])


def answers(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
