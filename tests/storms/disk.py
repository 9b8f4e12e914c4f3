"""The disk is full, and is not: a tmpfs of a few MB under the store, and a file that takes what is left of it.

While it is full publishers are refused, in words, and workers wait, and one of each is killed with kill -9; once there
is room again all goes on by itself.

What fills the disk to its end are messages in a queue without a consumer: whatever is consumed makes room as
fast as it is published. Once there is room they are moved to the workers' queue, so each that was confirmed has to run.

A worker whose acknowledgement is refused has lost its connection. The acknowledgement is kept, but Celery forgets what
a child has begun and its parent has not heard of, so that is begun again (docs/guarantees.md, "When a worker loses its
connection"). So each worker that met a full disk counts as struck, and its second runs stand under *again*.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kombu_fdb import Broker

from .kills import fill
from .ledger import Verdict
from .stage import PATIENCE_S, QUEUE, Skipped, Stage, staged

SIZE = "24m"
MESSAGE_BYTES = 4_000
FILLER_BYTES = 40_000
#: More than the disk can hold, many times.
FILLERS = 20_000
#: A queue without a consumer.
ASIDE = "aside"


def run(rounds: int, seed: int, store: str = "sqlite") -> Verdict:
    if store != "sqlite":
        raise Skipped("FoundationDB stops writing before its disk is full")
    with small_disk() as folder, staged("disk", seed, place=folder) as stage:
        for _ in range(rounds):
            fill(stage, size=MESSAGE_BYTES)
            stage.expect("ended", stage.rng.randint(1, 40))
            for worker in stage.alive("worker"):
                stage.strike(worker)
            with full(folder / "ballast"):
                fill(stage, size=MESSAGE_BYTES)  # a process that begins now meets the full disk first of all
                for role in ("worker", "publisher"):
                    if alive := stage.alive(role):
                        stage.kill(stage.rng.choice(alive))
                fill(stage, size=MESSAGE_BYTES)  # and those who follow on the killed, what these left half written
                # The file and its log have room of their own: only who publishes without end is sure to be refused.
                filler = stage.publisher(FILLERS, size=FILLER_BYTES, queue=ASIDE)
                stage.expect("refused", 2)
            stage.expect("confirmed", 1)
            stage.kill(filler)
            bring_in(stage)
        return stage.finish()


def bring_in(stage: Stage) -> None:
    """What stood aside is work like any other."""
    with Broker.open(stage.url, connect_timeout=PATIENCE_S, operation_timeout=PATIENCE_S) as broker:
        broker._engine.messages.move(ASIDE, QUEUE)


@contextmanager
def small_disk() -> Iterator[Path]:
    """A tmpfs, which only root may mount."""
    if os.geteuid() != 0:
        raise Skipped("only root can mount a tmpfs")
    with tempfile.TemporaryDirectory(prefix="storm-disk-") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=700", "storm", folder]
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Skipped(f"no tmpfs can be mounted here: {done.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def full(ballast: Path) -> Iterator[None]:
    """Takes all the room there is, to the last page."""
    with ballast.open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
    try:
        yield
    finally:
        ballast.unlink()
