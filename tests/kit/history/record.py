"""Writes a history: each process appends to a file of its own what it asks for and what it is answered.

An event is one line of JSON in one ``write``, so a process that is killed has told all of it or nothing. It carries the
process's own readings of both clocks. ``clock`` names the machine's monotonic clock: readings of different machines, or
of different time namespaces, have different names and are never compared.

A call has an invocation and an answer, as in Jepsen: ``ok`` if it happened, ``fail`` if it did not, ``info`` if the
caller can't know. A call without an answer is one of ``info``.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

#: How often the pulse beats, and how late it must be for that to be told, in seconds.
PULSE_S, LATE_S = 0.1, 0.15

Value = TypeVar("Value")


def clock_name() -> str:
    """Two processes with the same one may compare their monotonic clocks."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/time').readlink()}"


class Answer(NamedTuple):
    """``kind``: ok, fail or info. ``call`` is its name, by which others refer to it."""

    kind: str
    call: str
    value: Any = None


class Recorder:
    """One process's part in a history. A forked child goes on in a file of its own, under the same name."""

    def __init__(self, folder: str | Path, who: str, clock: str | None = None) -> None:
        self.who = who
        self._folder, self._clock = Path(folder), clock or clock_name()
        self._lock = threading.Lock()
        self._pid = self._file = self._number = -1
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()  # another thread may have held it when the parent forked

    def note(self, kind: str, **fields: Any) -> None:
        with self._lock:
            if self._pid != os.getpid():
                self._pid, self._number = os.getpid(), 0
                path = self._folder / f"{self.who}-{self._pid}.jsonl"
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            self._number += 1
            event = {
                "who": self.who,
                "pid": self._pid,
                "number": self._number,
                "clock": self._clock,
                "mono_s": time.monotonic(),
                "wall_s": time.time(),
                "kind": kind,
                **fields,
            }
            os.write(self._file, json.dumps(event).encode() + b"\n")

    def call(
        self,
        op: str,
        work: Callable[[], Value],
        *,
        refusals: tuple[type[BaseException], ...] = (),
        doubts: tuple[type[BaseException], ...],
        tell: Callable[[Value], Mapping[str, Any]] = lambda _: {},
        **fields: Any,
    ) -> Answer:
        """Do it, and write down invocation and answer.

        ``refusals``: errors that say that it did not happen; ``doubts``: those that leave it open. Any other is raised.
        ``tell``: what of the value belongs into the history.
        """
        name = f"{self.who}-{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
        self.note("invoke", call=name, op=op, **fields)
        try:
            value = work()
        except refusals as error:
            self.note("fail", call=name, error=str(error))
            return Answer("fail", name, error)
        except doubts as error:
            self.note("info", call=name, error=str(error))
            return Answer("info", name, error)
        self.note("ok", call=name, **tell(value))
        return Answer("ok", name, value)

    def pulse(self, over: threading.Event) -> None:
        """Tell of each time this process stood still. A verdict on times leaves these out: they are the machine's."""
        while not over.is_set():
            before = time.monotonic()
            over.wait(PULSE_S)
            late = time.monotonic() - before - PULSE_S
            if late > LATE_S and not over.is_set():
                self.note("stall", seconds=late)
