"""An action leaves an entry of the audit, begun before it and completed after it, however it ends."""

import logging
from contextlib import suppress
from pathlib import Path

import pytest
from kit.processes import run_python

from celery_fdb.operations.action import Action, Outcome, Request, log_audit
from celery_fdb.operations.catalogue import ACTIONS
from kombu_fdb import Broker
from kombu_fdb.errors import StoreUnavailable

ROOT = Path(__file__).parents[3]


@pytest.fixture
def broker(tmp_path):
    with Broker.open(f"fdb+sqlite:///{tmp_path}/broker.db") as broker:
        yield broker


def told(caplog):
    return [each.getMessage() for each in caplog.records if each.name == "celery_fdb.audit"]


def test_an_action_is_in_the_log_before_and_after(broker, caplog):
    caplog.set_level(logging.INFO, "celery_fdb.audit")
    seen = []
    broker.declare("q")

    def run(broker, request):
        seen.append(told(caplog))
        return ACTIONS["pause"].run(broker, request)

    outcome = Action("pause", "Pause", "", run, takes_key=True).perform(broker, Request("q"), log_audit("ann"))
    assert outcome == Outcome("Paused q.")
    assert seen == [["ann on q: Pause (q): begun."]]
    assert told(caplog)[1:] == ["ann on q: Paused q."]
    assert broker.queue("q").control().paused


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (StoreUnavailable("it went away"), "failed, it went away"),
        (KeyError("x"), "failed, KeyError: 'x'"),
        (KeyboardInterrupt(), "failed, KeyboardInterrupt: "),
    ],
)
def test_an_entry_ends_however_the_action_does(broker, caplog, error, ending):
    caplog.set_level(logging.INFO, "celery_fdb.audit")

    def run(broker, request):
        raise error

    with suppress(type(error)):
        Action("pause", "Pause", "", run, takes_key=True).perform(broker, Request("q", key="k"), log_audit("ann"))
    assert told(caplog)[-1] == f"ann on q: Pause (key 'k' of q): {ending}"


def test_what_has_no_entry_is_not_done(broker):
    def full(queue, text):
        raise OSError("disk full")

    broker.declare("q")
    with pytest.raises(OSError, match="disk full"):
        ACTIONS["pause"].perform(broker, Request("q"), full)
    assert not broker.queue("q").control().paused


def test_no_name_forges_a_line_of_the_log(broker, caplog):
    caplog.set_level(logging.INFO, "celery_fdb.audit")
    queue = broker.declare("q\nroot on q: \x1b[2J\u202e")
    ACTIONS["pause"].perform(broker, Request(queue.name), log_audit("ann\n"))
    assert all("\n" not in each and "\x1b" not in each and "\u202e" not in each for each in told(caplog))
    assert told(caplog)[0].startswith("ann\\n on q\\nroot on q: \\x1b[2J\\u202e: Pause")


@pytest.mark.parametrize(
    ("logging_of_the_program", "is_told"),
    [
        ("", True),
        ("import django.conf, django; django.conf.settings.configure(); django.setup()", True),
        ("import uvicorn; uvicorn.Config(print).configure_logging()", True),
        ("import logging; logging.basicConfig()", True),
        ("import logging; logging.getLogger('celery_fdb.audit').setLevel('WARNING')", False),
    ],
)
def test_what_is_done_is_told_on_stderr_unless_the_program_says_otherwise(logging_of_the_program, is_told):
    for library in {"django", "uvicorn"} & set(logging_of_the_program.replace(";", " ").split()):
        pytest.importorskip(library)
    code = f"""
{logging_of_the_program}
from celery_fdb.operations.action import log_audit
log_audit("eve")("jobs", "Pause jobs?")("Paused jobs.")
"""
    done = run_python("-c", code, cwd=ROOT)
    assert done.stderr.count("eve on jobs: Paused jobs.") == is_told
