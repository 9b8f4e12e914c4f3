"""``python -m kit.simulation FIRST [LAST]``: run seeds; show the first that fails, made small."""

from __future__ import annotations

import argparse
import sys
import time

from kit.simulation import PROFILES, make_plan, profile_of, replay, shrink
from kit.simulation.plan import walk


def main() -> int:
    """Exit status 1 if a guarantee was violated."""
    parser = argparse.ArgumentParser(prog="simulation", description="Simulate a range of seeds.")
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, nargs="?")
    parser.add_argument("--profile", choices=[*PROFILES], help="instead of each seed's own")
    parser.add_argument("--all", action="store_true", help="go on after a failure, and shrink none")
    given = parser.parse_args()
    seeds = range(given.first, (given.first if given.last is None else given.last) + 1)
    began, failed = time.perf_counter(), 0
    for seed in seeds:
        name = given.profile or profile_of(seed)
        violation, _ = replay(make_plan(seed, PROFILES[name]), PROFILES[name])
        if violation is None:
            continue
        failed += 1
        print(f"seed {seed}, profile {name}: {violation}", flush=True)
        if not given.all:
            show(seed, name)
            break
    seconds = time.perf_counter() - began
    if not failed:
        print(f"{len(seeds)} seeds, {len(seeds) / seconds:.1f} seeds/s, no violation")
    return 1 if failed else 0


def show(seed: int, name: str) -> None:
    """The history of a failing seed, made small."""
    profile = PROFILES[name]
    plan = make_plan(seed, profile)
    small = shrink(plan, profile)
    violation, history = replay(small, profile, trace=True)
    whole = sum(1 for _ in walk(plan))
    lines = [f"shrunk from {whole} steps to {sum(1 for _ in walk(small))}:"]
    lines += [f"  {'  ' * step.number.count('.')}{step}" for step in walk(small)]
    lines += ["history:", *[f"  {line}" for line in history], f"  {violation}"]
    lines.append(f"again: python -m kit.simulation {seed} --profile {name}")
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
