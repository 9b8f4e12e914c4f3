"""The processes of the tour: workers, the dashboard, and how they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from celery_fdb.cli.terminal import Refused

DEADLINE_S = 120.0
#: Between the tour and a process of it, which thereby ends with the tour, even if that is killed.
GUARD = '"$@" </dev/null & read _; kill $!; wait'


def wait(what: str, condition: Callable[[], Any], log: Path | None = None) -> Any:
    """Until it is true; its value. Raises ``Refused``."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        if time.monotonic() > deadline:
            last = None if log is None else " | ".join(log.read_text(errors="replace").splitlines()[-15:])
            raise Refused("waited in vain", tour=what, seconds=DEADLINE_S, log=last)
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
            assert process.stdin is not None
            process.stdin.close()
        for process in self._running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                self._kill(process)

    def worker(self, name: str) -> None:
        """Two processes for tasks, as ``celery worker`` has them by default; returns when it is ready."""
        log = self._start(name, "worker", "--concurrency=2", "--loglevel=INFO", f"--hostname={name}@shop")
        wait(f"worker {name}", lambda: " ready." in log.read_text(errors="replace"), log)

    def dashboard(self, port: int) -> str:
        """Its address."""
        log = self._start("web", "fdb", "web", "--write", "--port", str(port))
        found = wait("the dashboard", lambda: re.search(r"http://[\d.]+:\d+", log.read_text(errors="replace")), log)
        return str(found[0])

    def kill(self, name: str) -> int:
        """As the kernel does when memory is short: no goodbye. The id of its process group."""
        process = self._running.pop(name)
        self._kill(process)
        return process.pid

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        with process:  # closes its pipe, and waits
            os.killpg(process.pid, signal.SIGKILL)

    def _start(self, name: str, *command: str) -> Path:
        log = self._home / f"{name}.log"
        celery = ("sh", "-c", GUARD, "guard", sys.executable, "-m", "celery", "-A", "celery_fdb.cli.tour.shop")
        environ = {**os.environ, "TMPDIR": str(self._home)}  # what a killed one leaves goes with the rest
        with log.open("wb") as output:
            self._running[name] = subprocess.Popen(
                [*celery, *command],
                cwd=self._home,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return log
