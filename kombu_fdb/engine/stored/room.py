"""Room: what one claim can hold besides a number of messages.

It writes each record into a lease, and reads each payload: a transaction takes 10,000,000 bytes, and 5 seconds. The
first message always has room, so the largest one gets through, alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from kombu_fdb.keyspace.codec import size_of
from kombu_fdb.store.protocol import KeyValue

RECORD_BYTES = 2_000_000
PAYLOAD_BYTES = 8_000_000


class Room:
    """What is left of it, in one attempt of one claim."""

    __slots__ = ("_most_payloads", "_most_records", "_payloads", "_records", "is_full")

    def __init__(self, records: float = RECORD_BYTES, payloads: float = PAYLOAD_BYTES) -> None:
        """Bytes; who only looks has infinite room."""
        self._most_records = records
        self._most_payloads = payloads
        self._records = 0
        self._payloads = 0
        #: Something did not fit, so nothing behind it is taken either: the order stays.
        self.is_full = False

    def take(self, rows: Sequence[KeyValue]) -> int:
        """How many of these messages fit, from the first on; they take their room."""
        for number, (_key, value) in enumerate(rows):
            if not self.fits(value):
                return number
            self._records += len(value)
            self._payloads += size_of(value)
        return len(rows)

    def fits(self, value: bytes) -> bool:
        """Whether there is room for this record."""
        records, payloads = self._records + len(value), self._payloads + size_of(value)
        heavy = records > self._most_records or payloads > self._most_payloads
        self.is_full = self.is_full or (heavy and self._records > 0)
        return not self.is_full
