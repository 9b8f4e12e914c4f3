"""Whatever goes wrong in the shop is found."""

import pytest

from celery_fdb.cli.tour import Entry, entries, rows, verdict

KILLED, ALIVE = 7, 8
LOST = "all that was sent has run"
TWICE = "only what a killed process had begun ran again"
CHORD = "the chord ran once, with all results"
RETRIES = "what failed was tried again after 1 s and 2 s"
EARLY = "nothing ran before its ETA"


def ran(*ends):
    return [Entry(what, waited_s, worker) for what, waited_s, worker in ends]


SENT = ["pay 1", "survey 1", "stocktaking 0", "inventory 0"]
GOOD = ran(
    ("try 1", 0.1, ALIVE),
    ("try 1", 1.1, ALIVE),
    ("try 1", 3.2, ALIVE),
    ("pay 1", 5.0, ALIVE),
    ("survey 1", 0.0, ALIVE),
    ("begin 0", 0.1, KILLED),
    ("begin 0", 0.2, ALIVE),
    ("stocktaking 0", 4.0, ALIVE),
    ("inventory 0", 4.1, ALIVE),
)


def failures(ran, counted=100):
    checks = verdict(SENT, ran, killed=KILLED, articles=100, counted=counted)
    return [check["claim"] for check in checks if not check["holds"]]


def test_a_good_run_passes():
    assert failures(GOOD) == []
    assert next(rows(SENT, GOOD)) == ("pay", "1", "1", "0", "5.00")


def test_a_task_that_the_killed_worker_had_ended_may_run_again():
    assert failures([*GOOD, *ran(("pay 1", 6.0, KILLED))]) == []


def without(what):
    return [each for each in GOOD if each.what != what]


SPOILT = {
    "lost": (without("pay 1"), [LOST]),
    "ran twice": ([*GOOD, *ran(("pay 1", 6.0, ALIVE))], [TWICE]),
    "the killed worker's work was not begun again": ([*without("begin 0"), *ran(("begin 0", 0.1, KILLED))], [TWICE]),
    "the chord's body ran twice": ([*GOOD, *ran(("inventory 0", 6.0, KILLED))], [CHORD]),
    "no retry": (without("try 1"), [RETRIES]),
    "one retry too few": ([*without("try 1"), *ran(("try 1", 0.1, ALIVE), ("try 1", 1.1, ALIVE))], [RETRIES]),
    "too short a pause": (
        [*without("try 1"), *ran(("try 1", 0.1, ALIVE), ("try 1", 1.1, ALIVE), ("try 1", 3.0, ALIVE))],
        [RETRIES],
    ),
    "early": ([*without("survey 1"), *ran(("survey 1", -0.1, ALIVE))], [EARLY]),
    "never due": (without("survey 1"), [LOST, EARLY]),
}


@pytest.mark.parametrize("name", SPOILT)
def test_whatever_goes_wrong_is_found(name):
    spoilt, claims = SPOILT[name]
    assert failures(spoilt) == claims


@pytest.mark.parametrize("counted", [None, 99, ValueError("the body failed")])
def test_a_wrong_result_of_the_chord_is_found(counted):
    assert failures(GOOD, counted) == [CHORD]


def test_the_journal_is_read_as_it_is_written():
    assert entries("pay 1\t0.500000\t7\nbegin 0\t-1\t8\n") == ran(("pay 1", 0.5, 7), ("begin 0", -1, 8))
