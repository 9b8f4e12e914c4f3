"""What happened, as every process wrote it down: one JSON object a line, appended in one write."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def append(path: Path, event: str, **details: Any) -> None:
    """Safe from several processes: short appends are not mixed up, and are there even if the process dies next."""
    line = json.dumps({"event": event, "at": time.time(), "pid": os.getpid(), **details}) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


@dataclass
class Task:
    """One task, whatever number of messages and runs it took."""

    name: str
    sent: list[float] = field(default_factory=list)
    due: list[float] = field(default_factory=list)
    started: list[float] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.ended[-1:] in (["SUCCESS"], ["FAILURE"])

    @property
    def waited(self) -> float | None:
        """Seconds from the moment it could have started until it did."""
        if not self.started or not self.sent:
            return None
        return self.started[0] - max(self.sent[0], self.due[0])


@dataclass
class Journal:
    """The file so far, sorted by task."""

    tasks: dict[str, Task] = field(default_factory=dict)
    #: For each text, how many words were counted, once for each time it was indexed.
    indexed: dict[str, list[int]] = field(default_factory=dict)
    worker_ready: bool = False

    @classmethod
    def read(cls, path: Path) -> Journal:
        journal = cls()
        for line in path.read_text().splitlines() if path.exists() else ():
            journal.add(json.loads(line))
        return journal

    def add(self, entry: dict[str, Any]) -> None:
        if entry["event"] == "ready":
            self.worker_ready = True
        elif entry["event"] == "indexed":
            self.indexed.setdefault(entry["file"], []).append(entry["words"])
        else:
            self._add_to_task(self.tasks.setdefault(entry["id"], Task(entry["task"])), entry)

    @staticmethod
    def _add_to_task(task: Task, entry: dict[str, Any]) -> None:
        if entry["event"] == "sent":
            task.sent.append(entry["at"])
            task.due.append(entry["due"])
        elif entry["event"] == "started":
            task.started.append(entry["at"])
            task.pids.append(entry["pid"])
        elif entry["event"] == "ended":
            task.ended.append(entry["state"])

    def named(self, name: str) -> list[Task]:
        return [task for task in self.tasks.values() if task.name == name]
