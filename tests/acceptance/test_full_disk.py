"""Workers that start where messages have filled the disk."""

from dataclasses import replace

import pytest
from kit.disks import small_disk
from kombu.exceptions import OperationalError

pytestmark = pytest.mark.process


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", 4) as disk:
        yield disk


@pytest.fixture
def broker(broker, disk):
    return replace(broker, url=f"fdb+sqlite:///{disk}/broker.db")


@pytest.mark.parametrize("broker", ["sqlite"], indirect=True)
def test_a_worker_starts_on_a_full_disk_and_empties_it(app, broker, start, until):
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
