"""Celery's file backend, for results only, and safe to read while it is written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from celery.backends.filesystem import FilesystemBackend


class AtomicFiles(FilesystemBackend):
    """The chord asks for results every second; it must never see half of one."""

    def set(self, key: str | bytes, value: str | bytes) -> None:
        target = Path(os.fsdecode(self._filename(key)))
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
            file.write(value if isinstance(value, bytes) else value.encode())
        Path(file.name).replace(target)
