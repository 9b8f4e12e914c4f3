"""Small file systems, which fill up at once."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kombu_fdb.api.broker import Broker
from kombu_fdb.api.queue import Queue
from kombu_fdb.errors import StoreFull
from kombu_fdb.process.client import close_clients


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """One of its own in ``folder``, which is made. Skips the test where mounting is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def small_broker(folder: Path, patience_s: float) -> Iterator[Broker]:
    """A broker on a disk of 3 MB that it has for itself; its calls wait for ``patience_s`` seconds."""
    patience = dict.fromkeys(("connect_timeout", "operation_timeout", "publish_timeout"), patience_s)
    with small_disk(folder, 3) as disk, Broker.open(f"fdb+sqlite:///{disk}/b.db", **patience) as broker:
        yield broker
        close_clients()


def fill_queue(queue: Queue, size: int) -> int:
    """Until the disk is full; how many messages of this size were stored."""
    stored = 0
    with pytest.raises(StoreFull, match="disk is full"):
        while True:
            queue.put(b"x" * size)
            stored += 1
    return stored
