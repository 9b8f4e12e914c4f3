"""Small file systems, which fill up at once."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["small_disk"]


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
