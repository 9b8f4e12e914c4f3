"""The release that a run may begin with, from which its programs are upgraded to this version."""

from __future__ import annotations

import io
import subprocess
import tarfile
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
RELEASED = "v0.2.0"
PACKAGES = ("kombu_fdb", "celery_fdb", "_kombu_fdb_autoload.py")


@lru_cache(maxsize=1)
def release_unavailable_reason() -> str | None:
    """Why there is none, in one line; a checkout may be shallow, and a source distribution is none."""
    try:
        git = subprocess.run(
            ["git", "-C", ROOT, "rev-parse", "-q", "--verify", f"{RELEASED}^{{commit}}"],
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        return "git is not on PATH"
    return f"{RELEASED} is not in this checkout" if git.returncode else None


def unpack(folder: Path) -> Path:
    """Its packages as they were, below ``folder``: before this one's on the path, they are the ones that run."""
    archive = subprocess.run(["git", "-C", ROOT, "archive", RELEASED, *PACKAGES], capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packed:
        packed.extractall(folder / RELEASED, filter="data")
    return folder / RELEASED
