"""The command line where the libraries of an extra are not installed, as after ``pip install celery-fdb``."""

import pytest
from kit.processes import run_python

WEB, METRICS = {"h11", "jinja2", "starlette", "uvicorn"}, {"prometheus_client"}
PROGRAM = """
import sys
sys.modules.update(dict.fromkeys({absent}))  # to import one of them is an ImportError
from celery_fdb.cli import fdb
fdb()
"""


@pytest.mark.parametrize(
    ("command", "absent", "code", "printed"),
    [
        ("--help", WEB | METRICS, 0, "Serve the dashboard"),
        ("web --help", WEB, 0, "--token-file"),
        ("web", WEB, 1, "pip install 'celery-fdb[web]'"),
        ("web", {"uvicorn"}, 1, "pip install 'celery-fdb[web]'"),  # the extra django has the others
        ("tour", WEB, 1, "pip install 'celery-fdb[web]'"),
        ("tour", {"uvicorn"}, 1, "pip install 'celery-fdb[web]'"),
        ("metrics", METRICS, 1, "pip install 'celery-fdb[metrics]'"),
        ("metrics --once", WEB, 0, "celery_fdb_"),
    ],
)
def test_a_command_needs_its_own_extra_and_names_it(tmp_path, command, absent, code, printed):
    if command == "metrics --once":
        pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    url = f"fdb+sqlite:///{tmp_path / 'broker.db'}"
    done = run_python("-c", PROGRAM.format(absent=absent), "--broker", url, *command.split(), exit_code=code)
    assert printed in done.stdout + done.stderr, done.stdout + done.stderr
