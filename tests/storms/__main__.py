"""``python -m tests.storms [STORM ...]``: play storms, and print what came of what they confirmed.

Exit status: 0 if nothing confirmed was lost, doubled or left undone, else 1. A seed is the storm's choices; processes
and their timing are real, so that a seed makes a failure likely again and not certain.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from . import churn, cluster, combiner, disk, forks, kills, relays
from .ledger import Verdict
from .stage import Skipped, Storm
from .table import render

STORMS: dict[str, Storm] = {
    "kills": kills.run,
    "combiner": combiner.run,
    "relays": relays.run,
    "forks": forks.run,
    "churn": churn.run,
    "disk": disk.run,
    "cluster": cluster.run,
}


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    verdicts: list[Verdict] = []
    for name in given.storm or STORMS:
        options = {key: value for key in ("store", "acks") if (value := getattr(given, key)) is not None}
        print(f"{name}: seed {given.seed}, {given.rounds} rounds", file=sys.stderr, flush=True)
        if given.logs:
            os.environ["STORM_LOGS"] = str(Path(given.logs, name).absolute())
            Path(os.environ["STORM_LOGS"]).mkdir(parents=True, exist_ok=True)
        try:
            verdicts.append(STORMS[name](given.rounds, given.seed, **options))
        except Skipped as reason:
            print(f"{name} skipped: {reason}", flush=True)
    print(render(verdicts), flush=True)
    return 0 if all(each.is_good for each in verdicts) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.storms", description="Play storms.")
    parser.add_argument("storm", nargs="*", metavar="STORM", help="all of them by default")
    parser.add_argument("--rounds", type=int, default=12, help="strikes of each; 4 take seconds")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--store", choices=["sqlite", "fdb"], help="where the storm has a choice")
    parser.add_argument("--acks", choices=["early"], help="kills only: have a worker lose a message, to see it noticed")
    parser.add_argument("--logs", metavar="FOLDER", help="keep what the processes said, a folder for each storm")
    given = parser.parse_args(arguments)
    if unknown := set(given.storm) - set(STORMS):
        parser.error(f"no such storm: {', '.join(unknown)}; there are {', '.join(STORMS)}")
    return given


if __name__ == "__main__":
    sys.exit(main())
