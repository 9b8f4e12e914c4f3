"""kill -9 and SIGSTOP of publishers and Celery workers, while others publish and work."""

from __future__ import annotations

from .ledger import Verdict
from .stage import OPTIONS, Stage, staged
from .strikes import freeze, freeze_until_fenced, kill, rounds_of, strike

BLOWS = [
    ("publisher", "confirmed", kill),
    ("publisher", "confirmed", freeze),
    ("worker", "ended", kill),
    ("worker", "ended", freeze_until_fenced),
]
#: Of each publisher; while its messages last, there is something to be struck.
MESSAGES = 150


def run(rounds: int, seed: int, store: str = "sqlite", acks: str = "late") -> Verdict:
    with staged("kills", seed, store=store, acks=acks) as stage:
        if acks == "early":  # what is lost never ends
            stage.patience_s = 3 * OPTIONS["session_ttl"]
        for role, step, how in rounds_of(stage.rng, BLOWS, rounds):
            fill(stage)
            strike(stage, role, step, how)
        fill(stage)
        return stage.finish()


def fill(stage: Stage, size: int = 0, publishers: int = 2, workers: int = 2) -> None:
    """So many of each are alive."""
    for _ in range(publishers - len(stage.alive("publisher"))):
        stage.publisher(MESSAGES, size=size)
    for _ in range(workers - len(stage.alive("worker"))):
        stage.worker()
