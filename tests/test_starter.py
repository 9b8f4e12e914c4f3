"""Programs that are forked off a warm process end, die and are found as those that begin with an interpreter."""

import os
import signal
import subprocess

import pytest
from kit.starter import Starter

pytestmark = pytest.mark.process

APP = """
import os, signal
from celery import Celery

app = Celery("shop", set_as_current=False)
print("in", os.getcwd(), os.environ["SHOP"], os.getpid() == os.getpgrp())
if os.environ["SHOP"] == "hangs":
    signal.pause()
"""


@pytest.fixture(scope="module")
def starter():
    with Starter() as starter:
        yield starter


@pytest.fixture
def start(starter, tmp_path):
    (tmp_path / "shop.py").write_text(APP)

    def start(*arguments, shop=""):
        with (tmp_path / "output").open("w") as output:
            return starter.start(["-A", "shop", *arguments], {**os.environ, "SHOP": shop}, tmp_path, output)

    return start


def test_it_has_its_own_folder_environment_and_session(start, tmp_path):
    assert start("report", shop="acme").wait(60) == 0
    assert f"in {tmp_path} acme True\n" in (tmp_path / "output").read_text()


def test_it_fails_as_a_program_does(start, tmp_path):
    program = start("nonsense")
    assert (program.wait(60), program.poll()) == (2, 2)
    assert "No such command" in (tmp_path / "output").read_text()
    program.terminate()


def test_two_at_once_end_each_with_its_group(start):
    hangs, other, ends = start("report", shop="hangs"), start("report", shop="hangs"), start("report")
    assert ends.wait(60) == 0
    assert hangs.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        hangs.wait(0)
    os.killpg(hangs.pid, signal.SIGKILL)
    other.terminate()
    assert (hangs.wait(60), other.wait(60)) == (-signal.SIGKILL, -signal.SIGTERM)
