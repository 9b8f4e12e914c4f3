"""Other processes for tests: programs that obey line by line, and forked children."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Self

#: For what never comes; a busy machine needs a good part of it.
DEADLINE_S = 240.0
#: For the programs, too, the kit is a package.
TESTS = Path(__file__).parents[1]
_PYTHONPATH = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []


class Program:
    """A Python process that the test talks to in lines: it prints what happened, the test tells it to go on."""

    def __init__(self, source: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", textwrap.dedent(source), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *_PYTHONPATH]), **(env or {})},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout
        self._buffer = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        self._input.close()
        self._output.close()

    def tell(self, line: str = "go") -> None:
        self._input.write(line.encode() + b"\n")
        self._input.flush()

    def hear(self) -> str:
        """The next line it prints; fails when none comes in time or the process ended."""
        deadline = time.monotonic() + DEADLINE_S
        while b"\n" not in self._buffer:
            left = max(deadline - time.monotonic(), 0)
            readable, _, _ = select.select([self._output], [], [], left)
            chunk = os.read(self._output.fileno(), 65536) if readable else b""
            assert chunk, f"no line; exit code {self.process.poll()}"
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line.decode()

    def end(self) -> int:
        return self.process.wait(DEADLINE_S)


class Programs:
    """Python programs in the background; each has a log in the same directory."""

    def __init__(self, directory: Path, env: dict[str, str], cwd: Path | None = None) -> None:
        self.directory, self.env, self.cwd = directory, {**env, "PYTHONUNBUFFERED": "1"}, cwd
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *arguments: str) -> Path:
        """Its log."""
        log = self.directory / f"{name}.log"
        with log.open("w") as output:
            command = [sys.executable, *arguments]
            self.processes.append(
                subprocess.Popen(
                    command, cwd=self.cwd, env=self.env, stdout=output, stderr=output, start_new_session=True
                )
            )
        return log

    def stop(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


def run_python(*arguments: object, exit_code: int | None = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """A Python program that has ended, with this exit code if one is given, and what it said."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **options)
    assert exit_code in {None, done.returncode}, done.stdout + done.stderr
    return done


def in_child(work: Callable[[], object]) -> None:
    """Run ``work`` in a forked child, and fail if it does."""
    child = fork(work)
    child.join(DEADLINE_S)
    exit_code = child.exitcode
    if exit_code is None:
        child.kill()
    assert exit_code == 0, f"the child's exit code: {exit_code}"


def fork(work: Callable[[], object]) -> ForkProcess:
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    return child


def until(condition: Callable[[], Any], timeout_s: float = DEADLINE_S, say: Callable[[], object] | None = None) -> Any:
    """Wait for what has no event to wait for; its value. ``say``: what it looked like in the end."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain{f': {say()}' if say else ''}"
        time.sleep(0.005)
    return value
