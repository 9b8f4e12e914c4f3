"""The writer's side of the bells: after a commit, a digest of each rung key goes into every listener's pipe.

The protocol stands in :mod:`~kombu_fdb.store.sqlite.wakeups.listener`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Sequence

from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.primitives.locks import Turn
from kombu_fdb.primitives.wakeup import write
from kombu_fdb.store.sqlite.wakeups.listener import ALL_KEYS, LOCK_S, NEWS_BYTES, Listener, digest
from kombu_fdb.store.sqlite.wakeups.pipes import BellDirectory

logger = logging.getLogger(__name__)


class Ringer:
    """Tells every listening process which keys a commit changed."""

    def __init__(self, bells: BellDirectory, listener: Listener) -> None:
        self._bells = bells
        self._listener = listener
        self._fds: dict[str, int] = {}
        self._listed: int | None = -1
        self._closed = False

    def ring(self, keys: Sequence[bytes]) -> None:
        """After the commit. Never raises: a bell that fails is made good by ``CHECK_S``."""
        if not self._fds and not self._listener.watches:
            # Asked without the lock: a process that begins to listen from now on reads the values afterwards.
            with contextlib.suppress(OSError):  # it is being closed
                size = self._bells.size()
                if size is not None and size == self._listed:
                    return
        digests = [digest(key) for key in keys]
        lock, turn = self._listener.lock, Turn()
        try:  # as FairLock.run does, in half the time
            try:
                if lock.acquire(turn, LOCK_S):
                    self._ring(digests)
            except (OSError, StoreUnavailable) as error:
                logger.warning("could not wake the other processes: %s", error)
            finally:
                lock.release(turn)
        except BaseException:
            lock.release(turn)
            raise

    def close(self) -> None:
        """When no thread rings; what still does then leaves the descriptors open."""
        with contextlib.suppress(StoreUnavailable):
            self._listener.lock.run(self.close_files, LOCK_S)

    def close_files(self) -> None:
        """All that a forked child may do."""
        self._closed = True
        while self._fds:
            os.close(self._fds.popitem()[1])
        self._bells.close()

    def _ring(self, digests: list[bytes]) -> None:
        if self._closed:
            return
        self._refresh()
        if self._fds:
            self._tell_others(digests)
        self._listener.hear(digests)

    def _refresh(self) -> None:
        """List the FIFOs if there may be new ones; the size is taken before."""
        size = self._bells.size()
        if size is None:  # the directory was removed
            self._bells.renew()
            self._listed, size = -1, self._bells.size()
        if size != self._listed:
            for name in self._bells.names():
                if name not in self._fds and name != self._listener.name:
                    self._connect(name)
            self._listed = size

    def _connect(self, name: str) -> None:
        try:
            self._fds[name] = self._bells.open_pipe(name)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno == errno.ENXIO:
                self._bells.remove(name)
            else:
                logger.warning("can't wake the process behind %s/%s: %s", self._bells.path, name, error)

    def _tell_others(self, digests: list[bytes]) -> None:
        news = b"".join(digests)
        if len(news) > NEWS_BYTES:
            news = ALL_KEYS
        for name, fd in list(self._fds.items()):
            try:
                write(fd, news)
            except BlockingIOError:
                pass
            except BrokenPipeError:
                os.close(self._fds.pop(name))
                self._bells.remove(name)
