"""How a commit in one process wakes another one: named pipes beside the database, no polling.

Model. Every process that ever armed a watch owns one FIFO in ``<database>-bells/``, and reads it from one daemon thread
while watches are armed. After a commit that rang bells (``set_versionstamped_value``) the writer puts an 8-byte digest
of each such key into every FIFO. The reader fires the watches with that digest.

*No change is lost between reading and arming.* The arming transaction notes the value it saw (``watch.seen``). After it
ended, ``Listener.arm`` registers the watch, the FIFO being in place, and only then the database reads the value again
and fires if it differs. Any other commit either came before that second read, which sees it, or after it; then its
writer lists the FIFOs after it committed, that is after ours was in place, finds it, and the digest meets a registered
watch.

*Which FIFOs exist* is cached under the size of the file ``generation``, to which every newcomer appends one byte after
its FIFO is in place. A writer takes the size before it lists, so a newcomer it missed has changed the size by the next
ring, and reads the value again after this one. (The directory's mtime would not do: it stands still within a clock
tick.) A FIFO gets its final name only after its owner opened it, so one without a reader is a dead process's.

What fails:

* the reader is busy and its pipe runs full: the writer's EAGAIN is ignored, and a reader that finds much news fires all
  its watches;
* the reader died: EPIPE or ENXIO, and the writer removes the FIFO;
* the writer is killed between its commit and its ring, or has no permission for a FIFO: nobody is told. Every
  ``CHECK_S`` seconds a reader with armed watches therefore compares their values once;
* the process forks: the child closes its copies of the descriptors, or writers would take it for a living reader.

A process without armed watches is not woken: its thread waits for the next one to be armed, and whoever arms it first
throws away what lies in the pipe (all of it was written after commits that the second read will see).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import termios
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b

from kombu_fdb.errors import KombuFDBError
from kombu_fdb.store.sqlite_files import make_directory, open_sidecar
from kombu_fdb.store.watch import OneShotWatch
from kombu_fdb.wakeup import readable

__all__ = ["Listener", "Ringer"]

logger = logging.getLogger(__name__)

DIGEST_BYTES = 8
#: Stands for every key.
ALL_KEYS = bytes(DIGEST_BYTES)
#: Written at once by every system, or not at all (POSIX's smallest PIPE_BUF).
NEWS_BYTES = 512
#: More than this in the pipe, and some may have been refused: the smallest pipe holds a page.
MUCH_NEWS_BYTES = 2048
READ_BYTES = 65536
#: How long a wake-up lost by a killed writer stays lost.
CHECK_S = 2.0
#: Other queues' news may come by the thousand; then look only this often.
FIRST_REST_S = 0.0005
LONGEST_REST_S = 0.004

GENERATION = "generation"
SUFFIX = ".bell"


@lru_cache(maxsize=4096)
def _digest(key: bytes) -> bytes:
    return blake2b(key, digest_size=DIGEST_BYTES).digest()


def _has_bytes(descriptor: int) -> bool:
    """Without a wait, and without a ``select``, of which eventlet allows only one at a time."""
    return fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)) != bytes(4)


class Listener:
    """This process's FIFO and the watches armed on it."""

    def __init__(self, directory: str, mode: int, read_values: Callable[[Sequence[bytes]], list[bytes | None]]) -> None:
        self._directory = directory
        self._mode = mode
        self._read_values = read_values
        self._changed = threading.Condition()
        self._armed: dict[bytes, list[OneShotWatch]] = {}
        self._path = ""
        self._read_fd = self._write_fd = -1
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """File name of the FIFO, "" as long as there is none."""
        return os.path.basename(self._path)

    @property
    def armed(self) -> int:
        """How many watches wait."""
        with self._changed:
            return sum(map(len, self._armed.values()))

    def open(self) -> None:
        """Put the FIFO in place. Raises ``OSError``; without effect the second time."""
        with self._changed:
            if self._read_fd < 0 and not self._closed:
                self._open()

    def arm(self, watch: OneShotWatch) -> None:
        """Register ``watch``, after :meth:`open`; the caller must then read the value again."""
        with self._changed:
            if self._closed or watch.done:
                return
            if not self._armed:
                self._drain()
            self._armed.setdefault(_digest(watch.key), []).append(watch)
            self._changed.notify_all()

    def disarm(self, watch: OneShotWatch) -> None:
        with self._changed:
            digest = _digest(watch.key)
            left = [other for other in self._armed.get(digest, ()) if other is not watch]
            if left:
                self._armed[digest] = left
            else:
                self._armed.pop(digest, None)

    def hear(self, digests: list[bytes]) -> None:
        """News from this very process: costs nothing when nobody waits for it."""
        if any(digest in self._armed for digest in digests):
            self._knock(ALL_KEYS if len(digests) * DIGEST_BYTES > NEWS_BYTES else b"".join(digests))

    def close(self) -> None:
        """Remove the FIFO and end the thread. Armed watches never fire."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._armed.clear()
            self._changed.notify_all()
        if self._read_fd >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self._knock(ALL_KEYS)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=CHECK_S)
        self.close_files()

    def close_files(self) -> None:
        """All that a forked child may do."""
        for fd in (self._read_fd, self._write_fd):
            if fd >= 0:
                os.close(fd)
        self._read_fd = self._write_fd = -1

    def _open(self) -> None:
        self._path = os.path.join(self._directory, f"{os.getpid()}-{secrets.token_hex(6)}{SUFFIX}")
        try:
            self._make_fifo(self._path + "-new")
        except BaseException:
            self.close_files()
            _remove(self._path + "-new")
            raise
        self._thread = threading.Thread(target=self._listen, name="kombu-fdb-sqlite-bell", daemon=True)
        self._thread.start()

    def _make_fifo(self, hidden: str) -> None:
        os.mkfifo(hidden, 0o600)
        os.chmod(hidden, self._mode)
        self._read_fd = os.open(hidden, os.O_RDONLY | os.O_NONBLOCK)
        # A writer of our own: without any, the pipe would report a hang-up for ever.
        self._write_fd = os.open(hidden, os.O_WRONLY | os.O_NONBLOCK)
        os.rename(hidden, self._path)
        _append_one(os.path.join(self._directory, GENERATION))

    def _listen(self) -> None:
        rest = 0.0
        while self._wait_until_armed():
            if not readable(self._read_fd, CHECK_S):
                self.compare(self._all_armed())
                rest = 0.0
                continue
            due = self._due(self._drain())
            for watch in due:
                watch.fire()
            rest = 0.0 if due else min(max(2 * rest, FIRST_REST_S), LONGEST_REST_S)
            if rest:
                with self._changed:
                    self._changed.wait(rest)

    def _all_armed(self) -> list[OneShotWatch]:
        with self._changed:
            return [watch for waiting in self._armed.values() for watch in waiting]

    def _wait_until_armed(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._armed or self._closed)
            return not self._closed

    def _drain(self) -> bytes:
        news = b""
        with contextlib.suppress(BlockingIOError):
            # Asked first: eventlet's read waits for what is not there, also on a descriptor that must not block.
            while not self._closed and _has_bytes(self._read_fd) and (chunk := os.read(self._read_fd, READ_BYTES)):
                news += chunk
        return news

    def _due(self, news: bytes) -> list[OneShotWatch]:
        """Take the watches that this news is about out of the register."""
        digests = {news[i : i + DIGEST_BYTES] for i in range(0, len(news), DIGEST_BYTES)}
        with self._changed:
            if len(news) >= MUCH_NEWS_BYTES or ALL_KEYS in digests:
                digests = set(self._armed)
            return [watch for digest in digests for watch in self._armed.pop(digest, ())]

    def compare(self, watches: Sequence[OneShotWatch]) -> None:
        """Fire those whose value is no longer the one they saw; all of them if that can't be told."""
        try:
            values = self._read_values([watch.key for watch in watches])
        except KombuFDBError:  # whoever is woken meets the same error, and handles it
            values = None
        for i, watch in enumerate(watches):
            if values is None or values[i] != watch.seen:
                self.disarm(watch)
                watch.fire()

    def _knock(self, news: bytes) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_fd, news)


