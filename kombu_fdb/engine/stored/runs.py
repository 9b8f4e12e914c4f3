"""Runs: rows that stand side by side, as a transaction has read them, are taken by one call for all.

With FoundationDB each call costs its client 20 to 40 us of CPU, as it wakes the thread of the network: of a message
without a key that is claimed and acknowledged, four of six such calls were to clear rows that stand in a row, or to
conflict on them. The price is a conflict with a transaction that puts a row between them meanwhile. So a run is of rows
between which hardly anybody does: publishers write behind them, and what comes back to its place mostly goes before
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from kombu_fdb.store.protocol import Transaction


def runs_of(rows: Iterable[bytes], taken: Collection[bytes]) -> list[list[bytes]]:
    """Of rows as they were read, those that are ``taken``, in runs."""
    return [list(run) for is_taken, run in groupby(rows, taken.__contains__) if is_taken]


def take(tr: Transaction, run: Sequence[bytes]) -> None:
    """Clear them. Conflicts with a transaction that writes to one of them, or between them."""
    if len(run) == 1:
        tr.add_read_conflict_key(run[0])
    else:
        tr.add_read_conflict_range(run[0], run[-1] + b"\x00")
    tr.clear_run(run)
