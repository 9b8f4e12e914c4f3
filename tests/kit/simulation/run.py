"""Carry out one plan, from beginning to rest."""

from __future__ import annotations

from collections.abc import Sequence

from kit.simulation.acts.actions import ACTIONS
from kit.simulation.acts.consuming import connect
from kit.simulation.acts.rest import come_to_rest
from kit.simulation.plan import Profile, Step, make_plan
from kit.simulation.profiles import PROFILES
from kit.simulation.violation import Violation
from kit.simulation.world import World


def profile_of(seed: int) -> str:
    """Every profile gets its turn."""
    names = [*PROFILES]
    return names[seed % len(names)]


def simulate(seed: int, profile: str = "") -> None:
    """Run one seed. Raises ``Violation``."""
    chosen = PROFILES[profile or profile_of(seed)]
    violation, _ = replay(make_plan(seed, chosen), chosen)
    if violation is not None:
        raise violation


def replay(plan: Sequence[Step], profile: Profile, *, trace: bool = False) -> tuple[Violation | None, list[str]]:
    """Carry out a plan. Returns what it violates, if anything, and the history if it is to be traced."""
    world = World(profile, ACTIONS, connect if profile.connected else None, trace=trace)
    try:
        world.run(plan)
        come_to_rest(world)
    except Violation as violation:
        world.frames.clear()
        return violation, world.history
    return None, world.history
