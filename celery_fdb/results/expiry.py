"""What expires: an index by moment, in step with the records.

A transaction that writes a record that expires writes its entry in the same transaction, and clears the entry of the
record it replaces: an entry in the index is never wrong, so the sweep (``sweep.py``) need not look at the record. It
reads the entries serializably, so a record that is stored anew at the same time is not lost: one of the two runs again.

Moments are by the wall clock of who stores. They are compared with that of who sweeps or, if it is behind, with that of
most workers at the same store: one whose clock is ahead deletes no results.
"""

from __future__ import annotations

from celery_fdb.results import records
from celery_fdb.results.layout import ResultKeys
from kombu_fdb.store.protocol import Transaction


def move(tr: Transaction, keys: ResultKeys, kind: str, id_: str, before_ms: int, after_ms: int) -> None:
    """It expired at ``before_ms`` and now does at ``after_ms``; 0 for never."""
    if before_ms and before_ms != after_ms:
        tr.clear(keys.expiry(before_ms, kind, id_))
    if after_ms and before_ms != after_ms:
        tr.set(keys.expiry(after_ms, kind, id_), b"")


def delete(tr: Transaction, keys: ResultKeys, kind: str, id_: str, value: bytes | None) -> None:
    """The record, which was read as ``value``, with its entry."""
    if value is None:
        return
    old = records.readable(value)
    move(tr, keys, kind, id_, old.expires_ms if old else 0, 0)
    records.clear(tr, keys.record(kind, id_))
