"""What a store is: ordered keys, optimistic transactions, versionstamps and watches.

Everything above this seam is written once, for all stores. Semantics are FoundationDB's
(https://apple.github.io/foundationdb/developer-guide.html):

* A transaction reads one consistent version and sees its own writes. It commits only if no key it read
  *serializably* was written by a transaction that committed after that version; otherwise ``Conflict``. Snapshot
  reads (``snapshot=True``) read the same version but never conflict; a write-only transaction never conflicts.
* Keys and values are ``bytes``; ranges are ``begin <= key < end``. ``limit=0`` is no limit.
* A versionstamp is 10 bytes, assigned at commit, and larger than that of every earlier commit. A transaction can't read
  its own versionstamped keys.
* A watch outlives the commit and fires once, from any thread, when ``set_versionstamped_value`` changes its key. (Only
  that is guaranteed; any other change may fire it, and spurious firing is allowed.) Read what you wait for in the
  transaction that arms the watch: an earlier change is not reported. Arming a watch reads the key serializably, so arm
  it in a transaction that only reads.
* Limits are FoundationDB's (https://apple.github.io/foundationdb/known-limitations.html), so that what works on one
  store works on all: key 10,000 B, value 100,000 B, transaction 10,000,000 B (``LimitExceeded``); 5 s of age
  (``TransactionTooOld``).
* ``begin(timeout_s)`` bounds each later call of that transaction. A commit that was sent and got no answer raises
  ``CommitUnknown(in_flight=True)``; any other call raises ``StoreUnavailable``.
* Every error that leaves a driver is a :exc:`~kombu_fdb.errors.KombuFDBError`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from kombu_fdb.errors import LimitExceeded

KEY_BYTES = 10_000
VALUE_BYTES = 100_000
TRANSACTION_BYTES = 10_000_000


def check_key(key: bytes) -> None:
    if len(key) > KEY_BYTES:
        raise LimitExceeded("the key is too large", size=len(key), limit=KEY_BYTES)


def check_value(value: bytes) -> None:
    if len(value) > VALUE_BYTES:
        raise LimitExceeded("the value is too large", size=len(value), limit=VALUE_BYTES)


def check_size(size: int) -> None:
    if size > TRANSACTION_BYTES:
        raise LimitExceeded("the transaction is too large", size=size, limit=TRANSACTION_BYTES)


KeyValue = tuple[bytes, bytes]


class Transaction(Protocol):
    """A store may inherit the methods with bodies, which are for stores without round trips."""

    @property
    def read_only(self) -> bool:
        """True until the first mutation."""

    def get(self, key: bytes, *, snapshot: bool = False) -> bytes | None: ...
    def get_many(self, keys: Sequence[bytes], *, snapshot: bool = False) -> list[bytes | None]:
        """Several point reads in one round trip. Returns the values in the same order."""

    def get_range(
        self, begin: bytes, end: bytes, *, limit: int = 0, reverse: bool = False, snapshot: bool = False
    ) -> list[KeyValue]: ...

    def get_ranges(self, ranges: Sequence[tuple[bytes, bytes, int]], *, snapshot: bool = False) -> list[list[KeyValue]]:
        """Several range reads ``(begin, end, limit)`` in one round trip. Returns their rows in the same order."""
        return [self.get_range(begin, end, limit=limit, snapshot=snapshot) for begin, end, limit in ranges]

    def get_together(
        self, keys: Sequence[bytes], ranges: Sequence[tuple[bytes, bytes, int]], *, snapshot: bool = False
    ) -> tuple[list[bytes | None], list[list[KeyValue]]]:
        """:meth:`get_many` and :meth:`get_ranges` in one round trip."""
        return self.get_many(keys, snapshot=snapshot), self.get_ranges(ranges, snapshot=snapshot)

    def set(self, key: bytes, value: bytes) -> None: ...
    def clear(self, key: bytes) -> None: ...
    def clear_range(self, begin: bytes, end: bytes) -> None: ...
    def clear_run(self, keys: Sequence[bytes]) -> None:
        """Clear adjacent keys, given in order, in one call, for stores where each call is costly.

        This transaction has read that no other key lies between the first and the last; this becomes a conflict.
        """

    def add(self, key: bytes, delta: int, *, width: int = 8) -> None:
        """Atomic add on a signed little-endian integer of ``width`` bytes. Absent is 0.

        A sum that falls to 0 is cleared. A sum that rises to 0 may be cleared, too, but no counter of existing things
        rises to 0.
        """

    def byte_max(self, key: bytes, value: bytes) -> None:
        """Atomic: keep the larger of the stored and the given bytes, compared lexicographically."""

    def set_versionstamped_key(self, prefix: bytes, suffix: bytes, value: bytes) -> None:
        """Set ``prefix + versionstamp + suffix``."""

    def set_versionstamped_value(self, key: bytes, prefix: bytes = b"", suffix: bytes = b"") -> None:
        """Set ``key`` to ``prefix + versionstamp + suffix`` and fire its watches."""

    def fill(self, *, moving: bool = False) -> None:
        """Call it before writing rows that may stay for long, and whose number is unbounded.

        On a full disk, a store that watches its disk refuses such transactions first, so that the processes that empty
        it can still write. Next it refuses those with ``moving``, which move something and add a little to it. In other
        stores the call has no effect.
        """

    def add_read_conflict_key(self, key: bytes) -> None: ...
    def add_read_conflict_range(self, begin: bytes, end: bytes) -> None: ...
    def watch(self, key: bytes) -> Watch: ...
    def commit(self) -> None: ...
    def cancel(self) -> None:
        """Give up, and release every resource. Idempotent; harmless after a commit (watches survive)."""


class Database(Protocol):
    #: Whether ``commit`` can ever raise ``CommitUnknown``; if not, commit tokens are not written.
    commit_may_be_unknown: bool
    #: Whether a writing transaction waits for the previous one; if not, one of two that conflict must run again.
    writers_take_turns: bool

    def begin(self, *, timeout_s: float, read_only: bool = False) -> Transaction:
        """``read_only``: a promise that allows a store to run it beside a writer."""

    def close(self) -> None:
        """Idempotent. Later calls raise ``StoreUnavailable``."""


logger = logging.getLogger(__name__)


class Watch:
    """The watch that every store returns: it fires once, from any thread, but never after it was cancelled.

    ``release`` frees the store's resources for it when it is cancelled.

    It has no lock, as a signal handler may fire the very watch that it has interrupted. Instead, the caller that pops
    the only token fires or cancels the watch, and the one that pops the callback calls it.
    """

    __slots__ = ("_callbacks", "_cancelled", "_fired", "_release", "_tokens", "key", "seen")

    def __init__(self, key: bytes, release: Callable[[Watch], None], seen: bytes | None = None) -> None:
        self.key = key
        #: The key's value as the arming transaction saw it, where the store needs to compare.
        self.seen = seen
        self._release = release
        self._tokens = [None]
        self._callbacks: list[Callable[[], None]] = []
        self._fired = False
        self._cancelled = False

    @property
    def done(self) -> bool:
        """Whether it was fired or cancelled, so that it will not fire again."""
        return self._fired or self._cancelled

    def on_fire(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when the watch fires, from any thread; at once if it has fired already."""
        self._callbacks.append(callback)
        if self._fired:  # checked after the append; ``fire`` sets it before it looks for a callback
            self._call()

    def cancel(self) -> None:
        """Release it; the callback will not be called afterwards. Idempotent."""
        self._cancelled = True
        self._callbacks.clear()
        if self._decide():
            self._release(self)

    def fire(self) -> None:
        if not self._cancelled and self._decide():
            self._fired = True
            self._call()

    def _decide(self) -> bool:
        """Whether this caller is the one that fires or cancels."""
        try:
            self._tokens.pop()
        except IndexError:
            return False
        return True

    def _call(self) -> None:
        if self._cancelled:
            return
        try:
            callback = self._callbacks.pop()
        except IndexError:  # there is none yet, or another thread was faster
            return
        try:
            callback()
        except Exception:  # the thread that fires serves other watches too
            logger.exception("the callback of a watch failed")
