"""Walking: through ranges of keys in parts, by a cursor in the hands of the caller."""

from __future__ import annotations

from collections.abc import Sequence

from kombu_fdb.engine.stored.whereabouts import STAMP_BYTES
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.keyspace.layout import Range
from kombu_fdb.store.protocol import KeyValue


def rows_from(work: Work, ranges: Sequence[Range], cursor: bytes, most: int) -> tuple[list[KeyValue], bytes]:
    """Up to ``most`` rows of the ranges, which stand in the order of their keys, and where to go on; b"" at the end.

    ``cursor``: b"" to begin with. Snapshot, in one round trip.
    """
    left = [(max(begin, cursor), end, most) for begin, end in ranges if cursor < end]
    rows = [row for part in work.tr.get_ranges(left, snapshot=True) for row in part][:most] if left else []
    return rows, rows[-1][0] + b"\x00" if len(rows) == most else b""


def came_by(last: bytes, key: bytes) -> bool:
    """Whether the message at the key had come by the last version's stamp, a mark of its queue."""
    return key[-STAMP_BYTES:][: len(last)] <= last
