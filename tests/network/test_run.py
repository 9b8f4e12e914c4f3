"""One run, short. ``make network`` plays long ones, with every fault and seeds of their own."""

from __future__ import annotations

import subprocess
import threading
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import MagicMock

import pytest
from kit.history.checks import RATE_SKEW_S
from kit.history.events import History, read
from kit.history.record import Recorder
from kit.history.report import judge, render
from kit.processes import until

from . import run as run_module
from .box import ZONES, box_unavailable_reason
from .faults import FAULTS, Strike, _until
from .release import RELEASED, ROOT, release_unavailable_reason
from .run import CLOCKS, ROLES, Actor, Run, play

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


def a_box(**traits: object) -> MagicMock:
    return MagicMock(machines={}, client=lambda *_: MagicMock(), **traits)


def test_a_fault_that_another_one_keeps_from_beginning_is_not_counted(tmp_path: Path) -> None:
    """It ended the whole series: a server that was chosen as a coordinator was in a zone that heard nothing."""
    box = a_box(servers=["fdb1", "fdb2", "fdb3"])
    run = Run(box, tmp_path, 1, ["coordinators moved"])
    box.move_coordinators.side_effect = [RuntimeError("unreachable"), None]
    for lasts in (False, True):
        lasts_s, stack = run._begin("coordinators moved")
        with stack:
            assert (lasts_s > 0) is lasts
        assert run.faults["coordinators moved"] == lasts
    assert {each.over is None for each in read(tmp_path).faults} == {False}


def test_each_fault_is_healed_at_its_own_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deaf zone was so for minutes, as a rolling restart beside it was waited for."""
    healed, in_time = threading.Event(), []
    faults = {
        "zone deaf": lambda *_: Strike([], 0.01, _until(healed.set)),
        "rolling restart": lambda *_: Strike([], 0.01, _until(bool, lambda: in_time.append(healed.wait(60)))),
    }
    monkeypatch.setattr(run_module, "FAULTS", faults)
    run = Run(a_box(), tmp_path, 1, ["rolling restart", "zone deaf"])
    run.box.heal.side_effect = KeyboardInterrupt  # ends the first round
    run.rng = MagicMock(uniform=lambda *_: 0.0, randint=lambda *_: 2, sample=lambda names, _: names)
    with pytest.raises(KeyboardInterrupt):
        run._strike(600)
    assert in_time == [True]


def test_no_fault_is_healed_before_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []  # how long each was waited for, and what was healed
    monkeypatch.setattr(run_module, "_pause", told.append)
    faults = {name: partial(lasting, told, name, s) for name, s in (("zone deaf", 30), ("locked", 20))}
    monkeypatch.setattr(run_module, "FAULTS", faults)
    run = Run(a_box(), tmp_path, 1, list(faults))
    run.rng = MagicMock(uniform=lambda *_: 0.0, randint=lambda *_: 2, sample=lambda names, _: names)

    def end_the_round() -> None:
        told.append("all")
        raise KeyboardInterrupt

    run.box.heal.side_effect = end_the_round
    with pytest.raises(KeyboardInterrupt):
        run._strike(600)
    assert told.index(30) < told.index("zone deaf") < told.index("all")
    assert told.index(20) < told.index("locked") < told.index("all")


def lasting(told: list[object], name: str, lasts_s: float, *_: object) -> Strike:
    return Strike([], lasts_s, _until(lambda: told.append(name)))


def test_a_kill_waits_for_a_message_that_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(a_box(), tmp_path, 1, ["kill"])
    recorder = Recorder(tmp_path, "taker1.1")
    recorder.note("start", message="m")
    recorder.note("end", message="m", how="done")
    looks = []

    def look(_: float) -> None:
        looks.append(1)
        if len(looks) == 3:
            recorder.note("start", message="n")

    monkeypatch.setattr(run_module, "_pause", look)
    client = run._clients["taker1"]
    run.actors = [Actor("taker1", "taker1.1", client, MagicMock(), tmp_path)]
    run.await_hold(client)
    assert len(looks) == 3
    run.await_hold(run._clients["relay"])
    assert len(looks) == 3 + run_module.LOOKS


@pytest.mark.parametrize("name", ["zone lost", "zone deaf", "one server left", "disk full"])
def test_a_fault_ends_what_it_did_and_no_other(name: str, tmp_path: Path) -> None:
    """A zone that came back heard all, and a disk that had room did, though another fault had cut them off."""
    servers = [MagicMock(zone=zone) for zone in ZONES]
    run = Run(a_box(servers=servers), tmp_path, 1, [name])
    with FAULTS[name](run, Random(1)).hold:
        pass
    assert not any(each.heal.called for each in [run.box, *servers, *run.struck_ones])


@pytest.mark.parametrize("name", ["pause, short", "pause, long"])
def test_a_paused_process_stands_still_until_it_is_healed(name: str, tmp_path: Path) -> None:
    run = Run(a_box(), tmp_path, 1, [name])
    strike = FAULTS[name](run, Random(1))
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        run.actors = [Actor("taker1", "taker1.1", strike.struck[0], process, tmp_path)]
        try:
            with strike.hold:
                until(lambda: state(process) == "T")
            until(lambda: state(process) != "T")
        finally:
            process.kill()


def state(process: subprocess.Popen[Any]) -> str:
    """As ps has it."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_kill_falls_mostly_upon_consumers(tmp_path: Path) -> None:
    run = Run(a_box(), tmp_path, 1, ["kill"])
    run.await_hold = awaited = MagicMock()  # type: ignore[method-assign]  # nothing is held in it
    chosen = [FAULTS["kill"](run, Random(seed)).struck[0] for seed in range(100)]
    assert sum(each in run.consumers for each in chosen) > 70
    assert any(each not in run.consumers for each in chosen)
    assert awaited.call_count > 60
    assert {each.args[0] for each in awaited.call_args_list} <= {*run.consumers}


@pytest.mark.parametrize("seed", [1, 2])
def test_clocks_are_off_by_so_much_that_rates_are_checked_in_every_other_run(seed: int, tmp_path: Path) -> None:
    """In no run with this fault they were: each clock was off by ten minutes and more."""
    run = Run(a_box(), tmp_path, seed, [CLOCKS])
    with FAULTS[CLOCKS](run, run.rng).hold:
        ahead_s = [each.set_clock.call_args.args[0] for each in run.consumers]  # type: ignore[attr-defined]  # a mock
    assert (max(ahead_s) - min(ahead_s) < RATE_SKEW_S) is (seed % 2 == 0)
    assert all(each.set_clock.call_args.args == (0,) for each in run.consumers)  # type: ignore[attr-defined]  # a mock


def test_a_seed_says_how_far_apart_the_zones_are(tmp_path: Path) -> None:
    runs = [Run(a_box(link=MagicMock()), tmp_path, seed, [CLOCKS]) for seed in range(20)]
    assert {name for run in runs for name in run.faults} == {f"zones {each} ms apart" for each in ("0.5", "2", "5")}
    linked = {
        tuple(run.faults): {call.args[2].delay_s + call.args[2].jitter_s for call in run.box.link.call_args_list}  # type: ignore[attr-defined]  # a mock
        for run in runs
    }
    assert linked == {
        (): set(),
        ("zones 0.5 ms apart",): {0.00025},
        ("zones 2 ms apart",): {0.001},
        ("zones 5 ms apart",): {0.0025},
    }
