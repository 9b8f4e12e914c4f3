"""A connection that consumes, turn by turn: the real fetcher, dispatch and client, without their threads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

from kit.conformance.queue import Bench
from kit.simulation.connection import Flag, SimulatedClient, SimulatedTransport
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.settings.options import Options
from kombu_fdb.transport.consuming.receiver import deliver_next

OPTIONS = Options(claim_window=4, poll_interval=60.0)


class Consumer:
    """Of ``queues``, those in ``single`` with one active consumer. ``contested``: it stands in a wait queue at once."""

    def __init__(
        self,
        bench: Bench,
        queues: Sequence[str],
        *,
        prefetch: int = 4,
        single: Collection[str] = (),
        contested: bool = False,
    ) -> None:
        engine, self._clock = bench.another(), bench.clock
        client = SimulatedClient(
            engine,
            OPTIONS,
            lambda: ClientSession(engine, OPTIONS, engine.sessions.open({}), Flag(), bench.clock),
        )
        self.transport = SimulatedTransport(
            client, bench.clock.monotonic, Random(1), prefetch, bench.clock.wall_ms, single_active=single.__contains__
        )
        self.transport.fetcher.attend_loop(registered=True)
        for queue in single:
            engine.queues.declare(QueueDeclaration(queue, arguments={"x-single-active-consumer": True}))
        for number, queue in enumerate(queues):
            self.transport.consume(queue, f"tag-{number}")
        if contested:
            self.transport.fetcher._claiming.combiner.contention.contest(self.transport.fetcher.dispatch.shared)

    def turn(self) -> None:
        self.transport.bell.ring()
        self.transport.turn()

    @property
    def waiting(self) -> list[str]:
        """The queues of the messages that have arrived and were not handed out."""
        return [delivery.queue for _, delivery in self.transport.credit.inbox]

    def settle(self, each_s: float = 0.0) -> list[str]:
        """Hand all of them out, one each ``each_s`` seconds, and acknowledge them; of which queues they were."""
        queues = self.waiting
        with self.transport.draining():
            for _ in queues:
                self._clock.advance(each_s)
                assert deliver_next(self.transport.fetcher)
        for tag in [*self.transport.given]:
            del self.transport.given[tag]
            self.transport.qos.ack(tag)
        return queues
