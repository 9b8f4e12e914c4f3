"""The tour judges itself: nothing that was sent is lost."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[2] / "examples" / "tour" / "run.py"

pytestmark = pytest.mark.process


@pytest.mark.parametrize("store", ["sqlite", pytest.param("fdb", marks=pytest.mark.foundationdb)])
def test_the_tour_comes_to_its_end(store):
    command = [sys.executable, str(TOUR), "--go-on", "--store", store]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5. Closing time" in done.stdout
    assert ", 0 lost." in done.stdout


def test_what_is_missing_is_told_in_one_line(tmp_path):
    command = [sys.executable, str(TOUR), "--pictures", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "PATH": str(tmp_path)}
    )
    assert done.returncode == 2
    assert "pictures need Chromium" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_its_pictures_are_those_of_the_documentation():
    docs = TOUR.parents[2] / "docs"
    taken = set(re.findall(r'\.take(?:_watched)?\(\s*"([\w-]+)"', TOUR.read_text()))
    assert taken == {path.stem for path in docs.glob("dashboard-*.png")}
    pages = "".join(page.read_text() for page in (*docs.glob("*.md"), docs.parent / "README.md"))
    assert [name for name in sorted(taken) if f"{name}.png)" not in pages] == []
