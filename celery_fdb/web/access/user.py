"""Who looks at the dashboard, and what they may do there."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["User"]


@dataclass(frozen=True, slots=True)
class User:
    """``name`` stands in the audit. What the dashboard itself may not do, nobody may."""

    name: str
    may_act: bool = True
    may_see_bodies: bool = True
