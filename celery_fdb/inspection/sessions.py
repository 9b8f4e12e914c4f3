"""Sessions as people judge them: how long ago each was heard, and which are silent."""

from __future__ import annotations

from celery_fdb.inspection.overview import Overview, SessionView


def heard_s(seen: Overview, session: SessionView) -> float | None:
    """How long ago it was heard, by its own wall clock and ours; None if it told no time."""
    return max(0.0, (seen.taken_ms - session.beat_ms) / 1000) if session.beat_ms else None


def state_of(session: SessionView, quiet_s: float | None) -> str:
    """alive, ended, or silent: not heard for longer than its time to live, so that others get its messages."""
    if not session.open:
        return "ended"
    return "silent" if (quiet_s or 0.0) > session.ttl_s else "alive"


def silent(seen: Overview) -> list[SessionView]:
    return [each for each in seen.sessions if state_of(each, heard_s(seen, each)) == "silent"]
