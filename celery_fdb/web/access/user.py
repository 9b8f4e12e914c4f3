"""Who looks at the dashboard, and what they may do there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class User:
    """``name`` stands in the audit. What the dashboard itself may not do, none of its users may.

    ``may_act_on_workers``: one who may act may also shut workers down, and resize them.
    """

    name: str
    may_act: bool = True
    may_see_bodies: bool = True
    may_act_on_workers: bool = True
