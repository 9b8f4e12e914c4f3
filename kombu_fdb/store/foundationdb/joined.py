"""A transaction of the application's own, which the queue writes into and the application commits.

The binding's errors pass through as they are: the application's retry loop (``@fdb.transactional``) knows what to do
with them, and does not know ours. Only the object's own methods are used: its module may be another copy of the
binding than ours (see :mod:`~kombu_fdb.store.foundationdb.binding`).

The transaction is the application's in everything else too: its timeout, its options, its commit, and the doubt after
a commit of unknown result.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, NoReturn

from kombu_fdb.errors import OptionError, StoreError
from kombu_fdb.store.foundationdb.database import FoundationTransaction
from kombu_fdb.store.protocol import Database, Transaction

#: Answered by the client library, without a round trip. ``description:id@coordinators``.
CONNECTION_STRING = b"\xff\xff/connection_string"
#: Bounds the read of our own connection string, in seconds.
TIMEOUT_S = 5.0


class JoinedTransaction(FoundationTransaction):
    """Reads and writes, no more."""

    __slots__ = ()

    def __init__(self, transaction: Any) -> None:
        self._tr = transaction
        self._declared_read_only = False
        self._fdb_error = ()  # catches nothing
        self._wrote = False
        self._watches = False

    def watch(self, key: bytes) -> NoReturn:
        raise StoreError("a watch in a transaction of the application's")

    def commit(self) -> NoReturn:
        raise StoreError("the application commits its transaction")


def join_transaction(database: Database, tr: Any) -> JoinedTransaction:
    """Raises ``OptionError`` if ``tr`` is no writable transaction, or not of the database's cluster."""
    if not all(hasattr(tr, name) for name in ("set_versionstamped_key", "snapshot", "db")):
        raise OptionError(
            "this is not a FoundationDB transaction",
            given=type(tr).__name__,
            fix="Pass the `tr` of a function under @fdb.transactional, not the database and not a snapshot.",
        )
    if not hasattr(tr.db, "open_tenant"):
        raise OptionError(
            "a transaction of a tenant can't see the broker's keys",
            fix="Begin it on the database, and keep your rows under their own prefix.",
        )
    theirs, ours = tr.snapshot.get(CONNECTION_STRING).value or b"", _connection_string(database)
    if _cluster(theirs) != _cluster(ours):
        raise OptionError(
            "the transaction belongs to another cluster than the broker",
            transaction=_cluster(theirs),
            broker=_cluster(ours),
            fix="Open both with the same cluster file.",
        )
    return JoinedTransaction(tr)


def _connection_string(database: Database) -> bytes:
    tr: Transaction = database.begin(timeout_s=TIMEOUT_S, read_only=True)
    try:
        return tr.get(CONNECTION_STRING, snapshot=True) or b""
    finally:
        tr.cancel()


def _cluster(connection_string: bytes) -> str:
    """``description`` and a mark of the id: the id is as good as a password. Coordinators may change."""
    description, _, rest = connection_string.decode().partition(":")
    return f"{description}:#{sha256(rest.partition('@')[0].encode()).hexdigest()[:8]}"
