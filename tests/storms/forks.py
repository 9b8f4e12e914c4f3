"""Forks at any moment: see ``forker.py``."""

from __future__ import annotations

from .ledger import Verdict
from .stage import PATIENCE_S, Stage, staged

CHILDREN = 6
#: Of each publishing thread.
MESSAGES = 120


def run(rounds: int, seed: int, store: str = "sqlite") -> Verdict:
    """Each round is two processes at once, with some children each."""
    with staged("forks", seed, store=store) as stage:
        for _ in range(rounds):
            play(stage)
        for kind in ("hung", "failed"):
            if stage.ledger.counts[kind]:
                stage.complaints.append(f"{stage.ledger.counts[kind]} children {kind}")
        return stage.finish()


def play(stage: Stage) -> None:
    for each in stage.alive("forker"):
        stage.complaints += filter(None, [each.end()])
    target = stage.ledger.counts["published"] + 2
    for _ in range(2):
        given = (MESSAGES, CHILDREN, stage.rng.randrange(10**6))
        stage.start("forker", "-m", "tests.storms.forker", *map(str, given))
    stage.ledger.wait_while_moving(lambda: stage.ledger.counts["published"] >= target, PATIENCE_S)
