"""The end of a simulated process in good order, by the real client: what it has settled, and then its session."""

from __future__ import annotations

import logging

from kit.faults import Interrupted
from kit.simulation.process import Frame
from kit.simulation.world import OPTIONS, World
from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.model import Lease
from kombu_fdb.process.client import Client
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.settings.location import MemoryLocation
from kombu_fdb.settings.options import Options

# What goes wrong is in the plan, and is no news.
logging.getLogger(Client.__module__).addHandler(logging.NullHandler())

#: Acks of one transaction; the real client's are hundreds.
ACKS = 2


class ClosingClient(Client):
    """The real one, of which only the end is used."""

    def __init__(self, engine: Engine, client_session: ClientSession, options: Options, acks: list[Lease]) -> None:
        super().__init__(MemoryLocation("simulated"), options)
        self._own = engine, client_session
        self.acks.extend(acks)

    def take_acks(self, into: list[Lease]) -> list[Lease]:
        while self.acks and len(into) < ACKS:
            into.append(self.acks.popleft())
        return into

    def end(self) -> None:
        """Settle what is pending, and end the session."""
        self._end(*self._own)


def close(world: World, frame: Frame) -> None:
    """End in good order; the slot is free when all is released."""
    process = frame.actor
    session = process.session
    process.duties.stop()
    world.note(f"{process.name} closes")
    process.engine.sessions.close(session)
    if process.busy == {"close"} and process in world.processes.values():
        world.kill(process)


def shut(world: World, frame: Frame) -> None:
    """The same with acks that wait to be sent, as a worker ends on SIGTERM."""
    process = frame.actor
    acks = frame.rng.sample(list(process.held), frame.rng.randint(0, len(process.held)))
    frame.settled = frozenset(acks)
    world.note(f"{process.name} closes with {len(acks)} acks of {len(process.held)}")
    for lease in acks:
        del process.held[lease]
    frame.verb = "ack"
    client_session = process.client_session
    try:
        ClosingClient(process.engine, client_session, OPTIONS, acks).end()
    except Interrupted:
        process.unsettled.append(("ack", acks))
        raise
    if process.busy == {"close"} and process in world.processes.values():
        world.kill(process)
