"""Beat's scheduler of a run: two beats publish each tick once, which is one second of their clocks."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from celery.beat import SchedulingError

from celery_fdb.beat import SHORTEST_WINDOW_S, Scheduler

from .app import TICK_S, recorder


class Ticks(Scheduler):
    """Tells of each, with the number that a tick has whichever beat publishes it."""

    def apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any) -> Any:
        # The moment that the tick is taken from: at a later one the same tick could get the next number here.
        moment = self._reserved.last_run_at
        name, sent = f"{recorder.who}-tick-{entry.total_run_count}", copy.copy(entry)
        sent.options = {**entry.options, "task_id": name}
        answer = recorder.call(
            "publish",
            partial(super().apply_async, sent, producer, advance, **kwargs),
            doubts=(SchedulingError,),
            message=name,
            queue="tasks",
            dedup=f"tick {moment.timestamp() // TICK_S:.0f}",
            window=SHORTEST_WINDOW_S,
        )
        if answer.kind != "ok":
            raise answer.value
        return answer.value
