"""How a commit in one process wakes other processes: named pipes beside the database, no polling.

Model. Every process that has ever armed a watch owns one FIFO in ``<database>-bells/``. While watches are armed, a
daemon thread reads it. After a commit that rings bells (``set_versionstamped_value``) the writer puts an 8-byte digest
of each such key into every FIFO. The reader fires the watches with that digest.

*No change is lost between reading and arming.* The arming transaction notes the value it saw (``watch.seen``). After
that transaction has ended, with the FIFO in place, ``Listener.arm`` registers the watch; only then does the database
read the value again and fire the watch if it differs. Any other commit comes before that second read, which sees it, or
after it. In the latter case this FIFO is in place when the writer lists them, so the digest finds a registered watch.

*Which FIFOs exist* is cached under the size of the file ``generation``, to which every new listener appends one byte
once its FIFO is in place. A writer reads the size before it lists the FIFOs. A listener that it misses has changed the
size by the next ring, and reads the value again after this ring. (The directory's mtime would not do: two changes in
one clock tick look the same.) A FIFO gets its final name only after its owner has opened it. So a FIFO without a reader
belongs to a dead process.

What fails:

* the reader is busy and its pipe is full: the writer's EAGAIN is ignored, and a reader that finds many digests fires
  all its watches;
* the reader died: EPIPE or ENXIO, and the writer removes the FIFO;
* the writer is killed between its commit and its ring, or has no permission for a FIFO: readers are not notified.
  Therefore a reader with armed watches compares their values every ``CHECK_S`` seconds, whatever else it reads;
* the directory is removed: the next ring, or the next listener, makes it again;
* a signal handler raises an exception: the lock is a ``FairLock``, and at worst digests are lost, see above;
* the process forks: the child closes its copies of the descriptors, as writers would otherwise take it for a living
  reader.

A process without armed watches is not woken: its thread waits until one is armed. The arming thread first discards what
is in the pipe: all of it was written after commits that the second read will see.

Only the last user of a descriptor, the thread or the lock's holder, closes it. Otherwise its number might soon refer to
another file, which a digest would damage (https://www.sqlite.org/howtocorrupt.html, 1.1).
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
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from posix import write  # eventlet's ``os.write`` waits in the event loop, even where a pipe must not block

from kombu_fdb.errors import KombuFDBError, StoreUnavailable
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.interruption import FairLock, Signal, Ticket, start
from kombu_fdb.primitives.wakeup import readable
from kombu_fdb.store.protocol import Watch
from kombu_fdb.store.sqlite.files import Access

# -- pipes -------------------------------------------------------------------------------------------------------------


GENERATION = "generation"
SUFFIX = ".bell"


class BellDirectory:
    """``<database>-bells/``, created if absent. Raises ``StoreUnavailable`` if something else is in the way.

    One named pipe for each listening process, and the file ``generation``. Everything in it is reached through the
    directory's descriptor, and only pipes are written to: see :mod:`~kombu_fdb.store.sqlite.files`. It has no lock:
    callers hold the lock of this process's bells.
    """

    def __init__(self, path: str, access: Access) -> None:
        self.path = path
        self._access = access
        #: Only users who may enter the directory can create files in it.
        self._inside = replace(access, exposed=False)
        self._directory = self._generation = -1
        self._open()

    def renew(self) -> None:
        """Make the directory again if it was removed."""
        if self.size() is None:
            self.close()
            self._open()

    def size(self) -> int | None:
        """The size of ``generation``, which new listeners change; None if the directory was removed."""
        if self._generation < 0:
            return None
        status = os.fstat(self._generation)
        return status.st_size if status.st_nlink else None

    def names(self) -> list[str]:
        """The names of the pipes."""
        return [name for name in os.listdir(self._directory) if name.endswith(SUFFIX)]

    def make_pipe(self, name: str) -> int:
        """Make a pipe that writers can't find yet, and open it for reading. Raises ``OSError``."""
        if os.mkfifo in os.supports_dir_fd:
            os.mkfifo(name, 0o600, dir_fd=self._directory)
        else:  # macOS before 13; what is opened next is checked anyway
            os.mkfifo(os.path.join(self.path, name), 0o600)
        descriptor = self._inside.open_pipe(name, os.O_RDONLY, directory=self._directory)
        self._inside.share(descriptor, os.path.join(self.path, name))
        return descriptor

    def open_pipe(self, name: str) -> int:
        """Open a pipe for writing. Raises ``OSError``: ``ENXIO`` means that it has no reader."""
        return self._inside.open_pipe(name, os.O_WRONLY, directory=self._directory)

    def publish(self, hidden: str, name: str) -> None:
        """Make a pipe visible to writers. Raises ``OSError``."""
        os.rename(hidden, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        write(self._generation, b".")

    def remove(self, name: str) -> None:
        """Remove a pipe, if it exists and this user may."""
        if self._directory >= 0:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._directory)

    def close(self) -> None:
        """Close the directory. A forked child may do nothing else."""
        descriptors = (self._directory, self._generation)
        self._directory = self._generation = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def _open(self) -> None:
        self._directory = self._access.open_directory(self.path)
        try:
            generation = os.path.join(self.path, GENERATION)
            self._generation = self._inside.open_sidecar(generation, directory=self._directory)
        except BaseException:
            self.close()
            raise


