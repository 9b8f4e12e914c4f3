"""The store on a FoundationDB cluster, over its own Python binding: its TLS settings, transactions and errors.

Model. A transaction wraps one of FoundationDB's, with its ``timeout`` option set to the caller's remaining time, so
that no call waits longer.

A watch is FoundationDB's own. It fires from the network thread, even when the cluster drops it (a spurious firing: the
caller looks and arms another). Arming reads the key serializably, so a *writing* transaction that arms a watch can
conflict on it.

After a fork (:mod:`~kombu_fdb.store.foundationdb.binding`), database objects of the parent raise ``ForkedError`` in the
child; a new one opened there works.

Our errors for FoundationDB's error codes, before and from the sending of the commit:

=========================================== =============================== ==========================================
FoundationDB                                before                          from the commit
=========================================== =============================== ==========================================
1020 not_committed                                                          ``Conflict``
1007 transaction_too_old                    ``TransactionTooOld``           ``TransactionTooOld``
1021 commit_unknown_result                                                  ``CommitUnknown``
1031 timed_out, 1039 cluster changed        ``StoreUnavailable``            ``CommitUnknown(in_flight=True)``
2101, 2102, 2103 too large                  ``LimitExceeded``               ``LimitExceeded``
other retryable ones (1009, 1037, 1213, ..) ``StoreError``, ``retryable``   ``StoreError``, ``retryable``
all others                                  ``StoreUnavailable``            ``StoreUnavailable``
=========================================== =============================== ==========================================

TLS to the cluster (the certificate, key and authorities of the client library) is set by network options, so a process
has one set, fixed when it first opens a cluster. Settings that are missing here, the library takes from
``FDB_TLS_CERTIFICATE_FILE``, ``FDB_TLS_KEY_FILE``, ``FDB_TLS_CA_FILE``, ``FDB_TLS_VERIFY_PEERS`` and
``FDB_TLS_PASSWORD`` (https://apple.github.io/foundationdb/tls.html). The cluster file decides whether TLS is used at
all: for a coordinator ``host:port:tls``.

A *joined* transaction is the application's own: the queue writes into it, and the application commits it. The binding's
errors pass through unchanged: the application's retry loop (``@fdb.transactional``) handles them, and does not know
ours. Only the object's own methods are used, as it may come from another copy of the binding (see
:mod:`~kombu_fdb.store.foundationdb.binding`). Timeout, options, commit, and the doubt after a commit of unknown outcome
are also the application's.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from shlex import quote
from typing import Any, NoReturn

from kombu_fdb.errors import (
    CommitUnknown,
    Conflict,
    ForkedError,
    LimitExceeded,
    OptionError,
    StoreError,
    StoreUnavailable,
    TransactionTooOld,
)
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.settings.location import default_cluster_file
from kombu_fdb.store.foundationdb.binding import binding
from kombu_fdb.store.protocol import Database, KeyValue, Transaction, Watch, check_key, check_value

# -- errors ------------------------------------------------------------------------------------------------------------


TOO_OLD, CONFLICT, UNKNOWN_RESULT, CANCELLED, TIMED_OUT = 1007, 1020, 1021, 1025, 1031
UNREADABLE, CLUSTER_CHANGED, OPERATION_CANCELLED = 1036, 1039, 1101
TOO_LARGE = (2101, 2102, 2103)

#: The message of an abandoned future.
ABANDONED = (CANCELLED, OPERATION_CANCELLED)


def explain(error: Any, advice: str) -> StoreError:
    """Our error for any error, except from a commit that writes. ``advice``: how to inspect the cluster."""
    code = error.code
    if code == TOO_OLD:
        return TransactionTooOld()
    if code == CONFLICT:
        return Conflict()
    if code in TOO_LARGE:
        return LimitExceeded(_description(error))
    if code == TIMED_OUT:
        return StoreUnavailable("the cluster did not answer within the deadline", code=code, fix=advice)
    if code == UNREADABLE:
        return StoreError("can't read what depends on this transaction's own versionstamp")
    if binding().predicates.is_retryable(error):
        busy = StoreError("the cluster asks for a retry", reason=_description(error), code=code, fix=advice)
        busy.retryable = True  # the cluster is recovering, behind, or throttling
        return busy
    return StoreUnavailable("FoundationDB failed", reason=_description(error), code=code, fix=advice)


def explain_commit(error: Any, advice: str) -> StoreError:
    if error.code == UNKNOWN_RESULT:
        return CommitUnknown()
    if error.code in (TIMED_OUT, CLUSTER_CHANGED, CANCELLED, OPERATION_CANCELLED):
        return CommitUnknown(in_flight=True)
    return explain(error, advice)


def explain_open(error: Any, cluster_file: str | None) -> StoreError:
    code = getattr(error, "code", None)
    if code in (1511, 1515):
        return no_cluster_file(cluster_file)
    if code in (2104, 2105):
        return StoreUnavailable(
            "this is not a FoundationDB connection string",
            cluster_file=cluster_file or str(default_cluster_file(os.environ)),
            fix="It must be one line, description:id@host:port,host:port. Copy the cluster file from a server",
        )
    if code in (1513, 1514):
        return StoreUnavailable(
            "the cluster file can't be read and written",
            cluster_file=cluster_file or str(default_cluster_file(os.environ)),
            fix="Give this user read and write access to the file and its directory: the client updates it",
        )
    return StoreUnavailable(
        "can't connect to FoundationDB", code=code, reason=_description(error), cluster_file=cluster_file
    )


def no_cluster_file(cluster_file: str | None) -> StoreUnavailable:
    return StoreUnavailable(
        "there is no cluster file",
        cluster_file=cluster_file or str(default_cluster_file(os.environ)),
        fix="Copy it from a server of the cluster, or name another with the option cluster_file",
    )


def _description(error: Any) -> str:
    text = getattr(error, "description", None)
    return text.decode() if isinstance(text, bytes) else str(text or error)


# -- TLS ---------------------------------------------------------------------------------------------------------------


#: The attribute of the binding's module that records the settings; a forked child has a new module.
_ATTRIBUTE = "_kombu_fdb_tls"


#: The client's setters of the settings.
_SETTERS = {
    "certificate_file": "set_tls_cert_path",
    "key_file": "set_tls_key_path",
    "ca_file": "set_tls_ca_path",
    "verify_peers": "set_tls_verify_peers",
}


def apply_tls(fdb: Any, tls: Mapping[str, str | None]) -> None:
    """Set the client's options before the library connects. Settings as in :meth:`FoundationDatabase.open`.

    Raises ``StoreUnavailable`` for an unreadable file, or if the process has opened a cluster with other settings.
    """
    given = {name: value for name, value in tls.items() if value is not None}
    if not given or getattr(fdb, _ATTRIBUTE, None) == given:
        return
    for name, value in given.items():
        if name.endswith("_file") and not os.access(value, os.R_OK):
            raise StoreUnavailable(
                "a TLS file can't be read",
                option=f"tls_{name}",
                path=value,
                fix="Check that it exists and that this user can read it.",
            )
    if fdb.impl._network_thread:
        raise StoreUnavailable(
            "this process has opened a cluster with other TLS settings",
            fix="FoundationDB's client has one set per process: give every broker the same.",
        )
    for name, value in given.items():
        getattr(fdb.options, _SETTERS[name])(value.encode() if name == "verify_peers" else value)
    setattr(fdb, _ATTRIBUTE, given)


# -- the database ------------------------------------------------------------------------------------------------------


STAMP = bytes(10)
#: The most that FoundationDB allows; its default is 10,000 watches per client, beyond which each one fires at once.
MOST_WATCHES = 1_000_000
#: How long to wait if the cluster asks for a retry while it is opened.
BUSY_S = 0.01
#: How long a read version serves transactions that have read nothing, in seconds: as long as in FoundationDB's own
#: cache. The cluster throttles clients by their requests for read versions, so each process must keep making some.
READ_VERSION_S = 0.1
#: More than the number of threads that commit at once.
LATEST_COMMITS = 256

_pack_offset = struct.Struct("<I").pack


class FoundationDatabase:
    """A :class:`~kombu_fdb.store.protocol.Database` on a cluster; safe for many threads."""

    commit_may_be_unknown = True
    writers_take_turns = False

    def __init__(self, fdb: Any, handle: Any, place: str, advice: str, clock: Clock) -> None:
        #: What transactions need from this process's copy of the binding.
        self.fdb_error: type[Exception] = fdb.FDBError
        self.want_all = fdb.StreamingMode.want_all
        self._handle = handle
        self._place = place
        self.advice = advice
        self._pid = os.getpid()
        self._watches: dict[int, Watch] = {}
        self.clock = clock
        #: The versions of the latest commits, which threads add in any order, and until when they may be used for
        #: reading.
        self.committed = deque([0], maxlen=LATEST_COMMITS)
        self.recent_until = 0.0

    @classmethod
    def open(
        cls,
        cluster_file: str | None = None,
        *,
        connection_string: str | None = None,
        tls: Mapping[str, str | None] | None = None,
        timeout_s: float = 10.0,
        clock: Clock | None = None,
    ) -> FoundationDatabase:
        """Connect, and read once, within ``timeout_s``.

        ``cluster_file``: the client library's default if neither this nor ``connection_string`` is given. ``tls``: the
        paths ``certificate_file``, ``key_file`` and ``ca_file``, and ``verify_peers``, the client's constraints on its
        peers; None: the library's default. Raises ``StoreUnavailable`` with the fix.
        """
        clock = clock or Clock()
        deadline = clock.monotonic() + timeout_s
        fdb = binding()
        if cluster_file is not None and not os.path.exists(cluster_file):
            raise no_cluster_file(cluster_file)
        try:
            apply_tls(fdb, tls or {})
            _ask_at_once(fdb)
            handle = _connect(fdb, cluster_file, connection_string)
            handle.options.set_max_watches(MOST_WATCHES)
        except fdb.FDBError as error:
            raise explain_open(error, cluster_file) from error
        named = cluster_file or ("the URL" if connection_string else str(default_cluster_file(os.environ)))
        option = f" -C {quote(cluster_file)}" if cluster_file else ""
        database = cls(fdb, handle, named, f"Run `fdbcli{option} --exec status`", clock)
        database._verify(clock, deadline, cluster_file)
        return database

    def begin(self, *, timeout_s: float, read_only: bool = False) -> FoundationTransaction:
        if os.getpid() != self._pid:
            raise ForkedError("this FoundationDB connection was opened before the process forked")
        if self._handle is None:
            raise StoreUnavailable("the database was closed")
        transaction = self._handle.create_transaction()
        transaction.options.set_timeout(max(1, int(timeout_s * 1000)))
        return FoundationTransaction(self, transaction, read_only=read_only)

    def close(self) -> None:
        """Cancel the armed watches. The connection itself lives as long as the process."""
        if os.getpid() != self._pid:
            return
        self._handle = None
        while self._watches:
            self._watches.popitem()[1].cancel()

    @property
    def armed_watches(self) -> int:
        """How many watches of this handle are armed; for tests that look for leaks."""
        return len(self._watches)

    def arm(self, key: bytes, future: Any) -> Watch:
        """A watch that fires with the future. Dictionary operations are atomic, so the network thread needs no lock."""

        def release(watch: Watch) -> None:
            self._watches.pop(id(watch), None)
            future.cancel()

        watch = Watch(key, release)
        self._watches[id(watch)] = watch

        def ready(future: Any) -> None:
            self._watches.pop(id(watch), None)
            if _error_code(future) not in ABANDONED:
                watch.fire()

        future.on_ready(ready)
        return watch

    def _verify(self, clock: Clock, deadline: float, cluster_file: str | None) -> None:
        busy: StoreError | None = None
        while busy is None or clock.monotonic() < deadline:
            transaction = self.begin(timeout_s=max(deadline - clock.monotonic(), 0.001), read_only=True)
            try:
                transaction.get(b"")
                return
            except StoreUnavailable as error:
                if error.attributes.get("code") not in (None, TIMED_OUT):
                    raise explain_open(error.__cause__, cluster_file) from error
                if busy is None:
                    raise StoreUnavailable(
                        "the FoundationDB cluster does not answer",
                        cluster=self._place,
                        reason=self._incompatible(),
                        fix=f"{self.advice}, and check that client package and TLS files (SECURITY.md) fit",
                    ) from error
                break  # the deadline passed before the next answer: the last one says why
            except StoreError as error:  # recovering, locked, or the client library has not chosen a version yet
                if not error.retryable:
                    raise
                busy = error
            finally:
                transaction.cancel()
            clock.sleep(BUSY_S)
        raise StoreUnavailable(
            "the FoundationDB cluster takes no transactions",
            cluster=self._place,
            reason=busy.attributes.get("reason"),
            fix=self.advice,
        ) from busy

    def _incompatible(self) -> str | None:
        """The most common reason for silence, if the client reports it."""
        try:
            status = json.loads(self._handle.get_client_status().value)
            others = [one for one in status.get("Connections", []) if one.get("Compatible") is False]
        except Exception:  # only a hint, on the way to an error  # noqa: BLE001
            return None
        return "its servers use another protocol version than the client library" if others else None


def _ask_at_once(fdb: Any) -> None:
    """Let the library request a read version after half a millisecond, however far away the cluster is.

    By default it waits for other transactions to share the request: half as long as recent answers took, up to 5 ms.
    With round trips of 5 ms that added half a round trip to each transaction, and made sequential publishes a fifth
    slower.
    """
    # As with TLS, this can't be set once the library has started; an operator's setting has precedence.
    if not fdb.impl._network_thread and "grv_batch_timeout" not in os.environ.get("FDB_NETWORK_OPTION_KNOB", ""):
        fdb.options.set_knob("grv_batch_timeout=0.0005")


def _connect(fdb: Any, cluster_file: str | None, connection_string: str | None) -> Any:
    if connection_string is None:
        return fdb.open(cluster_file)
    impl = fdb.impl
    with impl._network_thread_reentrant_lock:
        if not impl._network_thread:
            impl.init()
    create = impl._capi.fdb_create_database_from_connection_string
    create.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)]
    create.restype = ctypes.c_int
    create.errcheck = impl.check_error_code
    pointer = ctypes.c_void_p()
    create(connection_string.encode(), ctypes.byref(pointer))
    return fdb.Database(pointer)


def _error_code(future: Any) -> int:
    try:
        future.wait()
    except Exception as error:  # FDBError, from any copy of the binding  # noqa: BLE001
        return getattr(error, "code", -1)
    return 0


class FoundationTransaction:
    """One transaction; ended by ``commit`` or ``cancel``.

    One that has read nothing, as most publishes have, need not request a read version: it decides nothing by what
    others have done, and only this process writes its commit token (``retry.py``). So the version of this process's
    latest commit suffices if a read version was requested in the last :data:`READ_VERSION_S`, and saves a round trip. A
    version that the cluster has not reached yet would not do, as nothing conflicts with it.
    """

    __slots__ = (
        "_begun_s",
        "_db",
        "_declared_read_only",
        "_fdb_error",
        "_has_read",
        "_tr",
        "_want_all",
        "_watches",
        "_wrote",
    )

    def __init__(self, database: FoundationDatabase, transaction: Any, *, read_only: bool) -> None:
        self._db = database
        self._tr = transaction
        self._declared_read_only = read_only
        self._fdb_error: type[Exception] | tuple[()] = database.fdb_error
        self._want_all = database.want_all
        self._wrote = self._watches = self._has_read = False
        self._begun_s = database.clock.monotonic()

    @property
    def read_only(self) -> bool:
        return not self._wrote

    # Reads

    def get(self, key: bytes, *, snapshot: bool = False) -> bytes | None:
        try:
            value: bytes | None = self._reader(snapshot).get(key).value
        except self._fdb_error as error:
            raise explain(error, self._db.advice) from error
        return value

    def get_many(self, keys: Sequence[bytes], *, snapshot: bool = False) -> list[bytes | None]:
        return self.get_together(keys, (), snapshot=snapshot)[0]

    def get_range(
        self, begin: bytes, end: bytes, *, limit: int = 0, reverse: bool = False, snapshot: bool = False
    ) -> list[KeyValue]:
        if limit < 0:
            raise ValueError("limit is negative")
        if begin >= end:
            return []
        try:
            rows = self._reader(snapshot).get_range(begin, end, limit, reverse, self._want_all)
            return [(row.key, row.value) for row in rows]
        except self._fdb_error as error:
            raise explain(error, self._db.advice) from error

    def get_ranges(self, ranges: Sequence[tuple[bytes, bytes, int]], *, snapshot: bool = False) -> list[list[KeyValue]]:
        return self.get_together((), ranges, snapshot=snapshot)[1]

    def get_together(
        self, keys: Sequence[bytes], ranges: Sequence[tuple[bytes, bytes, int]], *, snapshot: bool = False
    ) -> tuple[list[bytes | None], list[list[KeyValue]]]:
        try:
            reader, mode = self._reader(snapshot), self._want_all
            # Each future sends its request when it is created, so all are under way before the first answer is awaited.
            futures = [reader.get(key) for key in keys]
            answers = [reader.get_range(begin, end, limit, False, mode) for begin, end, limit in ranges]
            return [future.value for future in futures], [[(row.key, row.value) for row in rows] for rows in answers]
        except self._fdb_error as error:
            raise explain(error, self._db.advice) from error

    def _reader(self, snapshot: bool) -> Any:
        tr = self._alive()
        self._has_read = True
        return tr.snapshot if snapshot else tr

    # Writes

    def set(self, key: bytes, value: bytes) -> None:
        check_key(key)
        check_value(value)
        self._writer().set(key, value)

    def clear(self, key: bytes) -> None:
        check_key(key)
        self._writer().clear(key)

    def clear_range(self, begin: bytes, end: bytes) -> None:
        check_key(begin)
        check_key(end)
        if begin < end:
            self._writer().clear_range(begin, end)

    def clear_run(self, keys: Sequence[bytes]) -> None:
        if len(keys) > 1:
            self.clear_range(keys[0], keys[-1] + b"\x00")
        else:
            self.clear(keys[0])

    def add(self, key: bytes, delta: int, *, width: int = 8) -> None:
        check_key(key)
        tr = self._writer()
        tr.add(key, delta.to_bytes(width, "little", signed=True))
        if delta < 0:
            tr.compare_and_clear(key, bytes(width))

    def byte_max(self, key: bytes, value: bytes) -> None:
        check_key(key)
        check_value(value)
        self._writer().byte_max(key, value)

    def set_versionstamped_key(self, prefix: bytes, suffix: bytes, value: bytes) -> None:
        key = prefix + STAMP + suffix
        check_key(key)
        check_value(value)
        self._writer().set_versionstamped_key(key + _pack_offset(len(prefix)), value)

    def set_versionstamped_value(self, key: bytes, prefix: bytes = b"", suffix: bytes = b"") -> None:
        value = prefix + STAMP + suffix
        check_key(key)
        check_value(value)
        self._writer().set_versionstamped_value(key, value + _pack_offset(len(prefix)))

    def fill(self, *, moving: bool = False) -> None:
        """Has no effect: the cluster watches its disks itself."""

    def _writer(self) -> Any:
        tr = self._alive()
        if self._declared_read_only:
            raise StoreError("can't write in a transaction that was begun read-only")
        self._wrote = True
        return tr

    # Conflicts, watches and the end

    def add_read_conflict_key(self, key: bytes) -> None:
        check_key(key)
        self._add_conflict(lambda tr: tr.add_read_conflict_key(key))

    def add_read_conflict_range(self, begin: bytes, end: bytes) -> None:
        if begin < end:
            self._add_conflict(lambda tr: tr.add_read_conflict_range(begin, end))

    def _add_conflict(self, step: Callable[[Any], None]) -> None:
        try:
            step(self._alive())
        except self._fdb_error as error:
            raise explain(error, self._db.advice) from error

    def watch(self, key: bytes) -> Watch:
        try:
            future = self._alive().watch(key)
        except self._fdb_error as error:
            raise explain(error, self._db.advice) from error
        self._watches = self._has_read = True
        return self._db.arm(key, future)

    def commit(self) -> None:
        tr = self._alive()
        self._tr = None
        if not (self._wrote or self._watches):
            return
        db = self._db
        asks = self._has_read or db.clock.monotonic() >= db.recent_until
        latest = max(list(db.committed))
        try:
            if not asks:
                tr.set_read_version(latest)
            tr.commit().wait()
        except BaseException as error:  # even a signal handler's, whose traceback refers to the transaction
            db.recent_until = 0.0
            # A commit that still waits for its read version could get one after the doubt was settled.
            tr.reset()
            if not isinstance(error, self._fdb_error):
                raise
            raise (explain_commit if self._wrote else explain)(error, db.advice) from error
        if self._wrote:
            version = tr.get_committed_version()
            if version < latest:  # the cluster was recreated, and counts from the beginning
                db.committed = deque([version], maxlen=LATEST_COMMITS)
            else:
                db.committed.append(version)
            if asks:
                db.recent_until = self._begun_s + READ_VERSION_S

    def cancel(self) -> None:
        self._tr = None  # destroys it and, if it was not committed, its futures

    def _alive(self) -> Any:
        if self._tr is None:
            raise StoreError("the transaction has ended")
        return self._tr


#: Answered by the client library, without a round trip. ``description:id@coordinators``.
CONNECTION_STRING = b"\xff\xff/connection_string"
#: The timeout for reading our own connection string, in seconds.
TIMEOUT_S = 5.0


class JoinedTransaction(FoundationTransaction):
    """The application's transaction, for reads and writes only."""

    __slots__ = ()

    def __init__(self, transaction: Any) -> None:
        self._tr = transaction
        self._declared_read_only = False
        self._fdb_error = ()  # catches nothing
        self._want_all = binding().StreamingMode.want_all
        self._wrote = self._watches = self._has_read = False

    def watch(self, key: bytes) -> NoReturn:
        raise StoreError("can't arm a watch in the application's transaction")

    def commit(self) -> NoReturn:
        raise StoreError("can't commit the application's transaction: the application does")


def join_transaction(database: Database, tr: Any) -> JoinedTransaction:
    """Raises ``OptionError`` if ``tr`` is not a writable transaction on the database's cluster."""
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
    """``description`` and a digest of the id, which is as good as a password. Coordinators may change."""
    description, _, rest = connection_string.decode().partition(":")
    return f"{description}:#{sha256(rest.partition('@')[0].encode()).hexdigest()[:8]}"
