"""``/sessions``: the consumer processes."""

from __future__ import annotations

from typing import NamedTuple

from starlette.responses import Response

from celery_fdb.inspection.overview import SessionView, is_internal, look
from celery_fdb.inspection.sessions import heard_s, silent
from celery_fdb.web.visit import Visit
from kombu_fdb import Broker

__all__ = ["sessions"]


class Row(NamedTuple):
    view: SessionView
    age_s: float | None
    is_silent: bool

    @property
    def queues(self) -> list[str]:
        return [name for name in self.view.queues if not is_internal(name)]


def sessions(visit: Visit, broker: Broker) -> Response:
    """The silent ones first."""
    seen = look(broker, queues=(), held=True)
    quiet = {each.id for each in silent(seen)}
    rows = [Row(each, heard_s(seen, each), each.id in quiet) for each in seen.sessions]
    rows.sort(key=lambda row: (not row.is_silent, row.view.host, row.view.pid or 0))
    return visit.page("sessions", sessions=rows, asides=seen.asides)
