"""The demo is a test: it judges itself, and here its judgement is judged."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

RETRIES = "what failed twice ran 3 times, after 1 s and 2 s"
LATER = "what was for later ran once, not early"
WORDCOUNT = Path(__file__).parents[2] / "examples" / "wordcount"


@pytest.mark.process
def test_the_demo_on_sqlite():
    done = subprocess.run(
        [sys.executable, str(WORDCOUNT / "run.py")], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: everything ran exactly as often as it should have" in done.stdout
    assert "FAIL" not in done.stdout


@pytest.mark.process
@pytest.mark.foundationdb
def test_the_demo_on_foundationdb():
    done = subprocess.run(
        [sys.executable, str(WORDCOUNT / "run.py"), "--store", "fdb"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.process
def test_a_broker_that_cannot_be_used_is_one_line():
    done = subprocess.run(
        [sys.executable, str(WORDCOUNT / "run.py"), "--broker", "fdb+sqlite:////nowhere/broker.db"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 2
    assert "could not run" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.fixture
def verdict(monkeypatch):
    monkeypatch.syspath_prepend(str(WORDCOUNT))
    import verdict

    yield verdict
    for name in ("verdict", "journal"):
        sys.modules.pop(name)


def entries():
    """A run in which all went well, with one text."""
    yield {"event": "ready"}
    for number, name in enumerate(("fetch", "parse", "count"), start=1):
        yield from run_of(name, at=number)
    yield {"event": "indexed", "file": "a.txt", "words": 3}
    yield from run_of("look_up_errata", at=1, state="RETRY")
    yield from run_of("look_up_errata", at=2.1, state="RETRY")
    yield from run_of("look_up_errata", at=4.2)
    yield from run_of("send_report", at=5.1, due=5)
    yield {"event": "started", "task": "tasks.scan_archive", "id": "scan_archive", "at": 1, "pid": 1}
    yield from run_of("scan_archive", at=2, pid=2)


def run_of(name, *, at, state="SUCCESS", due=0, pid=1):
    common = {"task": f"tasks.{name}", "id": name, "pid": pid}
    yield {**common, "event": "sent", "at": at - 0.1, "due": due}
    yield {**common, "event": "started", "at": at}
    yield {**common, "event": "ended", "at": at, "state": state}


@pytest.fixture
def good(verdict):
    from journal import Journal

    journal = Journal()
    for entry in entries():
        journal.add(entry)
    counts = {"the": 2, "end": 1}
    return verdict.Outcome(journal, {"a.txt": counts}, counts, {"ready in celery": 0})


def failures(verdict, outcome):
    return [check.claim for check in verdict.judge(outcome) if not check.holds]


def test_a_good_run_passes(verdict, good):
    assert failures(verdict, good) == []


def start_again(journal, name):
    journal.tasks[name].started.append(9)
    journal.tasks[name].ended.append("SUCCESS")


SPOILT = {
    "indexed twice": (lambda journal: journal.indexed["a.txt"].append(3), "every text was indexed exactly once"),
    "not indexed": (lambda journal: journal.indexed.clear(), "every text was indexed exactly once"),
    "unknown text": (lambda journal: journal.indexed.update({"b.txt": [1]}), "every text was indexed exactly once"),
    "ran twice": (lambda journal: start_again(journal, "parse"), "every link of every chain ran once"),
    "never ran": (lambda journal: journal.tasks.pop("parse"), "every link of every chain ran once"),
    "a fourth attempt": (lambda journal: start_again(journal, "look_up_errata"), RETRIES),
    "too short a pause": (lambda journal: journal.tasks["look_up_errata"].started.__setitem__(1, 1.5), RETRIES),
    "early": (lambda journal: journal.tasks["send_report"].started.__setitem__(0, 4.9), LATER),
    "due twice": (lambda journal: start_again(journal, "send_report"), LATER),
    "never due": (lambda journal: journal.tasks.pop("send_report"), LATER),
    "a third run": (lambda journal: start_again(journal, "scan_archive"), "what was killed ran again and finished"),
    "lost": (lambda journal: journal.tasks["scan_archive"].ended.clear(), "what was killed ran again and finished"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_whatever_goes_wrong_is_found(verdict, good, name):
    spoil, claim = SPOILT[name]
    spoil(good.journal)
    assert failures(verdict, good) == [claim]


def test_a_wrong_total_is_found(verdict, good):
    for total in (None, {"the": 2}):
        claims = failures(verdict, dataclasses.replace(good, total=total))
        assert claims == ["the chord's total is that of a direct count"]


def test_what_is_left_is_found(verdict, good):
    left = dataclasses.replace(good, left={"ready in celery": 0, "leased in celery": 1})
    assert failures(verdict, left) == ["the store is empty"]
