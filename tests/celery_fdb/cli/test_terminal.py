"""Tables in terminals of any width."""

from __future__ import annotations

import pytest
from rich.console import Console

from celery_fdb.cli.terminal import table

ID = "d5703c1b-3a56-4471-b347-2101a1620075"
ROWS = [
    ("shop.tasks.charge", ID, "FAILURE", "32 s ago", "payments", "acme", "celery@web-1", "CardDeclined: no money"),
    ("shop.tasks.mail", ID[::-1], "SUCCESS", "33 s ago", "mails", "", "celery@web-1", ""),
]


def shown(width: int) -> list[str]:
    console = Console(width=width, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(table("task id state >ended queue key worker error", ROWS))
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [60, 80])
def test_no_cell_is_torn_in_a_narrow_terminal(width: int) -> None:
    lines = shown(width)
    assert max(map(len, lines)) <= width
    for cell in (each for row in ROWS for each in row):
        assert any(cell in line for line in lines), cell
    assert any("key acme" in line for line in lines), "a cell has its heading"
    assert sum("key" in line for line in lines) == 1, "an empty one is left out"


def test_what_fits_is_a_table() -> None:
    heading, *rows = shown(200)
    assert heading.split()[:3] == ["task", "id", "state"]
    assert len(rows) == len(ROWS)


def test_what_is_longer_than_a_line_goes_on_in_the_next() -> None:
    console = Console(width=40)
    with console.capture() as captured:
        console.print(table("a b", [("x", "y" * 100)]))
    assert captured.get().count("y") == 100
