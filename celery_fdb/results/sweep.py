"""Delete what has expired, in bounded parts. See ``expiry.py``."""

from __future__ import annotations

from celery_fdb.results import chords, records
from celery_fdb.results.layout import ResultKeys
from kombu_fdb.keyspace.layout import readable
from kombu_fdb.store.protocol import Transaction

#: Deleted in one transaction.
SWEEP_ROWS = 200


def sweep_part(tr: Transaction, keys: ResultKeys, now_ms: int) -> int:
    """Delete up to :data:`SWEEP_ROWS` of what has expired. Returns how many."""
    rows = tr.get_range(*keys.expired_until(now_ms), limit=SWEEP_ROWS)
    for key, _ in rows:
        tr.clear(key)
    for (_expires_ms, kind, id_), _ in readable(rows, keys.split_expiry):
        if kind == "chord":
            chords.expire(tr, keys, id_)
        else:
            records.clear(tr, keys.record(kind, id_))
    return len(rows)
