"""Programs of Celery that start in a fifth of the time: forked off a process that has imported what they need.

The starter has imported Celery and our transport, has one thread and no connection, and waits for requests of one test
process. For each it forks; the child takes its folder, environment, arguments and output, leads a session of its own,
and goes on as ``python -m celery`` does, to the end of a program, with what runs at its exit. When it has ended, the
starter tells its exit code. When the test process ends, the starter does; a program goes on, and the test that
has started it kills it.

Not for a pool of greenlets: it has to patch the standard library before it is imported.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

TESTS = Path(__file__).parents[1]
#: Of an answer, and of a request with its environment.
MOST_BYTES = 1 << 17
IMPORTED = (
    "celery.bin.celery",
    "celery.apps.worker",
    "celery.concurrency.prefork",
    "celery.worker.consumer",
    "celery.worker.state",
    "kombu_fdb.transport",
    "celery_fdb",
)


class Starter:
    """As the test process sees it."""

    def __init__(self) -> None:
        self._ended: dict[int, int] = {}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "kit.starter", str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Forks of this process may have the socket open as well: they are not waited for.
        self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        self._process.wait()

    def start(self, arguments: Sequence[str], env: Mapping[str, str], cwd: Path, output: IO[Any]) -> Forked:
        """``celery`` with these arguments."""
        request = json.dumps({"arguments": list(arguments), "env": dict(env), "cwd": str(cwd)}).encode()
        socket.send_fds(self._control, [request], [output.fileno()])
        while (pid := self._hear(None)) is None:
            pass
        return Forked(self, pid)

    def exit_code(self, pid: int, wait_s: float = 0) -> int | None:
        """None if it has not ended within this time."""
        deadline = time.monotonic() + wait_s
        while pid not in self._ended:
            left = max(deadline - time.monotonic(), 0)
            self._hear(left)
            if not left:
                break
        return self._ended.get(pid)

    def _hear(self, wait_s: float | None) -> int | None:
        """One answer, at most; the process that has started, if that is what it tells."""
        if not select.select([self._control], [], [], wait_s)[0]:
            return None
        answer = self._control.recv(MOST_BYTES)
        if not answer:
            raise RuntimeError("the starter has ended; its output says why")
        told: dict[str, int] = json.loads(answer)
        if "started" in told:
            return told["started"]
        self._ended[told["ended"]] = told["exit_code"]
        return None


class Forked:
    """One program, with the face of ``subprocess.Popen``."""

    def __init__(self, starter: Starter, pid: int) -> None:
        self._starter = starter
        self.pid = pid

    def poll(self) -> int | None:
        return self._starter.exit_code(self.pid)

    def wait(self, timeout: float) -> int:
        exit_code = self._starter.exit_code(self.pid, timeout)
        if exit_code is None:
            raise subprocess.TimeoutExpired("celery", timeout)
        return exit_code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


# -- the starter's process ---------------------------------------------------------------------------------------------


def serve(control: socket.socket) -> None:
    """Returns in each program, once; ends the starter when the test process is gone."""
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            tell_who_ended(control)
        if control in ready:
            request, descriptors, _, _ = socket.recv_fds(control, MOST_BYTES, 1)
            if not request:
                os._exit(0)
            if not (pid := fork(json.loads(request), descriptors[0])):
                for each in (control, woken, waker):
                    each.close()
                return
            os.close(descriptors[0])
            control.send(json.dumps({"started": pid}).encode())


def fork(given: dict[str, Any], output: int) -> int:
    """The child's process; 0 in the child. The parent waits until a signal to the child's group reaches it."""
    leads, led = os.pipe()
    pid = os.fork()
    os.close(leads if pid == 0 else led)
    if pid == 0:
        become(given, output)
        os.close(led)
    else:
        os.read(leads, 1)
        os.close(leads)
    return pid


def become(given: dict[str, Any], output: int) -> None:
    """What a process is given when it begins."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.chdir(given["cwd"])
    os.environ.clear()
    os.environ.update(given["env"])
    sys.argv = ["celery", *given["arguments"]]
    sys.path[:1] = [given["cwd"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def tell_who_ended(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        with suppress(BrokenPipeError):  # the test process has just ended
            control.send(json.dumps({"ended": pid, "exit_code": os.waitstatus_to_exitcode(status)}).encode())


def main() -> None:
    from kit import celery_program

    control = socket.socket(fileno=int(sys.argv[1]))
    celery_program.prepare()
    for name in IMPORTED:
        importlib.import_module(name)
    serve(control)
    celery_program.run()


if __name__ == "__main__":
    main()
