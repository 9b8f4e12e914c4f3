"""The duties of a process, some of which can be done by themselves, each to its end."""

from __future__ import annotations

from kombu_fdb.engine.stored.batches import Budget
from kombu_fdb.process.duty_cycle import Duties

__all__ = ["SingleDuties"]


class SingleDuties(Duties):
    """The real ones."""

    def sweep(self) -> int:
        """Look at the neighbours; end those that are dead. Returns how many messages came back."""
        before = self.sweep_duty.released
        self._complete("sweep")
        return self.sweep_duty.released - before

    def expire_queues(self) -> None:
        """Delete queues with ``x-expires`` that were unused for as long."""
        self._complete("expire queues")

    def clear_leftovers(self) -> None:
        """Clear rows of processes that are gone."""
        self._complete("clear leftovers")

    def _complete(self, name: str) -> None:
        next(each for each in self._duties if each.name == name).run(Budget(self._clock))
