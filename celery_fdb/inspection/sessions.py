"""Sessions as people judge them: how long ago each was heard, and which are silent."""

from __future__ import annotations

from celery_fdb.inspection.overview import Overview, SessionView

__all__ = ["heard_s", "silent"]


def heard_s(seen: Overview, session: SessionView) -> float | None:
    """How long ago it was heard, by its own wall clock and ours; None if it told no time."""
    return max(0.0, (seen.taken_ms - session.beat_ms) / 1000) if session.beat_ms else None


def silent(seen: Overview) -> list[SessionView]:
    """Those that live by their own account, and were not heard for longer than their time to live."""
    return [each for each in seen.sessions if each.open and (heard_s(seen, each) or 0.0) > each.ttl_s]