# -- the listener ------------------------------------------------------------------------------------------------------


DIGEST_BYTES = 8
#: Stands for the digests of all keys.
ALL_KEYS = bytes(DIGEST_BYTES)
#: The most that every system writes as a whole or not at all (POSIX's smallest PIPE_BUF).
NEWS_BYTES = 512
#: If the pipe has more than this, some writes may have been refused: the smallest pipe holds a page.
MUCH_NEWS_BYTES = 2048
READ_BYTES = 65536
#: How late a wake-up is if a killed writer has lost it.
CHECK_S = 2.0
#: The first, and the longest, rest between looks while other queues' digests arrive by the thousand, in seconds.
FIRST_REST_S = 0.0005
LONGEST_REST_S = 0.004
#: The lock is held for microseconds; a ring gives up after waiting this long.
LOCK_S = 1.0
#: How long closing waits for the thread, which may be in a callback.
CLOSE_S = 2.0


@lru_cache(maxsize=4096)
def digest(key: bytes) -> bytes:
    """The key's mark in a pipe."""
    return blake2b(key, digest_size=DIGEST_BYTES).digest()


def _has_bytes(descriptor: int) -> bool:
    """Does not wait, nor use ``select``, of which eventlet allows only one at a time."""
    return fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)) != bytes(4)


class Listener:
    """This process's FIFO and the watches armed on it."""

    def __init__(
        self, bells: BellDirectory, read_values: Callable[[Sequence[bytes]], list[bytes | None]], clock: Clock
    ) -> None:
        self._bells = bells
        self._read_values = read_values
        self._clock = clock
        #: It also protects the ringer and the directory.
        self.lock = FairLock(clock)
        self._changed = Signal()
        #: The waiting watches, by their keys.
        self.watches: dict[bytes, dict[Watch, Hashable]] = {}
        #: File name of the FIFO, "" as long as there is none.
        self.name = ""
        self._read_fd = self._write_fd = -1
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def armed(self) -> int:
        """How many watches are armed."""
        return sum(map(len, list(self.watches.values())))

    def open(self) -> None:
        """Put the FIFO in place. Raises ``OSError``, ``StoreUnavailable``. Idempotent."""
        if self._thread is None:
            self.lock.run(self._open, LOCK_S)

    def arm(self, watch: Watch, owner: Hashable) -> None:
        """Register ``watch``, after :meth:`open`; the caller must then read the value again. Raises the same errors."""
        self.lock.run(lambda: self._arm(watch, owner), LOCK_S)
        self._changed.set()

    def disarm(self, watch: Watch) -> None:
        """Never raises: a leftover watch fires once, spuriously."""
        with contextlib.suppress(StoreUnavailable):
            self.lock.run(lambda: self._disarm(watch), LOCK_S)

    def forget(self, owner: Hashable) -> None:
        """Cancel all watches of ``owner``. A comparison under way fires none of them."""
        for watch, whose in self._all_armed():
            if whose is owner:
                watch.cancel()
                self.disarm(watch)  # again: an earlier cancel may have been interrupted before this

    def hear(self, digests: list[bytes]) -> None:
        """Take digests from this process itself, with the lock. Costs nothing if no watch is armed for them."""
        if any(each in self.watches for each in digests):
            self._knock(ALL_KEYS if len(digests) * DIGEST_BYTES > NEWS_BYTES else b"".join(digests))

    def close(self) -> None:
        """Remove the FIFO and end the thread. Armed watches never fire. Idempotent."""
        self._closed = True
        self.watches.clear()
        self._changed.set()
        with contextlib.suppress(StoreUnavailable):
            self.lock.run(self._leave, LOCK_S)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)

    def close_files(self) -> None:
        """Close the descriptors. A forked child may do nothing else."""
        descriptors = (self._read_fd, self._write_fd)
        self._read_fd = self._write_fd = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def compare(self, watches: Sequence[Watch]) -> None:
        """Fire the watches whose value has changed since they saw it; all of them if the values can't be read."""
        try:
            values = self._read_values([watch.key for watch in watches])
        except KombuFDBError:  # the thread that is woken gets the same error, and handles it
            values = None
        for i, watch in enumerate(watches):
            if values is None or values[i] != watch.seen:
                self.disarm(watch)
                watch.fire()

    # With the lock

    def _open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the database was closed")
        if self._read_fd < 0:
            self._bells.renew()
            self._make_fifo(f"{os.getpid()}-{secrets.token_hex(6)}{SUFFIX}")
        # Checked, not only remembered: an exception may have intervened.
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._listen, name="kombu-fdb-sqlite-bell", daemon=True)
            start(thread)
            self._thread = thread

    def _make_fifo(self, name: str) -> None:
        hidden = f"{name}-new"
        try:
            self._read_fd = self._bells.make_pipe(hidden)
            # This process's own writer: without any writer, the pipe would report a hang-up at each look.
            self._write_fd = self._bells.open_pipe(hidden)
            self.name = name
            self._bells.publish(hidden, name)
        except BaseException:
            self.close_files()
            for each in (hidden, name):
                self._bells.remove(each)
            raise

    def _arm(self, watch: Watch, owner: Hashable) -> None:
        if self._closed or watch.done:
            return
        if not self.watches:
            self._drain()
        self.watches.setdefault(digest(watch.key), {})[watch] = owner

    def _disarm(self, watch: Watch) -> None:
        bell = digest(watch.key)
        waiting = self.watches.get(bell, {})
        waiting.pop(watch, None)
        if not waiting:
            self.watches.pop(bell, None)

    def _knock(self, news: bytes) -> None:
        if self._write_fd >= 0:
            with contextlib.suppress(BlockingIOError):
                write(self._write_fd, news)

    def _leave(self) -> None:
        if self.name:
            self._bells.remove(self.name)
        self._knock(ALL_KEYS)

    def _due(self) -> list[Watch]:
        """Read the pipe, and unregister the watches that its digests name.

        Both under the lock, so that an earlier digest does not fire a watch that is armed in between.
        """
        news = self._drain()
        digests = {news[i : i + DIGEST_BYTES] for i in range(0, len(news), DIGEST_BYTES)}
        if len(news) >= MUCH_NEWS_BYTES or ALL_KEYS in digests:
            digests = set(self.watches)
        return [watch for each in digests for watch in self.watches.pop(each, ())]

    # The thread

    def _listen(self) -> None:
        rest = check_at_s = 0.0
        while self._wait_until_armed():
            heard = readable(max(check_at_s - self._clock.monotonic(), 0.0), self._read_fd)
            if not heard or self._clock.monotonic() >= check_at_s:  # digests of other keys may arrive without a pause
                self._compare_all()
                check_at_s = self._clock.monotonic() + CHECK_S
            due = self._take_due()
            for watch in due:
                watch.fire()
            rest = 0.0 if due or not heard else min(max(2 * rest, FIRST_REST_S), LONGEST_REST_S)
            if rest:
                self._changed.wait(rest)
        with contextlib.suppress(StoreUnavailable):
            self.lock.run(self.close_files, CLOSE_S)

    def _take_due(self) -> list[Watch]:
        try:
            return self.lock.run(self._due, LOCK_S)
        except StoreUnavailable:  # the lock's holder, or this process, was suspended
            self._compare_all()
            return []

    def _compare_all(self) -> None:
        self.compare([watch for watch, _ in self._all_armed()])

    def _all_armed(self) -> list[tuple[Watch, Hashable]]:
        return [each for waiting in list(self.watches.values()) for each in list(waiting.items())]

    def _wait_until_armed(self) -> bool:
        while not self._closed:
            if self.watches:
                return True
            self._changed.wait(None)
        return False

    def _drain(self) -> bytes:
        news = b""
        with contextlib.suppress(BlockingIOError):
            # Checked first: eventlet's read waits for data even on a non-blocking descriptor.
            while not self._closed and _has_bytes(self._read_fd) and (chunk := os.read(self._read_fd, READ_BYTES)):
                news += chunk
        return news


