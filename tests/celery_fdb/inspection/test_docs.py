"""docs/keyspace.md has the keys of the code."""

from __future__ import annotations

import re
from pathlib import Path

from celery_fdb.inspection import schedules

KEYSPACE = Path(__file__).parents[3] / "docs" / "keyspace.md"


def test_the_keys_are_those_of_the_code() -> None:
    assert schedules.__doc__ is not None
    rows = re.findall(r"^(``\(.*)$", schedules.__doc__, flags=re.MULTILINE)
    assert rows
    for row in rows:
        key, value, writer = re.split(r"\s{2,}", row.replace("``", "`"))
        cells = (
            f"| {key} | {value.replace(':class:`EntryReport`', '`celery_fdb/inspection/schedules.py`')} | {writer} |"
        )
        assert cells in KEYSPACE.read_text()
