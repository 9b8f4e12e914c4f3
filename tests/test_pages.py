"""What the pages show is run: every block of Python, of a terminal session or of settings, in the order of the page.

* ```` ```python ```` is executed, with the ``url`` of an empty broker, an ``app`` on it and its ``engine``; if its
  first line is a comment with a file's name, it becomes that file.
* ```` ```console ```` holds commands after ``$ ``, each with what it prints; ``...`` stands for anything, and what a
  command prints may be left out. One that ends with ``&`` runs on until the page ends; the page goes on when it has
  printed what it is said to print. ``wait`` waits for what runs on.
* ```` ```ini ````, ``toml``, ``json``, ``yaml`` must be well-formed, and become a file if their first line names one.

All of it happens in an empty folder that stands for ``/var/lib/shop``. After ``<!-- from here on: FoundationDB -->`` a
URL ``fdb:///name`` leads to a real node; where there is none, the rest of the page is skipped. What another test runs
stands in ``ELSEWHERE``. A block after ``<!-- not run: reason -->``, or in another language, is left out and stands with
its reason in ``NOT_RUN``.
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

ROOT = Path(__file__).parents[1]
FOLDER = "/var/lib/shop"
DEADLINE_S = 120.0
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>.+?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
FILE = re.compile(r"# ([\w./-]+\.\w+)\n")
READERS = {
    "ini": lambda text: configparser.ConfigParser(interpolation=None).read_string(text),
    "toml": tomllib.loads,
    "json": json.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
}
RUN = {"python", "console", *READERS}
#: Who runs the blocks of which languages instead; a page that is not named here is run here.
ELSEWHERE = {
    "docs/cli.md": ({"console"}, "tests/celery_fdb/cli/test_pages.py"),
    "docs/django.md": ({"python", ""}, "tests/celery_fdb/contrib/django/test_docs_page.py"),
    "docs/how-to/operate-cluster.md": ({"console"}, "tests/network/test_operating.py"),
    "docs/metrics.md": ({"python"}, "tests/celery_fdb/cli/test_pages.py"),
    "docs/results.md": ({"python"}, "tests/celery_fdb/results/test_docs.py"),
}
INDEX, SHOWN = "it needs a package index", "no code"
#: Every block that no test runs as it stands, by its page and how it begins, and why.
NOT_RUN = {
    ("README.md", "make tour"): "tests/celery_fdb/cli/tour runs the tour, and the tests do not run themselves",
    ("README.md", "pip install celery-fdb"): INDEX,
    ("README.md", "celery -A tasks worker"): "it works until it is stopped; the tutorial starts one",
    ("docs/how-to/troubleshooting.md", "python -m kombu_fdb.doctor [URL]"): "a synopsis; the how-tos run it",
    ("docs/architecture.md", "celery_fdb"): SHOWN,
    ("docs/dashboard.md", "pip install 'celery-fdb[web]'"): INDEX,
    ("docs/dashboard.md", "location /fdb/ {"): "for nginx; tests/test_deployments.py attacks it",
    (
        "docs/dashboard.md",
        "celery -A shop fdb web --root-path /fdb --allow-host shop.example.com --forwarded-allow-ips 127.0.0.1 \\",
    ): "it serves until it is stopped, as in tests/test_deployments.py",
    ("docs/django.md", "pip install 'celery-fdb[django]'"): INDEX,
    ("docs/how-to/docker-compose.md", "# Dockerfile"): "it needs Docker; tests/test_howto.py runs its entry point",
    ("docs/how-to/docker-compose.md", "$ docker compose up --build --detach"): "it needs Docker",
    (
        "docs/how-to/kubernetes.md",
        "$ kubectl apply -f cluster-file.yaml -f workers.yaml -f metrics.yaml -f scaling.yaml",
    ): "it needs a Kubernetes cluster",
    ("docs/how-to/systemd.md", "$ systemctl daemon-reload"): "it needs root and systemd",
    ("docs/how-to/upgrade.md", "$ python -m kombu_fdb.doctor fdb://"): "it needs a cluster file in the default place",
    ("docs/metrics.md", '$ pip install "celery-fdb[metrics]"'): INDEX,
    ("docs/quickstart.md", "$ pip install celery-fdb"): INDEX,
    ("docs/quickstart.md", "$ celery -A shop -b redis://localhost:6379/0 worker"): "the old broker",
    ("docs/tasks.md", "python -m celery_fdb.contrib.outbox -A proj --connect proj.database:connect"): (
        "it relays until it is stopped; tests/celery_fdb/tasks/test_outbox_relay.py has real ones"
    ),
    ("docs/tutorial.md", "$ python3 -m venv .venv"): INDEX,
    ("docs/tutorial.md", "$ pip install 'celery-fdb[web]'"): "it serves until it is stopped, and needs a package index",
    ("examples/django_shop/README.md", "pip install '.[django]'"): INDEX,
    ("examples/django_shop/README.md", "python manage.py runserver"): (
        "it serves until it is stopped, as in tests/examples/test_django_shop.py"
    ),
    ("docs/index.md", "pip install celery-fdb"): INDEX,
    ("docs/index.md", "pip install 'celery-fdb[web]'"): f"{INDEX}, and tests/celery_fdb/cli/tour runs the tour",
}
#: The rest of its page needs a real node.
ON_FOUNDATIONDB = "<!-- from here on: FoundationDB -->\n"


class Block(NamedTuple):
    language: str
    text: str
    #: Why it is not run, by the page.
    reason: str | None = None

    @property
    def beginning(self):
        """Its first line, without what is said about it behind spaces."""
        return re.split(" {2,}|\n", self.text, maxsplit=1)[0]

    @property
    def is_run(self):
        return self.reason is None and self.language in RUN


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def shown_in(text):
    return [Block(match["language"], match["text"], match["reason"]) for match in BLOCK.finditer(text)]


def blocks_in(page, text):
    """Those that are run here."""
    elsewhere, _ = ELSEWHERE.get(name_of(page), (set(), None))
    return [block for block in shown_in(text) if block.is_run and block.language not in elsewhere]


def blocks_of(page):
    return blocks_in(page, page.read_text())


ALL_PAGES = [*sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/*/README.md")), *sorted(ROOT.glob("*.md"))]
PAGES = [page for page in ALL_PAGES if blocks_of(page)]


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
        celery = f"-P {ROOT / 'tests/kit/celery_program.py'}"
        for name, what in (("celery", celery), ("pytest", "-m pytest"), ("python", "")):
            (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {what} "$@"\n')
            (commands / name).chmod(0o755)
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
        if command == "wait":  # each command has a shell of its own, which knows nothing of the others' jobs
            for process in self.background:
                process.wait(DEADLINE_S)
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


def sessions():
    """Each page, and once more with its part on FoundationDB where it has one."""
    for page in PAGES:
        yield pytest.param(page, False, id=page.stem)
        if ON_FOUNDATIONDB in page.read_text():
            yield pytest.param(page, True, id=f"{page.stem}-foundationdb", marks=pytest.mark.foundationdb)


@pytest.mark.process
@pytest.mark.parametrize(("page", "whole"), list(sessions()))
def test_what_a_page_shows_is_what_happens(page, whole, tmp_path, monkeypatch, request):
    if shutil.which("bash") is None and any(block.language == "console" for block in blocks_of(page)):
        pytest.skip("bash is not on PATH")
    monkeypatch.chdir(tmp_path)
    session = Session(tmp_path)
    anywhere, _, on_foundationdb = page.read_text().partition(ON_FOUNDATIONDB)
    try:
        for block in blocks_in(page, anywhere):
            session.run(block)
        if whole:
            session.lead_to(request.getfixturevalue("cluster"))
            for block in blocks_in(page, on_foundationdb):
                session.run(block)
    finally:
        session.close()


def test_what_is_not_run_is_known_with_its_reason():
    """As the page gives it, where it gives one."""
    left = {}
    for page in ALL_PAGES:
        elsewhere, _ = ELSEWHERE.get(name_of(page), (set(), None))
        for block in shown_in(page.read_text()):
            if block.reason is not None or block.language not in RUN | elsewhere:
                left[name_of(page), block.beginning] = block.reason
    assert left.keys() == NOT_RUN.keys()
    for place, reason in left.items():
        assert reason in {None, NOT_RUN[place]}, place
    for named in re.findall(r"tests/[\w/.]+\.py", " ".join(NOT_RUN.values())):
        assert (ROOT / named).is_file(), named


@pytest.mark.parametrize("page", ELSEWHERE)
def test_who_runs_a_page_instead_reads_it(page):
    _, test = ELSEWHERE[page]
    name = Path(page).name if Path(page).name != "README.md" else Path(page).parent.name
    assert f'"{name}"' in (ROOT / test).read_text()


@pytest.mark.parametrize(
    "text",
    ["$ false\n", "$ echo one\ntwo\n", "$ echo one && exit 3\none\n"],
)
def test_a_wrong_session_is_found(tmp_path, text):
    session = Session(tmp_path)
    with pytest.raises(AssertionError, match=r"^\$ "):
        session.run(Block("console", text))
    session.close()