class Ringer:
    """Tells every listening process which keys a commit changed."""

    def __init__(self, directory: str, mode: int, listener: Listener) -> None:
        self._directory = directory
        self._mode = mode
        self._listener = listener
        self._lock = threading.Lock()
        self._fds: dict[str, int] = {}
        self._listed = -1
        self._generation_fd = self._open_generation()

    def ring(self, keys: Sequence[bytes]) -> None:
        """After the commit. Never raises: a bell that fails is made good by ``CHECK_S``."""
        digests = [_digest(key) for key in keys]
        try:
            with self._lock:
                self._refresh()
                if self._fds:
                    self._tell_others(digests)
            self._listener.hear(digests)
        except OSError as error:
            logger.warning("could not wake the other processes: %s", error)

    def close_files(self) -> None:
        fds, self._fds = self._fds, {}
        for fd in (*fds.values(), self._generation_fd):
            os.close(fd)

    def _open_generation(self) -> int:
        make_directory(self._directory, self._mode)
        return open_sidecar(os.path.join(self._directory, GENERATION), self._mode)

    def _refresh(self) -> None:
        """List the FIFOs if there may be new ones; the size is taken before."""
        status = os.fstat(self._generation_fd)
        if status.st_nlink == 0:  # somebody removed the directory
            # Opened before the old one is closed: if that fails, the descriptor we keep is still ours.
            gone, self._generation_fd = self._generation_fd, self._open_generation()
            os.close(gone)
            status = os.fstat(self._generation_fd)
            self._listed = -1
        if status.st_size != self._listed:
            for name in os.listdir(self._directory):
                if name.endswith(SUFFIX) and name not in self._fds and name != self._listener.name:
                    self._connect(name)
            self._listed = status.st_size

    def _connect(self, name: str) -> None:
        path = os.path.join(self._directory, name)
        try:
            self._fds[name] = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno == errno.ENXIO:
                _remove(path)
            else:
                logger.warning("can't wake the process behind %s: %s", path, error)

    def _tell_others(self, digests: list[bytes]) -> None:
        news = b"".join(digests)
        if len(news) > NEWS_BYTES:
            news = ALL_KEYS
        for name, fd in list(self._fds.items()):
            try:
                os.write(fd, news)
            except BlockingIOError:
                pass
            except BrokenPipeError:
                os.close(self._fds.pop(name))
                _remove(os.path.join(self._directory, name))


def _append_one(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(fd, b".")
    finally:
        os.close(fd)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
