"""The duties of a simulated process, whose turns are counted, and may be short. Guarantee: BOUNDED."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kit.duties import SingleDuties
from kit.simulation.violation import Violation
from kombu_fdb.engine.parts import Budget
from kombu_fdb.process.duties import Duty
from kombu_fdb.process.duty_cycle import TURN_TRANSACTIONS

#: What one transaction of a budget may come to: the step itself, what makes room for it, and its record.
MOST_COMMITS = 3


class Counted(Protocol):
    """A step whose commits are counted."""

    answered: int


class SimulatedDuties(SingleDuties):
    """The real ones; each turn has ``turn`` transactions, if that is not 0, and all the time there is."""

    def __init__(self, *args: Any, frames: Sequence[Counted], turn: int, **given: Any) -> None:
        super().__init__(*args, **given)
        self._frames = frames
        self._most = turn or TURN_TRANSACTIONS

    def _budget(self) -> Budget:
        return Budget(self._clock, transactions=self._most)

    def _turn(self, duty: Duty) -> bool:
        frame = self._frames[-1]
        before = frame.answered
        is_busy = super()._turn(duty)
        commits = frame.answered - before
        if commits > MOST_COMMITS * (self._most + 1):
            raise Violation("BOUNDED", f"{duty.name!r} took {commits} transactions in a turn of {self._most}")
        return is_busy

    def unfinished(self) -> list[str]:
        """What is due again at once."""
        now_s = self._clock.monotonic()
        return [each.name for each in self._duties if 0 < each.due_at <= now_s]
