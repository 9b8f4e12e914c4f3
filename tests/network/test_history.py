"""Each anomaly, in a handmade history that has it, and in one that differs in a single event and has it not."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kit.history import checks
from kit.history.events import Event, History, read
from kit.history.record import Recorder
from kit.history.report import judge, render

from kombu_fdb.errors import CapacityExceeded, CommitUnknown

from .faults import FAULTS
from .release import ROOT

TTL_S = 6.0
SETUP = {
    "session_ttl": TTL_S,
    "sweep_interval": 1.0,
    "queues": {
        "q": {},
        "q.dead": {"kept": True},
        "line": {"ordered": "queue", "single": True},
        "keyed": {"max_in_flight": 1, "ordered": "key"},
        "fair": {"fair": True},
        "rated": {"rate": [2.0, 2]},
        "poison": {"delivery_limit": 2},
    },
}


def at(mono_s: float, who: str, kind: str, *, clock: str = "here", ahead_s: float = 0.0, **fields: Any) -> Event:
    return Event(who, clock, mono_s, mono_s + 1_000 + ahead_s, kind, fields)


def published(
    message: str, begin_s: float, outcome: str | None = "ok", *, who: str = "p", took_s: float = 0.1, **fields: Any
) -> list[Event]:
    clock, ahead_s = fields.pop("clock", "here"), fields.pop("ahead_s", 0.0)
    name = f"{who}-{message}-{begin_s}"
    common: dict[str, Any] = {"clock": clock, "ahead_s": ahead_s, "call": name}
    asked = at(begin_s, who, "invoke", op="publish", message=message, **{"queue": "q", **fields}, **common)
    return [asked] if outcome is None else [asked, at(begin_s + took_s, who, outcome, **common)]


def ran(
    message: str, begin_s: float, end_s: float | None, who: str = "w", how: str = "done", **common: Any
) -> list[Event]:
    begun = at(begin_s, who, "start", message=message, **common)
    return [begun] if end_s is None else [begun, at(end_s, who, "end", message=message, how=how, **common)]


def took(
    message: str | None,
    begin_s: float,
    answer_s: float,
    settled: str = "ack",
    outcome: str | None = "ok",
    *,
    who: str = "t",
    queue: str = "q",
    held_s: float = 0.1,
) -> list[Event]:
    name = f"{who}-{begin_s}"
    events = [
        at(begin_s, who, "invoke", call=name, op="take", queue=queue),
        at(answer_s, who, "ok", call=name, message=message),
    ]
    if outcome is not None:
        end_s = answer_s + held_s
        events.append(at(end_s, who, "invoke", call=f"{name}!", op=settled, take=name, message=message))
        events.append(at(end_s + 0.1, who, outcome, call=f"{name}!"))
    return events


def called(
    op: str, begin_s: float, end_s: float | None, outcome: str = "ok", who: str = "o", **fields: Any
) -> list[Event]:
    name = f"{who}-{op}-{begin_s}"
    asked = at(begin_s, who, "invoke", call=name, op=op, **fields)
    return [asked] if end_s is None else [asked, at(end_s, who, outcome, call=name)]


#: What ``u`` runs is not what set the run up.
UPGRADED = [[at(0.0, who, "code", folder=folder)] for who, folder in (("runner", "this"), ("u", "release"))]


def waited(services: int) -> list[list[Event]]:
    """A message of key b, for so many of key a."""
    taken = [(f"{n}", 2 + n) for n in range(services)]
    return [
        published("m", 1, queue="fair", key="b"),
        *(published(name, 1, queue="fair", key="a") + took(name, s, s + 0.5) for name, s in taken),
        took("m", 7, 7.5),
    ]


def fault(name: str, begin_s: float, end_s: float | None, *struck: str) -> list[Event]:
    begun = at(begin_s, "runner", "fault", fault=name, name=name, struck=struck)
    return [begun] if end_s is None else [begun, at(end_s, "runner", "healed", fault=name)]


def stalled(at_s: float, seconds: float, who: str = "w") -> list[Event]:
    return [at(at_s, who, "stall", seconds=seconds)]


def stopped(begin_s: float, end_s: float, outcome: str = "ok") -> list[Event]:
    return called("stop", begin_s, end_s, outcome, who="runner", target="w")


def locked(begin_s: float, end_s: float) -> list[Event]:
    return fault("locked", begin_s, end_s)


def final(*messages: tuple[str, str, str], **fields: Any) -> list[Event]:
    return [at(1_000.0, "observer", "final", messages=messages, **fields)]


def history(*parts: list[Event]) -> History:
    setup = at(0.0, "runner", "setup", **SETUP)
    return History([setup, *(event for part in parts for event in part)])


#: For longer than the others take to bring back what ``w`` holds.
PAUSED = fault("pause", 3, 24, "w")

#: A check, a history that violates it, and how that one differs which does not.
#: Delivered again after its owner's end, before which a take got no answer.
ENDED_UNANSWERED = [
    *(published("m", 1), ran("m", 2, 3), stopped(4, 5), ran("m", 9, 10, "v")),
    called("take", 1, 4.2, "info", queue="q"),
]

CASES: dict[str, tuple[checks.Check, list[list[Event]], list[list[Event]]]] = {
    "acknowledged, and never seen": (checks.lost, [published("m", 1), final()], [published("m", 1, "info"), final()]),
    "begun, and never ended": (
        checks.lost,
        [published("m", 1), ran("m", 2, None), final()],
        [published("m", 1), ran("m", 2, None), final(("m", "q", "leased"))],
    ),
    "buried, and not among the dead": (
        checks.lost,
        [published("m", 1), ran("m", 2, 3, how="buried"), final()],
        [published("m", 1), ran("m", 2, 3, how="buried"), final(("m", "q.dead", "ready"))],
    ),
    "purged before it came": (
        checks.lost,
        [called("purge", 1, 2, queue="q"), published("m", 3), final()],
        [called("purge", 1, 4, queue="q"), published("m", 3), final()],
    ),
    "purged elsewhere": (
        checks.lost,
        [published("m", 1), called("purge", 2, 3, queue="other"), final()],
        [published("m", 1), called("purge", 2, None, queue="q"), final()],
    ),
    "refused, and there": (
        checks.unexpected,
        [published("m", 1, "fail"), ran("m", 2, 3)],
        [published("m", 1, None), ran("m", 2, 3)],
    ),
    "never published": (checks.unexpected, [ran("m", 2, 3)], [published("m", 1), ran("m", 2, 3)]),
    "stored twice": (
        checks.stored_twice,
        [published("m", 1), final(("m", "q", "ready"), ("m", "q.dead", "ready"))],
        [published("m", 1), published("m", 2), final(("m", "q", "ready"), ("m", "q.dead", "ready"))],
    ),
    "published again after an unknown outcome, and stored twice": (
        checks.stored_twice,
        [published("m", 1, "info"), published("m", 2, again=True), final(("m", "q", "ready"), ("m", "q", "ready"))],
        [published("m", 1, "info"), published("m", 2, again=True), final(("m", "q", "ready"))],
    ),
    "acked, and still stored": (
        checks.stored_twice,
        [published("m", 1), took("m", 2, 3), final(("m", "q", "leased"))],
        [published("m", 1), took("m", 2, 3, outcome="info"), final(("m", "q", "leased"))],
    ),
    "two acks accepted": (
        checks.acked_twice,
        [published("m", 1), took("m", 2, 3), took("m", 2.5, 3.05, who="u")],
        [published("m", 1), took("m", 2, 3), took("m", 2.5, 3.05, who="u", outcome="fail")],
    ),
    "out after its ack": (
        checks.acked_twice,
        [published("m", 1), took("m", 2, 3), took("m", 4, 5, who="u", outcome=None)],
        [published("m", 1), took("m", 2, 3), took("m", 3.1, 5, who="u", outcome=None)],
    ),
    "begun by two while the first lived": (
        checks.doubled,
        [published("m", 1), ran("m", 2, 9, "w"), ran("m", 3, 9, "v"), fault("kill", 2.5, None, "u")],
        [published("m", 1), ran("m", 2, 9, "w"), ran("m", 3, 9, "v"), fault("kill", 2.5, None, "w")],
    ),
    "a pause shorter than the TTL": (
        checks.doubled,
        [published("m", 1), ran("m", 2, 20, "w"), fault("pause", 3, 5, "w"), ran("m", 12, 13, "v")],
        [published("m", 1), ran("m", 2, 20, "w"), fault("pause", 3, 15, "w"), ran("m", 12, 13, "v")],
    ),
    "a fault that was soon over, though what was killed does not come back": (
        checks.doubled,
        [published("m", 1), ran("m", 2, 9, "w"), fault("pause", 2.5, 3, "w"), ran("m", 5, 9, "v")],
        [published("m", 1), ran("m", 2, 9, "w"), fault("kill", 2.5, 3, "w"), ran("m", 5, 9, "v")],
    ),
    "struck only afterwards": (
        checks.doubled,
        [published("m", 1), ran("m", 2, 9, "w"), ran("m", 3, 9, "v"), fault("kill", 4, None, "w")],
        [published("m", 1), ran("m", 2, 9, "w"), ran("m", 5, 9, "v"), fault("kill", 4, None, "w")],
    ),
    "acked by none, released by its holder": (
        checks.doubled,
        [published("m", 1), took("m", 2, 3, "ack"), took("m", 4, 5, who="u")],
        [published("m", 1), took("m", 2, 3, "release"), took("m", 4, 5, who="u")],
    ),
    "released only later": (
        checks.doubled,
        [published("m", 1), took("m", 2, 3, "release", held_s=9), took("m", 4, 5, who="u")],
        [published("m", 1), took("m", 2, 3, "release", held_s=1), took("m", 4, 5, who="u")],
    ),
    "buried after a cut in which another had it, and its queue is replayed": (
        checks.doubled,
        [
            published("m", 1),
            *(ran("m", 2, 20, "w", "buried"), ran("m", 12, 13, "v"), called("replay", 30, 31, queue="q")),
            fault("cut", 3, 5, "w"),
        ],
        [
            published("m", 1),
            *(ran("m", 2, 20, "w", "buried"), ran("m", 12, 13, "v"), called("replay", 30, 31, queue="q")),
            fault("cut", 3, 15, "w"),
        ],
    ),
    "begun at once after a pause in which another had it": (
        checks.doubled,
        [published("m", 1), ran("m", 12, 13, "v"), fault("pause", 11, 14, "w"), ran("m", 14, 15, "w")],
        [published("m", 1), ran("m", 12, 13, "v"), fault("pause", 2, 14, "w"), ran("m", 14, 15, "w")],
    ),
    "ended before the store took its acks": (
        checks.doubled,
        [published("m", 1), ran("m", 2, 3), stopped(4, 5), locked(2, 4.5), ran("m", 9, 10, "v")],
        [published("m", 1), ran("m", 2, 3), stopped(4, 5), locked(2, 8), ran("m", 9, 10, "v")],
    ),
    "ended while the store answered others": (
        checks.doubled,
        [*ENDED_UNANSWERED, took(None, 2, 4.5, outcome=None)],
        [*ENDED_UNANSWERED, took(None, 2, 5.5, outcome=None)],
    ),
    "ended by itself": (
        checks.doubled,
        [published("m", 1), ran("m", 2, 3), stopped(4, 5, "ok"), ran("m", 9, 10, "v")],
        [published("m", 1), ran("m", 2, 3), stopped(4, 5, "info"), ran("m", 9, 10, "v")],
    ),
    "dead, and back without a replay": (
        checks.doubled,
        [published("m", 1), ran("m", 2, 3, how="buried"), ran("m", 5, 6)],
        [published("m", 1), ran("m", 2, 3, how="buried"), called("replay", 4, 4.5, queue="q"), ran("m", 5, 6)],
    ),
    "begun again elsewhere, and not by the release": (
        checks.doubled,
        [published("m", 1), *UPGRADED, ran("m", 2, 3, "w"), ran("m", 4, 9, "v")],
        [published("m", 1), *UPGRADED, ran("m", 2, 3, "u"), ran("m", 4, 9, "v")],
    ),
    "one dedup id, two messages": (
        checks.once_published,
        [published(m, 1, dedup="d", window=300, who=m) + ran(m, 2, 3) for m in ("m", "n")],
        [published("m", 1, dedup="d", window=300), published("n", 1, dedup="d", window=300), ran("n", 2, 3)],
    ),
    "one dedup id, and clocks an hour apart": (
        checks.once_published,
        [published(m, 1, dedup="d", window=300, who=m) + ran(m, 2, 3) for m in ("m", "n")],
        [
            published("m", 1, dedup="d", window=300, ahead_s=3_600) + ran("m", 2, 3),
            published("n", 1, dedup="d", window=300) + ran("n", 2, 3),
        ],
    ),
    "before it was due": (
        checks.early,
        [published("m", 1, delay=5), ran("m", 5.9, 7)],
        [published("m", 1, delay=5), ran("m", 6.0, 7)],
    ),
    "before it was due by every clock": (
        checks.early,
        [published("m", 1, delay=5), [at(2, "w", "note", ahead_s=1.8)], ran("m", 4.1, 7)],
        [published("m", 1, delay=5), [at(2, "w", "note", ahead_s=1.9)], ran("m", 4.1, 7)],
    ),
    "past its deadline": (
        checks.overdue,
        [called("take", 1, 7.5, deadline=5)],
        [called("take", 1, 7.5, deadline=5), stalled(6, 1, "o")],
    ),
    "past its deadline, and never answered": (
        checks.overdue,
        [called("take", 1, None, deadline=5), [at(9, "o", "note")]],
        [called("take", 1, None, deadline=5), [at(9, "another", "note")]],
    ),
    "a stop that takes long": (
        checks.stopped_late,
        [called("stop", 1, 20, deadline=15, target="w"), fault("pause", 2, 8, "v")],
        [called("stop", 1, 20, deadline=15, target="w"), fault("pause", 2, 8, "w")],
    ),
    "back too late after a kill": (
        checks.back_late,
        [published("m", 1), ran("m", 2, None), fault("kill", 3, None, "w"), ran("m", 17, 18, "v"), stalled(2, 9, "v")],
        [published("m", 1), ran("m", 2, None), fault("kill", 3, None, "w"), ran("m", 15, 18, "v")],
    ),
    "back too late after a pause, though its task ended": (
        checks.back_late,
        [published("m", 1), ran("m", 2, 23, "w"), fault("pause", 3, 23, "w"), ran("m", 17, 18, "v")],
        [published("m", 1), ran("m", 2, 23, "w"), fault("pause", 3, 23, "w"), ran("m", 15, 18, "v")],
    ),
    "not taken from a process that stood still": (
        checks.back_late,
        [published("m", 1), ran("m", 2, 20, "w"), fault("pause", 3, 19, "w")],
        [published("m", 1), ran("m", 2, 20, "w"), fault("pause", 3, 14, "w")],
    ),
    "back too late, as its ack did not land": (
        checks.back_late,
        [published("m", 1), took("m", 2, 2.8, outcome="info", who="w"), PAUSED, ran("m", 17, 18, "v")],
        [published("m", 1), took("m", 2, 2.8, outcome="info", who="w"), PAUSED, ran("m", 15, 18, "v")],
    ),
    "back too late, of what was taken as the fault began": (
        checks.back_late,
        [published("m", 1), took("m", 2.9, 3.1, outcome=None), fault("kill", 3, None, "t"), ran("m", 17, 18, "v")],
        [published("m", 1), took("m", 2.9, 4.1, outcome=None), fault("kill", 3, None, "t"), ran("m", 17, 18, "v")],
    ),
    "back too late, though the pause is what the dead process tells of": (
        checks.back_late,
        [published("m", 1), ran("m", 2, 25), PAUSED, ran("m", 23, 26, "v"), stalled(22, 20)],
        [published("m", 1), ran("m", 2, 25), PAUSED, ran("m", 23, 26, "v"), stalled(22, 20, "v")],
    ),
    "back too late after the last of two faults": (
        checks.back_late,
        [published("m", 1), ran("m", 2, None), PAUSED, fault("kill", 30, 32, "w"), ran("m", 44, 45, "v")],
        [published("m", 1), ran("m", 2, None), PAUSED, fault("kill", 30, 32, "w"), ran("m", 42, 45, "v")],
    ),
    "back too late after the first of two faults": (
        checks.back_late,
        [
            published("m", 1),
            ran("m", 2, None),
            fault("kill", 3, 5, "w"),
            ran("m", 17, 18, "v"),
            fault("kill", 19, 21, "w"),
        ],
        [
            published("m", 1),
            ran("m", 2, None),
            fault("kill", 3, 5, "w"),
            ran("m", 15, 18, "v"),
            fault("kill", 19, 21, "w"),
        ],
    ),
    "back too late, while another was struck": (
        checks.back_late,
        [published("m", 1), ran("m", 2, None), fault("kill", 3, None, "w"), locked(4, 9), ran("m", 22, 26, "v")],
        [published("m", 1), ran("m", 2, None), fault("kill", 3, None, "w"), locked(4, 11), ran("m", 22, 26, "v")],
    ),
    "left over": (
        checks.back_late,
        [published("m", 1), final(("m", "q", "ready"))],
        [published("m", 1), final(("m", "q.dead", "ready"))],
    ),
    "delayed, and due": (
        checks.back_late,
        [published("m", 1, delay=5), final(("m", "q", "delayed"))],
        [published("m", 1, delay=5, ahead_s=3_600), final(("m", "q", "delayed"))],
    ),
    "out of order": (
        checks.disordered,
        [published("m", 1, queue="line"), published("n", 2, queue="line"), ran("n", 3, 4), ran("m", 5, 6)],
        [published("m", 1, queue="line"), published("n", 1.05, queue="line"), ran("n", 3, 4), ran("m", 5, 6)],
    ),
    "out of order in a key": (
        checks.disordered,
        [published(m, s, queue="keyed", key="a") for m, s in (("m", 1), ("n", 2))] + [ran("n", 3, 4), ran("m", 5, 6)],
        [published(m, s, queue="keyed", key=m) for m, s in (("m", 1), ("n", 2))] + [ran("n", 3, 4), ran("m", 5, 6)],
    ),
    "out of order by clocks that can't be compared": (
        checks.disordered,
        [published("m", 1, queue="line"), published("n", 2, queue="line"), ran("n", 3, 4), ran("m", 5, 6)],
        [
            published("m", 1, queue="line", clock="there"),
            published("n", 2, queue="line"),
            ran("n", 3, 4),
            ran("m", 5, 6),
        ],
    ),
    "two of a key at once": (
        checks.over_limit,
        [published(m, 1, queue="keyed", key="a") + ran(m, s, s + 2, m) for m, s in (("m", 2.0), ("n", 3.9))],
        [published(m, 1, queue="keyed", key="a") + ran(m, s, s + 2, m) for m, s in (("m", 2.0), ("n", 4.1))],
    ),
    "two of a key at once, one in a dead worker": (
        checks.over_limit,
        [published(m, 1, queue="keyed", key="a") + ran(m, s, 9, m) for m, s in (("m", 2.0), ("n", 5.0))]
        + [fault("pause", 6, 20, "m")],
        [published(m, 1, queue="keyed", key="a") + ran(m, s, 9, m) for m, s in (("m", 2.0), ("n", 5.0))]
        + [fault("pause", 3, 20, "m")],
    ),
    "two active consumers": (
        checks.two_active,
        [published(m, 1, queue="line") + ran(m, s, s + 2, m) for m, s in (("m", 2.0), ("n", 3.9))],
        [published(m, 1, queue="line") + ran(m, s, s + 2, "w") for m, s in (("m", 2.0), ("n", 3.9))],
    ),
    "more deliveries than the limit": (
        checks.undying,
        [published("m", 1, queue="poison"), *(took("m", s, s + 0.5, "release") for s in (2, 3, 4, 5))],
        [published("m", 1, queue="poison"), *(took("m", s, s + 0.5, "release") for s in (2, 3, 4))],
    ),
    "faster than its rate": (
        checks.too_fast,
        [published(f"{n}", 1, queue="rated") + took(f"{n}", 2 + n / 9, 2.1 + n / 9) for n in range(5)],
        [published(f"{n}", 1, queue="rated") + took(f"{n}", 2 + n / 2, 2.1 + n / 2) for n in range(5)],
    ),
    "a key that waits for more than 2K services": (checks.behind, waited(5), waited(4)),
    "a key that waits, while a session is struck": (
        checks.behind,
        [*waited(5), fault("lock", 3, 4)],
        [*waited(5), fault("pause", 3, 4, "t")],
    ),
    "a key that waits, with a taker of the release": (
        checks.behind,
        [*waited(5), *UPGRADED, took(None, 0.5, 1, outcome=None, who="u", queue="fair")],
        [*waited(5), *UPGRADED, took(None, 0.5, 2, outcome=None, who="u", queue="fair")],
    ),
    "a counter that is wrong": (checks.miscounted, [final(counts=["q"])], [final(counts=[])]),
    "a row that is left": (checks.orphaned, [final(leftovers=["row"])], [final(leftovers=[])]),
}


@pytest.mark.parametrize("case", CASES)
def test_an_anomaly_is_found_and_its_neighbour_is_none(case: str) -> None:
    check, violating, upholding = CASES[case]
    assert check(history(*violating)).violations
    assert not check(history(*upholding)).violations


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([published("m", 1), ran("m", 2, 25), fault("cut", 3, 24, "w")], id="its owner may have beaten"),
        pytest.param([published("m", 1), ran("m", 1.5, 1.9), PAUSED], id="it had ended"),
        pytest.param([published("m", 1), ran("m", 2, 25, how="buried"), PAUSED], id="it is dead, and replayed"),
        pytest.param([published("m", 1, queue="poison"), ran("m", 2, 25), PAUSED], id="it may be dead, and replayed"),
        pytest.param([published("m", 1), took("m", 2, 3, "release", "info", who="w"), PAUSED], id="it was released"),
        pytest.param(
            [published("m", s, who=who) for s, who in ((1, "p"), (2, "o"))] + [ran("m", 2, 25), PAUSED],
            id="it was put in twice",
        ),
        pytest.param([published("m", 1), ran("m", 25, 26), PAUSED], id="it began when its owner went on"),
        pytest.param([published("m", 1), ran("m", 2, 25), locked(2, 30), PAUSED], id="nothing else went on"),
    ],
)
def test_what_may_have_come_back_for_another_reason_is_not_judged(parts: list[list[Event]]) -> None:
    for following in ([], ran("m", 50, 51, "v")):
        assert checks.back_late(history(*parts, following)) == (0, [])


def test_what_was_refused_had_been_taken_from_its_owner() -> None:
    refused = took("m", 2, 2.9, outcome="fail", who="w", held_s=22)
    assert checks.back_late(history(published("m", 1), refused, PAUSED)) == (0, [])


def test_each_check_has_its_anomalies() -> None:
    assert {check for each in checks.CHECKS.values() for check in each} == {check for check, *_ in CASES.values()}


def test_each_guarantee_of_the_page_has_a_check() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text()
    tags = re.findall(r"^\| `([A-Z-]+)` \|", page, re.MULTILINE)
    assert tags
    assert set(tags) <= checks.CHECKS.keys()


def test_each_fault_was_exercised_in_ten_runs_of_five_minutes() -> None:
    lines = (ROOT / "tests" / "network" / "runs.tsv").read_text().splitlines()
    rows = [dict(zip(lines[0].split("\t"), line.split("\t"), strict=True)) for line in lines[1:]]
    runs = Counter(
        each.rpartition(" ")[0] for row in rows if int(row["seconds"]) >= 300 for each in row["faults"].split(", ")
    )
    assert {name: runs[name.replace(",", "")] for name in FAULTS if runs[name.replace(",", "")] < 10} == {}


def test_what_did_not_happen_is_not_exercised() -> None:
    assert {each.guarantee: each.verdict for each in judge(history())} == dict.fromkeys(checks.CHECKS, "not exercised")


def test_the_shortest_history_is_told() -> None:
    lines = judge(history(published("m", 1), ran("m", 2, None), published("n", 3), final()))
    told = render(lines)
    assert "n was acknowledged, and is gone" in told
    assert "m was acknowledged" not in told
    assert {each.guarantee for each in lines if each.violations} == {"DURABLE"}


def test_what_is_recorded_is_read(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "p", clock="here")

    def refuse() -> None:
        raise CapacityExceeded

    def doubt() -> None:
        raise CommitUnknown

    for work in (lambda: "value", refuse, doubt):
        recorder.call(
            "publish",
            work,
            refusals=(CapacityExceeded,),
            doubts=(CommitUnknown,),
            tell=lambda value: {"told": value},
            message="m",
        )
    recorder.note("start", message="m")
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text() + '{"who": "p", "cl')
    found = read(tmp_path)
    assert [each.outcome for each in found.publishes["m"]] == ["ok", "fail", "info"]
    assert [each.answered["told"] for each in found.publishes["m"] if each.answered] == ["value", None, None]
    assert found.attempts("m") == 2
    assert [each.how for each in found.deliveries["m"]] == ["open"]
    assert all(one.precedes(other) for one, other in zip(found.events, found.events[1:], strict=False))
