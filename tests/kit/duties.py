"""The duties of a process, some of which can be done by themselves, each to its end."""

from __future__ import annotations

from typing import TypeVar

from kombu_fdb.engine.stored.batches import Budget
from kombu_fdb.process.duties import Duty, Leftovers, UnusedQueues
from kombu_fdb.process.duty_cycle import Duties, Sweep

__all__ = ["SingleDuties"]

D = TypeVar("D", bound=Duty)


class SingleDuties(Duties):
    """The real ones."""

    def sweep(self) -> int:
        """Look at the neighbours; end those that are dead. Returns how many messages came back."""
        before = self.sweep_duty.released
        return self._complete(Sweep).released - before

    def expire_queues(self) -> None:
        """Delete queues with ``x-expires`` that were unused for as long."""
        self._complete(UnusedQueues)

    def clear_leftovers(self) -> None:
        """Clear rows of processes that are gone."""
        self._complete(Leftovers)

    def _complete(self, kind: type[D]) -> D:
        duty = next(each for each in self._duties if isinstance(each, kind))
        duty.run(Budget(self._clock))
        return duty
