"""What a store is: ordered keys, optimistic transactions, versionstamps and watches.

This is the seam above which the queue is written once. Semantics are FoundationDB's
(https://apple.github.io/foundationdb/developer-guide.html):

* A transaction reads one consistent version and sees its own writes. It commits only if no key it read
  *serializably* was written by a transaction that committed after that version; otherwise ``Conflict``. Snapshot
  reads (``snapshot=True``) read the same version but never conflict; a write-only transaction never conflicts.
* Keys and values are ``bytes``; ranges are ``begin <= key < end``. ``limit=0`` is no limit.
* A versionstamp is 10 bytes, assigned at commit, larger than that of every transaction committed before. What a
  versionstamped key will be can't be read in the same transaction.
* A watch lives on after the commit and fires once, from any thread, when the key is changed by
  ``set_versionstamped_value`` (any change may fire it, spurious firing is allowed, only that change is promised).
  Compare what you read in the arming transaction: a change before that is not reported. A transaction that arms one
  has read the key serializably, so arm in one that only reads.
* Limits are FoundationDB's (https://apple.github.io/foundationdb/known-limitations.html), so that what works on one
  store works on all: key 10,000 B, value 100,000 B, transaction 10,000,000 B (``LimitExceeded``); 5 s of age
  (``TransactionTooOld``).
* ``begin(timeout_s)`` bounds each later call of that transaction. A commit that was sent and got no answer raises
  ``CommitUnknown(in_flight=True)``; a call that was not a commit raises ``StoreUnavailable``.
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
TRANSACTION_AGE_S = 5.0


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
    @property
    def read_only(self) -> bool:
        """True until the first mutation."""

    def get(self, key: bytes, *, snapshot: bool = False) -> bytes | None: ...
    def get_many(self, keys: Sequence[bytes], *, snapshot: bool = False) -> list[bytes | None]:
        """Several point reads in one round trip, answers in the order asked."""

    def get_range(
        self, begin: bytes, end: bytes, *, limit: int = 0, reverse: bool = False, snapshot: bool = False
    ) -> list[KeyValue]: ...

    def get_ranges(self, ranges: Sequence[tuple[bytes, bytes, int]], *, snapshot: bool = False) -> list[list[KeyValue]]:
        """Several range reads ``(begin, end, limit)`` in one round trip, answers in the order asked."""

    def get_together(
        self, keys: Sequence[bytes], ranges: Sequence[tuple[bytes, bytes, int]], *, snapshot: bool = False
    ) -> tuple[list[bytes | None], list[list[KeyValue]]]:
        """:meth:`get_many` and :meth:`get_ranges` in one round trip."""

    def set(self, key: bytes, value: bytes) -> None: ...
    def clear(self, key: bytes) -> None: ...
    def clear_range(self, begin: bytes, end: bytes) -> None: ...
    def clear_run(self, keys: Sequence[bytes]) -> None:
        """Clear adjacent keys, given in order, in one call, for stores where each call has its price.

        This transaction has read that no other key lies between the first and the last, and conflicts on that.
        """

    def add(self, key: bytes, delta: int, *, width: int = 8) -> None:
        """Atomic add on a signed little-endian integer of ``width`` bytes. Absent is 0.

        A sum that falls to 0 is cleared. One that rises to 0, as no counter of what is there ever does, may be cleared.
        """

    def byte_max(self, key: bytes, value: bytes) -> None:
        """Atomic: keep the larger of the stored and the given bytes, compared lexicographically."""

    def set_versionstamped_key(self, prefix: bytes, suffix: bytes, value: bytes) -> None:
        """Set ``prefix + versionstamp + suffix``."""

    def set_versionstamped_value(self, key: bytes, prefix: bytes = b"", suffix: bytes = b"") -> None:
        """Set ``key`` to ``prefix + versionstamp + suffix`` and fire its watches."""

    def fill(self, *, moving: bool = False) -> None:
        """Call it before writing, if what is stored may stay for long and without a bound on its number.

        Where a store watches its disk, a full one refuses such transactions first, so that the process that empties it
        can still write. Next it refuses those with ``moving``, which move something and add a little to it. Elsewhere
        the call means nothing.
        """

    def add_read_conflict_key(self, key: bytes) -> None: ...
    def add_read_conflict_range(self, begin: bytes, end: bytes) -> None: ...
    def watch(self, key: bytes) -> Watch: ...
    def commit(self) -> None: ...
    def cancel(self) -> None:
        """Give up; releases every resource. Idempotent, harmless after a commit (watches live on)."""


class Database(Protocol):
    #: Whether ``commit`` can ever raise ``CommitUnknown``; if not, commit tokens are not written.
    commit_may_be_unknown: bool
    #: Whether a writing transaction waits for the one before it; if not, one of the two may have to run again.
    writers_take_turns: bool

    def begin(self, *, timeout_s: float, read_only: bool = False) -> Transaction:
        """``read_only``: a promise that allows a store to run it beside a writer."""

    def close(self) -> None:
        """Idempotent. Later calls raise ``StoreUnavailable``."""


logger = logging.getLogger(__name__)


class Watch:
    """The watch every store hands out: fires once, from any thread, never after it was cancelled.

    ``release`` frees what the store holds for it, when it is cancelled.

    It has no lock, as a signal handler may fire the watch that it has interrupted: the caller that takes the token
    decides what becomes of it, and the one that takes the callback calls it.
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
        """Whether it was fired or cancelled, so that nothing will come of it any more."""
        return self._fired or self._cancelled

    def on_fire(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when the watch fires, from any thread; at once if it has fired already."""
        self._callbacks.append(callback)
        if self._fired:  # checked after the entry; ``fire`` sets it before it looks for one
            self._call()

    def cancel(self) -> None:
        """Release it; the callback will not be called later. Idempotent."""
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
