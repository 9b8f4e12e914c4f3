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
* the writer is killed between its commit and its ring, or has no permission for a FIFO: no process is told. Every
  ``CHECK_S`` seconds a reader with armed watches therefore compares their values once;
* the directory is removed: the next ring, or the next listener, makes it again;
* an exception comes out of a signal handler: the lock is a ``FairLock``, and the news is at worst lost, see above;
* the process forks: the child closes its copies of the descriptors, or writers would take it for a living reader.

A process without armed watches is not woken: its thread waits for the next one to be armed, and the thread that arms it
first throws away what lies in the pipe (all of it was written after commits that the second read will see).

A descriptor is closed by its last user only, the thread or the holder of the lock: a digest that is written to a
number which meanwhile means another file would damage that (https://www.sqlite.org/howtocorrupt.html, 1.1).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import termios
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from hashlib import blake2b

from kombu_fdb.errors import KombuFDBError, StoreUnavailable
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.locks import FairLock, Signal
from kombu_fdb.primitives.threads import start
from kombu_fdb.primitives.wakeup import readable, write
from kombu_fdb.store.sqlite.wakeups.pipes import SUFFIX, BellDirectory
from kombu_fdb.store.watch import OneShotWatch

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
#: The lock is held for microseconds; a ring that waits as long as this goes without.
LOCK_S = 1.0
#: How long closing waits for the thread, which may be in a callback.
CLOSE_S = 2.0


@lru_cache(maxsize=4096)
def digest(key: bytes) -> bytes:
    """What stands for the key in a pipe."""
    return blake2b(key, digest_size=DIGEST_BYTES).digest()


def _has_bytes(descriptor: int) -> bool:
    """Without a wait, and without a ``select``, of which eventlet allows only one at a time."""
    return fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)) != bytes(4)


class Listener:
    """This process's FIFO and the watches armed on it."""

    def __init__(
        self, bells: BellDirectory, read_values: Callable[[Sequence[bytes]], list[bytes | None]], clock: Clock
    ) -> None:
        self._bells = bells
        self._read_values = read_values
        #: Also of the ringer and of the directory.
        self.lock = FairLock(clock)
        self._changed = Signal()
        #: Those that wait, by their keys.
        self.watches: dict[bytes, dict[OneShotWatch, Hashable]] = {}
        #: File name of the FIFO, "" as long as there is none.
        self.name = ""
        self._read_fd = self._write_fd = -1
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def armed(self) -> int:
        """How many watches wait."""
        return sum(map(len, list(self.watches.values())))

    def open(self) -> None:
        """Put the FIFO in place. Raises ``OSError``, ``StoreUnavailable``; without effect the second time."""
        if self._thread is None:
            self.lock.run(self._open, LOCK_S)

    def arm(self, watch: OneShotWatch, owner: Hashable) -> None:
        """Register ``watch``, after :meth:`open`; the caller must then read the value again. Raises as that does."""
        self.lock.run(lambda: self._arm(watch, owner), LOCK_S)
        self._changed.set()

    def disarm(self, watch: OneShotWatch) -> None:
        """Never raises: a watch that stays by mistake fires once, in vain."""
        with contextlib.suppress(StoreUnavailable):
            self.lock.run(lambda: self._disarm(watch), LOCK_S)

    def forget(self, owner: Hashable) -> None:
        """Disarm all that ``owner`` has armed."""
        for watch, whose in self._all_armed():
            if whose is owner:
                self.disarm(watch)

    def hear(self, digests: list[bytes]) -> None:
        """News from this very process, with the lock: costs nothing when no thread waits for it."""
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
        """All that a forked child may do."""
        descriptors = (self._read_fd, self._write_fd)
        self._read_fd = self._write_fd = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def compare(self, watches: Sequence[OneShotWatch]) -> None:
        """Fire those whose value is no longer the one they saw; all of them if that can't be told."""
        try:
            values = self._read_values([watch.key for watch in watches])
        except KombuFDBError:  # the thread that is woken meets the same error, and handles it
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
        # Not only noted: an exception may have come in between.
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._listen, name="kombu-fdb-sqlite-bell", daemon=True)
            start(thread)
            self._thread = thread

    def _make_fifo(self, name: str) -> None:
        hidden = f"{name}-new"
        try:
            self._read_fd = self._bells.make_pipe(hidden)
            # A writer of our own: without any, the pipe would report a hang-up for ever.
            self._write_fd = self._bells.open_pipe(hidden)
            self.name = name
            self._bells.publish(hidden, name)
        except BaseException:
            self.close_files()
            for each in (hidden, name):
                self._bells.remove(each)
            raise

    def _arm(self, watch: OneShotWatch, owner: Hashable) -> None:
        if self._closed or watch.done:
            return
        if not self.watches:
            self._drain()
        self.watches.setdefault(digest(watch.key), {})[watch] = owner

    def _disarm(self, watch: OneShotWatch) -> None:
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

    def _due(self, news: bytes) -> list[OneShotWatch]:
        """Take the watches that this news is about out of the register."""
        digests = {news[i : i + DIGEST_BYTES] for i in range(0, len(news), DIGEST_BYTES)}
        if len(news) >= MUCH_NEWS_BYTES or ALL_KEYS in digests:
            digests = set(self.watches)
        return [watch for each in digests for watch in self.watches.pop(each, ())]

    # The thread

    def _listen(self) -> None:
        rest = 0.0
        while self._wait_until_armed():
            if not readable(CHECK_S, self._read_fd):
                self._compare_all()
                rest = 0.0
                continue
            due = self._take_due(self._drain())
            for watch in due:
                watch.fire()
            rest = 0.0 if due else min(max(2 * rest, FIRST_REST_S), LONGEST_REST_S)
            if rest:
                self._changed.wait(rest)
        with contextlib.suppress(StoreUnavailable):
            self.lock.run(self.close_files, CLOSE_S)

    def _take_due(self, news: bytes) -> list[OneShotWatch]:
        try:
            return self.lock.run(lambda: self._due(news), LOCK_S)
        except StoreUnavailable:  # this process was stopped for a while: its time is up, the news are not
            self._compare_all()
            return []

    def _compare_all(self) -> None:
        self.compare([watch for watch, _ in self._all_armed()])

    def _all_armed(self) -> list[tuple[OneShotWatch, Hashable]]:
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
            # Asked first: eventlet's read waits for what is not there, also on a descriptor that must not block.
            while not self._closed and _has_bytes(self._read_fd) and (chunk := os.read(self._read_fd, READ_BYTES)):
                news += chunk
        return news
