"""What strikes a run: each fault is begun, lasts, and is healed. Whom it struck is for the history to tell.

A fault of the cluster strikes no session: while the store does not answer, no other can look either, and all of them
beat again before one is taken for dead.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from .box import ZONES, Client

if TYPE_CHECKING:
    from .run import Run


class Strike(NamedTuple):
    """``struck``: clients on which it falls; ``lasts_s``: until it is healed; ``hold``: begins and heals it."""

    struck: list[Client]
    lasts_s: float
    hold: AbstractContextManager[None]


Fault = Callable[["Run", Random], Strike]


@contextmanager
def _until(heal: Callable[[], object], *begin: Callable[[], object]) -> Iterator[None]:
    try:
        for each in begin:
            each()
        yield
    finally:
        heal()


def _holder(run: Run, rng: Random) -> Client:
    """In three of four times one of a consumer, as soon as that holds a message."""
    if rng.random() < 0.25:
        return rng.choice(run.struck_ones)
    client = rng.choice(run.consumers)
    run.await_hold(client)
    return client


def zone_lost(run: Run, rng: Random) -> Strike:
    zone = rng.choice(ZONES)
    servers = [each for each in run.box.servers if each.zone == zone]
    return Strike([], 8, _until(lambda: [each.revive() for each in servers], *(each.kill for each in servers)))


def zone_deaf(run: Run, rng: Random) -> Strike:
    """What it says is heard, and it hears nothing."""
    zone = rng.choice(ZONES)
    struck, others = [each for each in run.box.clients if each.zone == zone], run.box.others(zone)
    return Strike(struck, 8, _until(lambda: run.box.rejoin(others, zone), lambda: run.box.cut(others, zone)))


def one_server_left(run: Run, rng: Random) -> Strike:
    """For a client, which is cut off from all others."""
    client, server = rng.choice(run.struck_ones), rng.choice(run.box.servers)
    others = [each for each in run.box.servers if each is not server]
    lasts_s = rng.choice([4, 2 * run.ttl_s])

    def rejoin() -> None:
        run.box.rejoin(client, others)
        run.box.rejoin(others, client)

    return Strike([client], lasts_s, _until(rejoin, lambda: run.box.partition(client, others)))


def coordinators_moved(run: Run, rng: Random) -> Strike:
    servers = rng.sample(run.box.servers, 3)
    return Strike([], 3, _until(lambda: None, lambda: run.box.move_coordinators(servers)))


def paused_short(run: Run, rng: Random) -> Strike:
    return _paused(run, rng.choice(run.struck_ones), 5)


def paused_long(run: Run, rng: Random) -> Strike:
    return _paused(run, _holder(run, rng), 2 * run.ttl_s)


def _paused(run: Run, client: Client, lasts_s: float) -> Strike:
    def send(number: int) -> None:
        for each in run.on(client):
            each.send(number)

    return Strike([client], lasts_s, _until(partial(send, signal.SIGCONT), partial(send, signal.SIGSTOP)))


def clocks_off(run: Run, rng: Random) -> Strike:
    """By up to two hours, or in every other run by seconds: clocks that differ by ten minutes leave no rate to check.

    Those of publishers are off by seconds only: what they delay is not ready before their own clock says so.
    """
    off_s = (600, 7200) if run.seed % 2 else (1, 5)
    clients = [each for each in run.struck_ones if not run.seed % 2 or "shop" not in each.name]
    moved = {each: rng.choice([-1, 1]) * rng.uniform(*off_s) for each in clients}

    def jump() -> None:
        for client, ahead_s in moved.items():
            client.set_clock(ahead_s)

    def back() -> None:
        for client in moved:
            client.set_clock(0)

    return Strike([], 8, _until(back, jump))


def locked(run: Run, rng: Random) -> Strike:
    return Strike([], 6, run.box.locked())


def rolling_restart(run: Run, rng: Random) -> Strike:
    """Each process is told to end, and starts again."""
    return Strike([], 1, _until(lambda: None, lambda: _roll(run)))


def _roll(run: Run) -> None:
    for actor in list(run.actors):
        run.stop(actor)
        run.start(actor.role)


def upgraded(run: Run, rng: Random) -> Strike:
    """A rolling restart from the release with which the run began to this version."""

    def begin() -> None:
        if run.released is None:
            raise RuntimeError("all have been upgraded")
        run.released = None
        _roll(run)

    return Strike([], 1, _until(lambda: None, begin))


def killed(run: Run, rng: Random) -> Strike:
    """All processes of a client, and they start again."""
    client = _holder(run, rng)
    roles = [each.role for each in run.on(client)]

    def start() -> None:
        for role in roles:
            run.start(role)

    return Strike([client], 2, _until(start, lambda: run.kill(client)))


def disk_full(run: Run, rng: Random) -> Strike:
    server = rng.choice(run.box.servers)

    def empty() -> None:
        server.empty_disk()
        server.revive()

    return Strike([], 6, _until(empty, server.fill_disk))


#: By their names in the history.
FAULTS: dict[str, Fault] = {
    "zone lost": zone_lost,
    "zone deaf": zone_deaf,
    "one server left": one_server_left,
    "coordinators moved": coordinators_moved,
    "pause, short": paused_short,
    "pause, long": paused_long,
    "clocks off": clocks_off,
    "locked": locked,
    "rolling restart": rolling_restart,
    "upgrade": upgraded,
    "kill": killed,
    "disk full": disk_full,
}
