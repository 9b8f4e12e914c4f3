"""The directory of the bells: one named pipe for each listening process, and the file that tells of newcomers.

Everything in it is reached through the directory's descriptor, and only pipes are written to: see
:mod:`~kombu_fdb.store.sqlite.sidecars`. ``generation`` grows by one byte with each newcomer. Not locked: a caller has
the lock of this process's bells.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

from kombu_fdb.primitives.wakeup import write
from kombu_fdb.store.sqlite.sidecars import Access, open_directory, open_pipe, open_sidecar

GENERATION = "generation"
SUFFIX = ".bell"


class BellDirectory:
    """``<database>-bells/``, made if absent. Raises ``StoreUnavailable`` for what is in the way."""

    def __init__(self, path: str, access: Access) -> None:
        self.path = path
        self._access = access
        #: Only who may enter the directory makes a file in it.
        self._inside = replace(access, exposed=False)
        self._directory = self._generation = -1
        self._open()

    def renew(self) -> None:
        """Make it again if it was removed."""
        if self.size() is None:
            self.close()
            self._open()

    def size(self) -> int | None:
        """Other than before if there are newcomers; None if the directory was removed."""
        if self._generation < 0:
            return None
        status = os.fstat(self._generation)
        return status.st_size if status.st_nlink else None

    def names(self) -> list[str]:
        """Of the pipes."""
        return [name for name in os.listdir(self._directory) if name.endswith(SUFFIX)]

    def make_pipe(self, name: str) -> int:
        """Make one that can't be found yet, and open it for reading. Raises ``OSError``."""
        if os.mkfifo in os.supports_dir_fd:
            os.mkfifo(name, 0o600, dir_fd=self._directory)
        else:  # macOS before 13; what is opened next is checked all the same
            os.mkfifo(os.path.join(self.path, name), 0o600)
        descriptor = open_pipe(name, os.O_RDONLY, directory=self._directory)
        self._inside.share(descriptor, os.path.join(self.path, name))
        return descriptor

    def open_pipe(self, name: str) -> int:
        """For writing. Raises ``OSError``: ``ENXIO`` says that it has no reader."""
        return open_pipe(name, os.O_WRONLY, directory=self._directory)

    def publish(self, hidden: str, name: str) -> None:
        """Let a pipe be found. Raises ``OSError``."""
        os.rename(hidden, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        write(self._generation, b".")

    def remove(self, name: str) -> None:
        """If it is there, and if we may."""
        if self._directory >= 0:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._directory)

    def close(self) -> None:
        """Also all that a forked child may do."""
        descriptors = (self._directory, self._generation)
        self._directory = self._generation = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def _open(self) -> None:
        self._directory = open_directory(self.path, self._access)
        try:
            generation = os.path.join(self.path, GENERATION)
            self._generation = open_sidecar(generation, self._inside, directory=self._directory)
        except BaseException:
            self.close()
            raise
