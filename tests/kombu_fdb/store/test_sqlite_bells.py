"""Other processes' bells are rung where eventlet has replaced what rings them."""

import os

import pytest
from kit.conformance.queue import Bench

from kombu_fdb.store.sqlite.database import SqliteDatabase
from kombu_fdb.store.sqlite.wakeups import digest


def test_eventlets_write_that_never_gives_up_is_not_used(tmp_path, monkeypatch):
    """It tries again for ever where the reader is gone, and where a full pipe must not block."""
    database = SqliteDatabase.open(str(tmp_path / "broker.db"))
    fired = []
    try:
        bench = Bench(database)
        reader, writer = os.pipe()
        dead, orphan = os.pipe()
        os.close(dead)
        database.file.ringer._fds.update({"alive": writer, "dead": orphan})
        monkeypatch.setattr(os, "write", lambda *_: pytest.fail("as eventlet has replaced it"))
        bench.put(b"a")
        fired.append(os.read(reader, 1_000))
        assert "dead" not in database.file.ringer._fds
        os.close(reader)
    finally:
        monkeypatch.undo()
        database.close()
    assert digest(bench.engine.keys.bell("q")) in fired[0]
