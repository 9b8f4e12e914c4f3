"""``python -m tests.network``: seeded runs in a box; prints what each history says of each guarantee.

Exit status: 1 if a run violated a guarantee, or a process of it failed, else 0. Runs of five minutes are noted by hand
in ``runs.tsv``: 200 are the goal, with each fault in ten of them.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kit.history.report import render

from .box import box_unavailable_reason
from .faults import FAULTS
from .release import release_unavailable_reason
from .run import play


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    if reason := box_unavailable_reason():
        print(f"skipped: {reason}")
        return 0
    if reason := release_unavailable_reason():
        print(f"no upgrade: {reason}")
    faults, bad = Counter[str](), list[int]()
    for seed in range(given.seed, given.seed + given.runs):
        folder = Path(given.keep, str(seed)) if given.keep else Path(tempfile.mkdtemp(prefix="run-"))
        result = play(seed, given.seconds, folder, given.fault)
        faults += result.faults
        print(f"seed {seed}: {result.events} events; {dict(result.faults)}")
        print("\n".join([render(result.lines), *result.complaints]), flush=True)
        if not result.is_good:
            bad.append(seed)
            print(f"what its processes wrote is in {folder}", flush=True)
        elif not given.keep:
            shutil.rmtree(folder)
    print(f"{given.runs} runs of {given.seconds:g} s; faults: {dict(faults)}; bad: {bad or 'none'}")
    return 1 if bad else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.network", description="Play runs in a network in a box.")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60, help="how long faults go on in each")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="of the first run")
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="only these")
    parser.add_argument("--keep", metavar="FOLDER", help="keep histories and logs, a folder for each seed")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
