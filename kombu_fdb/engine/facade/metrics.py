"""Metrics: how much ever happened, by queue and by key."""

from __future__ import annotations

from collections.abc import Sequence

from kombu_fdb.engine.facade.inspection import Inspection
from kombu_fdb.engine.facade.transactions import Transactions
from kombu_fdb.engine.metrics import keytotals, totals

__all__ = ["Metrics"]


class Metrics:
    """The verbs on totals."""

    def __init__(self, run: Transactions, inspect: Inspection) -> None:
        self._run = run
        self._inspect = inspect
        self._busiest = keytotals.Busiest()

    def totals(self) -> dict[str, dict[str, int]]:
        """How many messages ever were published, claimed, acked, ... by queue and event (``totals.py``).

        ``""`` is for lost leases, whose queue nobody knows.
        """
        return self._run.read(totals.read)

    def key_totals(self) -> dict[str, keytotals.KeyTotals]:
        """The same by queue, key and event, of the busiest keys; key "": of a queue's others (``keytotals.py``)."""
        found: dict[str, keytotals.KeyTotals] = {}
        begin = self._run.keys.all_key_totals[0]
        while (part := self._key_totals(begin)) is not None:
            queue, found[queue], begin = part
        return found

    def _key_totals(self, begin: bytes) -> tuple[str, keytotals.KeyTotals, bytes] | None:
        return self._run.read(lambda work: keytotals.read_next(work, begin))

    def flush(self, *, timeout_s: float | None = None) -> None:
        """Add what this process has counted so far, now. On an error it is not counted."""
        share = self._run.totals.share()
        if share.taken:
            timeout_s = self._run.timeouts.call_s if timeout_s is None else timeout_s
            self._run.retry(lambda tr: self._run.totals.write(tr, share.taken), timeout_s=timeout_s)

    def trim(self) -> None:
        """Forget the totals of queues that are gone, and all but the busiest keys. For one thread."""
        for queue in self.totals().keys() - self._inspect.queues().keys() - {""}:
            self._forget(queue)
        for queue, names in self._busiest.surplus(self.key_totals()):
            for start in range(0, len(names), keytotals.KEYS_PER_FOLD):
                self._fold(queue, names[start : start + keytotals.KEYS_PER_FOLD])

    def _fold(self, queue: str, names: Sequence[str]) -> None:
        self._run.write(lambda work: keytotals.fold(work, queue, names))

    def _forget(self, queue: str) -> None:
        self._run.write(lambda work: totals.forget(work, queue))
