"""Runs: adjacent rows, as a transaction has read them, are cleared by one call for all.

With FoundationDB each call costs its client 20 to 40 us of CPU, as it wakes the network thread. Of the six such calls
for a message without a key that is claimed and acknowledged, four cleared adjacent rows, or conflicted on them. The
price is a conflict with a transaction that puts a row between them meanwhile. So runs are used where that hardly ever
happens: publishers write behind such rows, and released messages mostly go before them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from kombu_fdb.store.protocol import Transaction


def runs_of(rows: Iterable[bytes], taken: Collection[bytes]) -> list[list[bytes]]:
    """Those of ``rows`` (in the order in which they were read) that are ``taken``, in runs."""
    return [list(run) for is_taken, run in groupby(rows, taken.__contains__) if is_taken]


def take(tr: Transaction, run: Sequence[bytes]) -> None:
    """Clear them. Conflicts with a transaction that writes to one of them, or between them."""
    if len(run) == 1:
        tr.add_read_conflict_key(run[0])
    else:
        tr.add_read_conflict_range(run[0], run[-1] + b"\x00")
    tr.clear_run(run)
