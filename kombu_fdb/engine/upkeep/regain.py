"""Regain: bring back what an older process kept for who can read it (``newer.py``)."""

from __future__ import annotations

from kombu_fdb.engine.messages.deadletter import Graves, bury
from kombu_fdb.engine.messages.settle import put_back
from kombu_fdb.engine.stored.newer import LEASE, RECORD
from kombu_fdb.engine.stored.tally import NEWER, Tally
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace import codec
from kombu_fdb.keyspace.layout import Keyspace, Range
from kombu_fdb.store.protocol import KeyValue, Transaction

__all__ = ["MESSAGES_PER_TRANSACTION", "is_any", "part"]

MESSAGES_PER_TRANSACTION = 200


def is_any(tr: Transaction, keys: Keyspace) -> bool:
    """Whether something is kept that this version can read. Snapshot."""
    return any(tr.get_ranges([(*each, 1) for each in _ranges(keys)], snapshot=True))


def part(tr: Transaction, graves: Graves, tally: Tally, now_ms: int, limit: int) -> int:
    """Bring up to ``limit`` messages back to their places. Returns how many."""
    records, leases = tr.get_ranges([(*each, limit) for each in _ranges(graves.keys)], snapshot=True)
    for number, row in enumerate((records + leases)[:limit]):
        _bring_back(tr, graves, tally, row, now_ms, is_lease=number >= len(records))
    return min(len(records) + len(leases), limit)


def _ranges(keys: Keyspace) -> list[Range]:
    known = ((RECORD, codec.RECORD_VERSION), (LEASE, codec.LEASE_VERSION))
    return [keys.newer_until(*each) for each in known]


def _bring_back(tr: Transaction, graves: Graves, tally: Tally, row: KeyValue, now_ms: int, *, is_lease: bool) -> None:
    kept, value = row
    tr.add_read_conflict_key(kept)
    tr.clear(kept)
    try:
        queue, place = graves.keys.split_newer(kept)
    except FormatError:  # nobody's
        return
    tally.change(queue, NEWER, -1)
    if is_lease:
        _return(tr, graves, tally, queue, place, value, now_ms)
    elif graves.over_limit(tr, queue, value, again=0):
        bury(tr, graves, tally, queue, value, "delivery_limit", now_ms, place=place)
    else:
        put_back(tr, graves, tally, queue, place, value, now_ms, counted=False)


def _return(tr: Transaction, graves: Graves, tally: Tally, queue: str, place: bytes, lease: bytes, now_ms: int) -> None:
    """What a dead session held."""
    try:
        record = codec.decode_lease(lease)[2]
    except FormatError as error:
        bury(tr, graves, tally, queue, lease, "malformed", now_ms, place=place, details={"error": str(error)})
        return
    put_back(tr, graves, tally, queue, place, record, now_ms, counted=True)
