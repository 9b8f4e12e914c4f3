"""Workers that start where messages have filled the disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.disks import small_disk
from kombu.exceptions import OperationalError

pytestmark = pytest.mark.process


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 4) as disk:
        yield disk


@pytest.fixture
def broker(broker: Any, disk: Path) -> Any:
    return replace(broker, url=f"fdb+sqlite:///{disk}/broker.db")


@pytest.mark.parametrize("broker", ["sqlite"], indirect=True)
def test_a_worker_starts_on_a_full_disk_and_empties_it(app: Any, broker: Any, start: Any, until: Any) -> None:
    """It needs room for a session, a role, its own queue, and the greeting that it sends to all others."""
    sent = 0
    with pytest.raises(OperationalError, match="disk is full"):
        while True:
            app.note.apply_async((f"{sent}",), argsrepr="x" * 100, retry=False)
            sent += 1
    start(mingle=True)
    until(lambda: len(broker.marks("run")) >= sent)
    assert len(broker.count("run")) == sent
    app.note.delay("again")
    until(lambda: broker.marks("run", "again"))
