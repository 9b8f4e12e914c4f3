"""What time it is, by those who take part."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median_low

from kombu_fdb.model import SessionFacts


def common_ms(sessions: Iterable[SessionFacts], own_ms: int) -> int:
    """By the clocks of most workers, as of their last heartbeats; ``own_ms`` if there are none.

    For deleting what others have written: one process whose clock is ahead deletes nothing too early. Of two that
    differ, the one behind is believed.
    """
    return median_low([each.beat_ms for each in sessions if each.open and each.beat_ms] or [own_ms])
