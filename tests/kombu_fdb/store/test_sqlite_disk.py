"""SQLite's store on a small disk: it fills up, is emptied, and goes on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from kit.conformance.store import commit, retry_on

from kombu_fdb.api.broker import Broker
from kombu_fdb.errors import StoreError, StoreUnavailable
from kombu_fdb.process.client import close_clients
from kombu_fdb.store.retry import Retry
from kombu_fdb.store.sqlite.database import SqliteDatabase

MB = 1024 * 1024
#: A disk that is full says so at once; on a busy machine everything else may take its time.
PATIENCE_S = 60.0


@pytest.fixture(params=[3, 8, 40], ids="{} MB".format)
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = f"size={request.param}m"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount: {mounted.stderr.decode().strip()}")
    yield disk
    close_clients()
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(database: SqliteDatabase, size: int = 20_000) -> list[bytes]:
    """Until it is full; what was confirmed."""
    stored: list[bytes] = []
    with pytest.raises(StoreUnavailable, match=r"disk is full.*Free space on the file system of"):
        while True:
            key = b"%06d" % len(stored)
            commit(database, lambda tr, key=key: tr.set(key, bytes(size)))  # type: ignore[misc]
            stored.append(key)
    return stored


def keys(database: SqliteDatabase) -> list[bytes]:
    return [key for key, _ in commit(database, lambda tr: tr.get_range(b"0", b"9"))]


def test_a_disk_that_messages_filled_is_emptied_and_filled_again(disk: Path) -> None:
    """It used to end for good where the log had grown to all that was left."""
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        for _ in range(3):
            stored = fill(database)
            assert keys(database) == stored
            for key in stored:
                commit(database, lambda tr, key=key: (tr.clear(key), tr.add(b"done", 1)))  # type: ignore[misc]
            assert keys(database) == []


def test_much_of_a_small_disk_is_for_messages(disk: Path) -> None:
    size = os.statvfs(disk).f_blocks * os.statvfs(disk).f_frsize
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        assert len(fill(database)) * 20_000 > size / 4


def test_a_full_disk_is_read_and_opened_by_others(disk: Path) -> None:
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        stored = fill(database)
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        assert keys(database) == stored
        for key in stored[:5]:
            commit(database, lambda tr, key=key: tr.clear(key))  # type: ignore[misc]
        commit(database, lambda tr: tr.set(b"again", bytes(20_000)))


def test_space_that_others_free_is_found_without_a_restart(disk: Path) -> None:
    size = os.statvfs(disk).f_blocks * os.statvfs(disk).f_frsize
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(size // 2))
        stored = fill(database)
        assert keys(database) == stored
        ballast.unlink()
        commit(database, lambda tr: tr.set(b"after", bytes(20_000)))
        more = fill(database)
        assert len(more) > len(stored)


def test_acks_on_a_disk_that_others_filled(disk: Path) -> None:
    """As far as the room in SQLite's log reaches, which has been used once."""
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        for number in range(40):
            commit(database, lambda tr: tr.set(b"%06d" % number, bytes(5_000)))  # noqa: B023
        for _ in range(400):  # the log reaches its size, and begins anew
            commit(database, lambda tr: tr.set(b"again", os.urandom(20_000)))
        take_all(disk / "ballast")
        for number in range(5):
            commit(database, lambda tr: tr.clear(b"%06d" % number))  # noqa: B023
        (disk / "ballast").unlink()
        commit(database, lambda tr: tr.set(b"after", bytes(20_000)))


def take_all(path: Path) -> None:
    with path.open("wb", buffering=0) as ballast:
        for size in (65536, 4096):
            try:
                while ballast.write(bytes(size)) == size:
                    pass
            except OSError:
                pass


@pytest.mark.timeout(600)
def test_workers_empty_a_full_broker(disk: Path) -> None:
    patience = dict.fromkeys(("connect_timeout", "operation_timeout", "publish_timeout"), PATIENCE_S)
    with Broker.open(f"fdb+sqlite:///{disk}/b.db", **patience) as broker:
        queue = broker.queue("q")
        sent = 0
        with pytest.raises(StoreError, match="disk is full"):
            while True:
                queue.put(b"x" * 20_000)
                sent += 1
        for _ in range(sent):
            job = queue.take(timeout=PATIENCE_S)
            assert job is not None
            job.ack()
        queue.put(b"again")
        assert queue.count() == 1


def test_a_deletion_on_a_full_disk_waits_for_a_reader(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads keeps the log from beginning anew; an ack at that moment used to fail."""
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        retry, refused = retry_on(database, b"token/"), []
        stored = fill(database)
        reader = database.begin(timeout_s=PATIENCE_S, read_only=True)
        reader.get(stored[0])

        def finish(*_: object) -> bool:
            refused.append(True)
            reader.cancel()
            return True

        monkeypatch.setattr(Retry, "_pause", finish)
        for key in stored:
            retry(lambda tr, key=key: (tr.clear(key), tr.add(b"done", 1)), timeout_s=PATIENCE_S)  # type: ignore[misc]
        assert keys(database) == []
        assert refused, "the reader was in nobody's way, so this shows nothing"


def test_a_publication_on_a_full_disk_is_refused_at_once(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        retry = retry_on(database, b"token/")
        fill(database)
        monkeypatch.setattr(Retry, "_pause", lambda *_: pytest.fail("it was tried again"))
        with pytest.raises(StoreUnavailable, match="disk is full"):
            retry(lambda tr: tr.set(b"more", bytes(60_000)), timeout_s=PATIENCE_S)


def test_a_full_disk_is_purged(disk: Path) -> None:
    """In one go, not message by message."""
    patience = dict.fromkeys(("connect_timeout", "operation_timeout", "publish_timeout"), PATIENCE_S)
    with Broker.open(f"fdb+sqlite:///{disk}/b.db", **patience) as broker:
        queue, sent = broker.queue("q"), 0
        for _ in range(2):
            sent = 0
            with pytest.raises(StoreError, match="disk is full"):
                while True:
                    queue.put(b"x" * 20_000)
                    sent += 1
            assert queue.purge() == sent
        queue.put(b"again")
        assert queue.count() == 1
