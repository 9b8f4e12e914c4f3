"""``python -m kit.parity FIRST [LAST]``: run seeds on RabbitMQ and on ours; show the first that differs, made small."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from kit.parity import RULES, Verdict, benches, documented, make_program, rabbitmq_unavailable_reason, shrink
from kit.parity.program import Step


def main() -> int:
    """Exit status 1 if there is a difference that the docs don't list, or one of theirs is not shown."""
    parser = argparse.ArgumentParser(prog="parity", description="Compare a range of random programs with RabbitMQ.")
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, nargs="?")
    parser.add_argument("--store", choices=["sqlite", "fdb"], action="append", help="instead of all that run here")
    parser.add_argument("--all", action="store_true", help="go on after a difference")
    given = parser.parse_args()
    reason = rabbitmq_unavailable_reason()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    seeds = range(given.first, (given.first if given.last is None else given.last) + 1)
    began, differing, shown = time.perf_counter(), 0, set[str]()
    with benches(given.store) as found:
        for name, bench in found.items():
            for rule in RULES.values():
                bench.verdict(rule.witness)
            for seed in seeds:
                verdict = bench.verdict(make_program(seed))
                if verdict.unexplained:
                    differing += 1
                    print(f"seed {seed} on {name}: {verdict}", flush=True)
                    show(*shrink(make_program(seed), bench.glance))
                    if not given.all:
                        return 1
            shown |= bench.shown
    seconds = time.perf_counter() - began
    hidden = set(documented()) - shown
    if hidden:
        print(f"listed in the docs and not shown by any program: {', '.join(sorted(hidden))}")
    print(f"{len(seeds)} seeds on {', '.join(found)}, {len(seeds) / seconds:.1f} seeds/s, {differing} differ")
    return 1 if differing or hidden else 0


def show(program: Sequence[Step], verdict: Verdict) -> None:
    """A program that differs, and how."""
    lines = [f"shrunk to {len(program)} steps:", *[f"  {each}" for each in program], f"differs in {verdict}"]
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    sys.exit(main())