# -- the ringer --------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)


class Ringer:
    """Notifies every listening process of the keys that a commit changed."""

    def __init__(self, bells: BellDirectory, listener: Listener) -> None:
        self._bells = bells
        self._listener = listener
        self._fds: dict[str, int] = {}
        self._listed: int | None = -1
        self._closed = False

    def ring(self, keys: Sequence[bytes]) -> None:
        """Call it after the commit. Never raises: if a bell fails, its readers notice the change within ``CHECK_S``."""
        if not self._fds and not self._listener.watches:
            # Checked without the lock: a process that starts to listen from now on reads the values later.
            try:
                size = self._bells.size()
                if size is not None and size == self._listed:
                    return
            except OSError:  # it is being closed
                pass
        digests = [digest(key) for key in keys]
        lock, ticket = self._listener.lock, Ticket()
        try:  # FairLock.run inlined, in half the time
            try:
                if lock.acquire(ticket, LOCK_S):
                    self._ring(digests)
            except (OSError, StoreUnavailable) as error:
                logger.warning("could not wake the other processes: %s", error)
            finally:
                lock.release(ticket)
        except BaseException:
            lock.release(ticket)
            raise

    def close(self) -> None:
        """Close the descriptors, unless a thread still rings: then they stay open."""
        with contextlib.suppress(StoreUnavailable):
            self._listener.lock.run(self.close_files, LOCK_S)

    def close_files(self) -> None:
        """Close the descriptors. A forked child may do nothing else."""
        self._closed = True
        while self._fds:
            os.close(self._fds.popitem()[1])
        self._bells.close()

    def _ring(self, digests: list[bytes]) -> None:
        if self._closed:
            return
        self._refresh()
        if self._fds:
            self._notify_others(digests)
        self._listener.hear(digests)

    def _refresh(self) -> None:
        """List the FIFOs if there may be new ones; reads the size first."""
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

    def _notify_others(self, digests: list[bytes]) -> None:
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
