"""What the pages show is run: every block of Python, of a terminal session or of settings, in the order of the page.

* ```` ```python ```` is executed, with the ``url`` of an empty broker, an ``app`` on it and its ``engine``; if its
  first line is a comment with a file's name, it becomes that file.
* ```` ```console ```` holds commands after ``$ ``, each with what it prints; ``...`` stands for anything, and what a
  command prints may be left out. One that ends with ``&`` runs on until the page ends; the page goes on when it has
  printed what it is said to print.
* ```` ```ini ````, ``toml``, ``json``, ``yaml`` must be well-formed, and become a file if their first line names one.

All of it happens in an empty folder that stands for ``/var/lib/shop``. A block after ``<!-- not run: reason -->`` is
left out. After ``<!-- from here on: FoundationDB -->`` a URL ``fdb:///name`` leads to a real node; where there is none,
the rest of the page is skipped. A page of docs that another test names, as ``results.md``, is run there.
"""

import configparser
import doctest
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from celery import Celery

from kombu_fdb.testing.fdbserver import fdb_unavailable_reason

ROOT = Path(__file__).parents[1]
FOLDER = "/var/lib/shop"
DEADLINE_S = 40.0
BLOCK = re.compile(
    r"(?P<skip><!-- not run: .+? -->\n)?^```(?P<language>python|console|ini|toml|json|yaml)\n(?P<text>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
FILE = re.compile(r"# ([\w./-]+\.\w+)\n")
READERS = {
    "ini": lambda text: configparser.ConfigParser(interpolation=None).read_string(text),
    "toml": tomllib.loads,
    "json": json.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
}
#: The rest of its page needs a real node.
ON_FOUNDATIONDB = "<!-- from here on: FoundationDB -->\n"


class Block(NamedTuple):
    language: str
    text: str


def blocks_in(text):
    return [Block(match["language"], match["text"]) for match in BLOCK.finditer(text) if not match["skip"]]


def blocks_of(page):
    return blocks_in(page.read_text())


def is_run_elsewhere(page):
    others = (test for test in ROOT.glob("tests/**/*.py") if test != Path(__file__))
    return any(f'"{page.name}"' in test.read_text() for test in others)


PAGES = [
    page
    for page in (*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md", ROOT / "SECURITY.md")
    if blocks_of(page) and (page.parent == ROOT or not is_run_elsewhere(page))
]


class Session:
    """A folder, a shell and a Python namespace for one page."""

    def __init__(self, folder):
        self.folder = folder
        self.background = []
        self.namespaces = "fdb:///"
        url = f"fdb+sqlite:///{folder}/page.db"
        self.app = Celery("docs", broker=url, set_as_current=False)
        self.connection = self.app.connection()
        self.names = {"url": url, "app": self.app, "engine": self.connection.default_channel.engine}
        self.environ = {**os.environ, "PATH": f"{self._commands()}{os.pathsep}{os.environ['PATH']}"}
        self.environ.update(PYTHONPATH=f"{ROOT}{os.pathsep}{folder}", PYTHONUNBUFFERED="1", COLUMNS="120")

    def _commands(self):
        """What an activated environment would have on its PATH, for this Python."""
        commands = self.folder / ".bin"
        commands.mkdir()
        for name in ("celery", "pytest"):
            (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {name} "$@"\n')
            (commands / name).chmod(0o755)
        (commands / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (commands / "python").chmod(0o755)
        return commands

    def lead_to(self, cluster):
        """``fdb:///name`` in a command is a namespace of ``cluster`` that no other page has."""
        self.environ["FDB_CLUSTER_FILE"] = cluster.cluster_file
        self.namespaces = f"fdb:///{os.urandom(6).hex()}-"

    def close(self):
        for process in self.background:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        self.connection.close()
        self.app.close()

    def run(self, block):
        text = block.text.replace(FOLDER, str(self.folder)).replace("fdb:///", self.namespaces)
        name = FILE.match(text)
        if block.language == "console":
            for command, printed in commands_of(text):
                self.command(command, printed)
            return
        if block.language in READERS:
            READERS[block.language](text)
        if name:
            path = self.folder / name[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif block.language == "python":
            exec(compile(text, "page", "exec"), self.names)

    def command(self, command, printed):
        if command.endswith("&"):
            self.start(command.removesuffix("&"), printed)
            return
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}"
        assert matches(printed, done.stdout), f"$ {command}\nexpected:\n{printed}\ngot:\n{done.stdout}"

    def start(self, command, printed):
        log = self.folder / f".log{len(self.background)}"
        with log.open("w") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec env {command}"],
                cwd=self.folder,
                env=self.environ,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.background.append(process)
        deadline = time.monotonic() + DEADLINE_S
        while not matches(f"{printed.rstrip()}...\n", log.read_text()):
            assert time.monotonic() < deadline, f"$ {command}&\nexpected:\n{printed}\ngot:\n{log.read_text()}"
            time.sleep(0.05)


def commands_of(text):
    """``[(command, what it prints)]``."""
    parts = re.split(r"^\$ ", text.replace("\\\n", " "), flags=re.MULTILINE)
    assert not parts[0].strip(), f"a line without its command: {parts[0]}"
    return [(command.strip(), printed) for command, _, printed in (part.partition("\n") for part in parts[1:])]


def matches(printed, got):
    if not printed.strip():
        return True
    got = got if got.endswith("\n") else f"{got}\n"
    return doctest.OutputChecker().check_output(printed, got, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


def param(page):
    marks = [pytest.mark.foundationdb] if ON_FOUNDATIONDB in page.read_text() else []
    return pytest.param(page, id=page.stem, marks=marks)


@pytest.mark.process
@pytest.mark.parametrize("page", [param(page) for page in PAGES])
def test_what_a_page_shows_is_what_happens(page, tmp_path, monkeypatch, request):
    if shutil.which("bash") is None and any(block.language == "console" for block in blocks_of(page)):
        pytest.skip("bash is not on PATH")
    monkeypatch.chdir(tmp_path)
    session = Session(tmp_path)
    anywhere, _, on_foundationdb = page.read_text().partition(ON_FOUNDATIONDB)
    try:
        for block in blocks_in(anywhere):
            session.run(block)
        if on_foundationdb:
            session.lead_to(node(request))
        for block in blocks_in(on_foundationdb):
            session.run(block)
    finally:
        session.close()


def node(request):
    """A real one, which the whole run shares. Skips the rest of the page where there is none."""
    reason = fdb_unavailable_reason()
    if reason is not None:
        pytest.skip(f"the rest of the page: {reason}")
    return request.getfixturevalue("cluster")


@pytest.mark.parametrize(
    "text",
    ["$ false\n", "$ echo one\ntwo\n", "$ echo one && exit 3\none\n"],
)
def test_a_wrong_session_is_found(tmp_path, text):
    session = Session(tmp_path)
    with pytest.raises(AssertionError, match=r"^\$ "):
        session.run(Block("console", text))
    session.close()
