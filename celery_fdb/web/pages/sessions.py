"""``/sessions``: the consumer processes."""

from __future__ import annotations

from typing import NamedTuple

from starlette.responses import Response

from celery_fdb.inspection.overview import SessionView, look
from celery_fdb.inspection.sessions import heard_s, state_of
from celery_fdb.web.visit import MOST_SHOWN, Visit
from kombu_fdb import Broker
from kombu_fdb.model import is_internal


class Row(NamedTuple):
    view: SessionView
    age_s: float | None

    @property
    def state(self) -> str:
        return state_of(self.view, self.age_s)

    @property
    def queues(self) -> list[str]:
        return [name for name in self.view.queues if not is_internal(name)]


def sessions(visit: Visit, broker: Broker) -> Response:
    """The silent ones first."""
    seen = look(broker, queues=(), held=True)
    rows = [Row(each, heard_s(seen, each)) for each in seen.sessions]
    rows.sort(key=lambda row: (row.state != "silent", row.view.host, row.view.pid or 0))
    return visit.page("sessions", sessions=rows[:MOST_SHOWN], total=len(rows), asides=seen.asides)
