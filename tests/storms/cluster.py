"""Three FoundationDB processes, killed in turn and all at once, while Celery works."""

from __future__ import annotations

from .kills import fill
from .ledger import Verdict
from .stage import Skipped, Stage, staged
from .strikes import MOST_STEPS

PROCESSES = 3


def run(rounds: int, seed: int, store: str = "fdb") -> Verdict:
    """Each process is killed in its turn, and each fourth time all of them."""
    if store != "fdb":
        raise Skipped("SQLite has no processes of its own")
    with staged("cluster", seed, store="fdb", processes=PROCESSES) as stage:
        for number in range(rounds):
            fill(stage)
            stage.expect("ended", stage.rng.randint(1, MOST_STEPS))
            victim = number % (PROCESSES + 1)
            if victim == PROCESSES:
                kill_all(stage)
            else:
                kill_one(stage, victim)
        fill(stage)
        return stage.finish()


def kill_one(stage: Stage, number: int) -> None:
    """Two of three go on without it."""
    assert stage.cluster is not None
    server = stage.cluster.servers[number]
    server.stop()
    stage.expect("ended", stage.rng.randint(1, MOST_STEPS))
    server.spawn()


def kill_all(stage: Stage) -> None:
    """Nothing is served until they are back; what was confirmed is there then."""
    assert stage.cluster is not None
    stage.cluster.stop()
    stage.cluster.start()
