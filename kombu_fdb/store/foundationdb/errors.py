"""What FoundationDB's error codes mean to us, depending on whether the commit had been sent.

=========================================== =============================== ==========================================
FoundationDB                                before                          from the commit
=========================================== =============================== ==========================================
1020 not_committed                                                          ``Conflict``
1007 transaction_too_old                    ``TransactionTooOld``           ``TransactionTooOld``
1021 commit_unknown_result                                                  ``CommitUnknown``
1031 timed_out, 1039 cluster changed        ``StoreUnavailable``            ``CommitUnknown(in_flight=True)``
2101, 2102, 2103 too large                  ``LimitExceeded``               ``LimitExceeded``
other retryable ones (1009, 1037, 1213, ..) ``ClusterBusy``                 ``ClusterBusy``
all others                                  ``StoreUnavailable``            ``StoreUnavailable``
=========================================== =============================== ==========================================
"""

from __future__ import annotations

import os
from typing import Any

from kombu_fdb.errors import CommitUnknown, Conflict, LimitExceeded, StoreError, StoreUnavailable, TransactionTooOld
from kombu_fdb.store.foundationdb.binding import binding

TOO_OLD, CONFLICT, UNKNOWN_RESULT, CANCELLED, TIMED_OUT = 1007, 1020, 1021, 1025, 1031
UNREADABLE, CLUSTER_CHANGED, OPERATION_CANCELLED = 1036, 1039, 1101
TOO_LARGE = (2101, 2102, 2103)

#: What an abandoned future says.
ABANDONED = (CANCELLED, OPERATION_CANCELLED)


class ClusterBusy(StoreError):
    """The cluster asks to try again: recovering, behind, or throttling."""

    text = "the cluster asks for a retry"
    retryable = True


def explain(error: Any) -> StoreError:
    """What an error of anything but a writing commit means."""
    code = error.code
    if code == TOO_OLD:
        return TransactionTooOld()
    if code == CONFLICT:
        return Conflict()
    if code in TOO_LARGE:
        return LimitExceeded(_description(error))
    if code == TIMED_OUT:
        return StoreUnavailable(
            "the cluster did not answer within the deadline", code=code, fix="Run `fdbcli --exec status`"
        )
    if code == UNREADABLE:
        return StoreError("read what depends on this transaction's own versionstamp")
    if binding().predicates.is_retryable(error):
        return ClusterBusy(reason=_description(error), code=code)
    return StoreUnavailable("FoundationDB failed", reason=_description(error), code=code)


def explain_commit(error: Any) -> StoreError:
    if error.code == UNKNOWN_RESULT:
        return CommitUnknown()
    if error.code in (TIMED_OUT, CLUSTER_CHANGED, CANCELLED, OPERATION_CANCELLED):
        return CommitUnknown(in_flight=True)
    return explain(error)


def explain_open(error: Any, cluster_file: str | None) -> StoreError:
    code = getattr(error, "code", None)
    if code in (1511, 1515):
        return no_cluster_file(cluster_file)
    if code in (2104, 2105):
        return StoreUnavailable(
            "this is not a FoundationDB connection string",
            cluster_file=cluster_file or "the default one",
            fix="It must be one line, description:id@host:port,host:port. Copy the cluster file from a server",
        )
    if code in (1513, 1514):
        return StoreUnavailable(
            "the cluster file can't be read and written",
            cluster_file=cluster_file or "the default one",
            fix="Give this user read and write access to the file and its directory: the client updates it",
        )
    return StoreUnavailable(
        "can't connect to FoundationDB", code=code, reason=_description(error), cluster_file=cluster_file
    )


def no_cluster_file(cluster_file: str | None) -> StoreUnavailable:
    return StoreUnavailable(
        "there is no cluster file",
        cluster_file=cluster_file or os.environ.get("FDB_CLUSTER_FILE") or "/etc/foundationdb/fdb.cluster",
        fix="Copy it from a server of the cluster, or name another with the option cluster_file",
    )


def _description(error: Any) -> str:
    text = getattr(error, "description", None)
    return text.decode() if isinstance(text, bytes) else str(text or error)
