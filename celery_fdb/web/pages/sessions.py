"""``/sessions``: the consumer processes."""

from __future__ import annotations

from typing import NamedTuple

from starlette.responses import Response

from celery_fdb.inspection.overview import Overview, SessionView, is_internal, look
from celery_fdb.web.visit import Visit
from kombu_fdb import Broker

__all__ = ["sessions", "silent"]


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


def heard_s(seen: Overview, session: SessionView) -> float | None:
    """How long ago it was heard, by its own wall clock and ours; None if it told no time."""
    return max(0.0, (seen.taken_ms - session.beat_ms) / 1000) if session.beat_ms else None


def silent(seen: Overview) -> list[SessionView]:
    """Those that live by their own account, and were not heard for longer than their time to live."""
    return [each for each in seen.sessions if each.open and (heard_s(seen, each) or 0.0) > each.ttl_s]
