"""The processes of the tour: workers, the dashboard, and how they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
DEADLINE_S = 120.0


class TourFailed(Exception):
    """Something did not come about; the text says what, and where to look."""


def wait(what: str, condition: Callable[[], Any], log: Path | None = None) -> Any:
    """Until it is true; its value."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        if time.monotonic() > deadline:
            last = "" if log is None else "\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise TourFailed(f"waited {DEADLINE_S:.0f} s for {what}, in vain.{last}")
        time.sleep(0.05)
    return value


class Processes:
    """All that were started; the end of the ``with`` block ends them."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def worker(self, name: str) -> None:
        """Two processes for tasks, as ``celery worker`` has them by default; returns when it is ready."""
        options = ("--concurrency=2", "--loglevel=INFO", f"--hostname={name}@shop")
        log = self._start(name, "-m", "celery", "-A", "shop", "worker", *options)
        wait(f"worker {name}", lambda: " ready." in log.read_text(errors="replace"), log)

    def dashboard(self, port: int) -> str:
        """Its address."""
        log = self._start("web", "-m", "celery", "-A", "shop", "fdb", "web", "--write", "--port", str(port))
        found = wait("the dashboard", lambda: re.search(r"http://[\d.]+:\d+", log.read_text(errors="replace")), log)
        return str(found[0])

    def kill(self, name: str) -> int:
        """As the kernel does when memory is short: no goodbye. Its process id."""
        process = self._running.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return process.pid

    def _start(self, name: str, *command: str) -> Path:
        log = self._home / f"{name}.log"
        with log.open("wb") as output:
            self._running[name] = subprocess.Popen(
                [sys.executable, *command], cwd=HERE, stdout=output, stderr=output, start_new_session=True
            )
        return log
