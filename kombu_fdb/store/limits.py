"""FoundationDB's limits, held by every store, so that what works on one works on all.

https://apple.github.io/foundationdb/known-limitations.html
"""

from __future__ import annotations

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
