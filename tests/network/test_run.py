"""One run, short. ``make network`` plays long ones, with every fault and seeds of their own."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from kit.history.events import History, read
from kit.history.report import judge, render

from .box import box_unavailable_reason
from .release import RELEASED, ROOT, release_unavailable_reason
from .run import ROLES, Run, play

pytestmark = [
    pytest.mark.foundationdb,
    pytest.mark.process,
    pytest.mark.timeout(500),
    pytest.mark.xdist_group("box"),
]

#: What a few seconds with two faults are enough for.
EXERCISED = {"ONE-PLACE", "ONE-OWNER", "DURABLE", "NOT-TWICE", "COUNTS", "BOUNDED", "Order", "Stop", "Empty"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := box_unavailable_reason():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("run")
    result = play(7, 8, folder, ["pause, short", "kill"])
    assert result.is_good, "\n".join([render(result.lines), *result.complaints])
    return folder


def test_a_short_run_upholds_what_it_exercises(folder: Path) -> None:
    verdicts = {each.guarantee: each.verdict for each in judge(read(folder))}
    assert {each for each, verdict in verdicts.items() if verdict == "holds"} >= EXERCISED
    assert "VIOLATED" not in verdicts.values()


def test_its_history_without_what_came_of_a_message_is_one_of_a_loss(folder: Path) -> None:
    history = read(folder)
    message = next(name for name, deliveries in history.deliveries.items() if deliveries[0].how == "done")
    taken = {each["take"] for each in history.events if each["message"] == message}
    cut = [
        each
        for each in history.events
        if each.kind not in {"start", "end"} or each["message"] != message
        if not (each.kind == "ok" and (each["call"] in taken or each["message"] == message))
    ]
    assert {each.guarantee for each in judge(History(cut)) if each.violations} >= {"DURABLE"}


@pytest.mark.night
def test_an_upgrade_begins_with_the_release_and_ends_with_this_version(tmp_path: Path) -> None:
    if reason := box_unavailable_reason() or release_unavailable_reason():
        pytest.skip(reason)
    result = play(7, 8, tmp_path, ["upgrade"])
    assert result.is_good, "\n".join([render(result.lines), *result.complaints])
    assert result.faults == {"upgrade": 1}
    code = {each.who: each["folder"] for each in read(tmp_path).events if each.kind == "code"}
    released = str(tmp_path / RELEASED)
    assert {who for who, folder in code.items() if folder == released} == {f"{role}.1" for role in ROLES} - {"web1.1"}
    assert {who for who, folder in code.items() if folder == str(ROOT)} >= {f"{role}.2" for role in ROLES}


def test_a_fault_that_another_one_keeps_from_beginning_is_not_counted(tmp_path: Path) -> None:
    """It ended the whole series: a server that was chosen as a coordinator was in a zone that heard nothing."""
    box = MagicMock(servers=["fdb1", "fdb2", "fdb3"])
    run = Run(box, tmp_path, 1, ["coordinators moved"])
    box.move_coordinators.side_effect = [RuntimeError("unreachable"), None]
    with ExitStack() as stack:
        assert run._begin("coordinators moved", stack) == 0.0
        assert not run.faults
        assert run._begin("coordinators moved", stack) > 0.0
    assert run.faults == {"coordinators moved": 1}
    assert {each.over is None for each in read(tmp_path).faults} == {False}
