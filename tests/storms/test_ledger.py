"""What the ledger calls lost, unfinished, doubled and again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .ledger import Ledger, Verdict, teller
from .table import render

TIMEOUT_S = 30


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path) as ledger:
        yield ledger


def judged(ledger: Ledger, steps: str, *found: str, confirmed: str = "m") -> Verdict:
    """``steps``: ``w0+`` for begun, ``w0-`` for ended, ``w0!`` for struck, of one message."""
    kinds = {"+": "begun", "-": "ended"}
    if confirmed:
        ledger.tell("confirmed", confirmed, 0.5)
    for step in steps.split():
        who, kind = step[:-1], step[-1]
        if kind == "!":
            ledger.tell("struck", who)
        else:
            teller(ledger.path, who)(kinds[kind], "m")
    ledger.tell("last", "-")
    assert ledger.wait(lambda: ledger.counts["last"], TIMEOUT_S)
    return ledger.close_books("test", "none", 1, 0.0, found)


@pytest.mark.parametrize(
    ("steps", "found", "lost", "doubled", "again", "unfinished"),
    [
        ("w0+ w0-", (), 0, 0, 0, 0),
        ("", (), 1, 0, 0, 0),
        ("w0+", (), 1, 0, 0, 0),
        ("w0+", ("m",), 0, 0, 0, 1),
        ("w0+ w0- w0+ w0-", (), 0, 1, 0, 0),
        ("w0+ w0- w1+ w1-", (), 0, 1, 0, 0),
        ("w0+ w0! w1+ w1-", (), 0, 0, 1, 0),
        ("w0! w1+ w1- w0+ w0-", (), 0, 0, 1, 0),
        ("w0+ w0! w1+ w1- w2+ w2-", (), 0, 1, 0, 0),
        ("", ("m", "m"), 0, 1, 0, 1),
    ],
)
def test_verdicts(
    ledger: Ledger, steps: str, found: tuple[str, ...], lost: int, doubled: int, again: int, unfinished: int
) -> None:
    verdict = judged(ledger, steps, *found)
    assert verdict.confirmed == 1
    assert (verdict.lost, verdict.doubled, verdict.again, verdict.unfinished) == (lost, doubled, again, unfinished)
    assert verdict.is_good is not bool(lost or doubled or unfinished)
    assert verdict.slowest_s == 0.5


def test_an_unconfirmed_message_may_be_lost_and_not_doubled(ledger: Ledger) -> None:
    assert judged(ledger, "w0+ w0- w1+", confirmed="").doubled == 1
    assert not ledger.missing()


def test_the_call_of_a_frozen_publisher_is_not_the_slowest(ledger: Ledger) -> None:
    teller(ledger.path, "publisher0")("confirmed", "n", 60.0)
    assert judged(ledger, "publisher0! w0+ w0-", "n").slowest_s == 0.5


def test_a_line_too_long_to_be_written_whole_is_refused(ledger: Ledger) -> None:
    with pytest.raises(AssertionError):
        ledger.tell("confirmed", "n" * 600)


def test_the_table_names_what_is_broken(ledger: Ledger) -> None:
    table = render([judged(ledger, "w0+ w0- w1+ w1-")])
    assert "BROKEN" in table
    assert "m was begun by w0, w1" in table
