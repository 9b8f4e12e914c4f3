"""Looking at a broker as a whole: what dashboards, metrics and people on call ask for. Changes nothing.

What any of it costs does not grow with the number of messages, but with that of queues, sessions and keys; ``held``
counts a session's messages one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

from kombu_fdb.api.arguments import Span, known_span, names_of
from kombu_fdb.api.connection import Connection
from kombu_fdb.engine.metrics.keytotals import KeyTotals
from kombu_fdb.engine.metrics.samples import DAY, HOUR, Sample
from kombu_fdb.engine.upkeep.asides import Aside
from kombu_fdb.model import QueueFacts, SessionFacts

__all__ = ["Inspection"]


class Inspection:
    """Get it from :attr:`.broker.Broker.inspect`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def facts(self, queues: Sequence[str]) -> dict[str, QueueFacts]:
        """Declaration, control and age of these queues; their counters are ``Broker.queues()``."""
        return self._connection.engine.inspect.facts(names_of(queues))

    def sessions(self, *, held: bool = False) -> list[SessionFacts]:
        """Every consumer process that is open or not yet cleaned up. ``held``: with the number of its messages."""
        return self._connection.engine.inspect.sessions(held=held)

    def totals(self) -> dict[str, dict[str, int]]:
        """How many messages ever were published, claimed, acked, ... by queue and event.

        Lost leases whose queue is unknown stand under ``""``.
        """
        return self._connection.engine.metrics.totals()

    def key_totals(self) -> dict[str, KeyTotals]:
        """The same by queue, key and event, of the busiest keys; of a queue's others under ``""``."""
        return self._connection.engine.metrics.key_totals()

    def samples(self, span: Span) -> list[Sample]:
        """What the queues held and did, the oldest first: each 15 s of the last "hour", or each 5 minutes of a "day".

        The processes that consume write it; while there is none, or where there are very many queues, some are
        missing. The 50 busiest queues have names, the others stand together under ``""``.
        Raises ``InvalidArgument`` for another span.
        """
        series = {"hour": HOUR, "day": DAY}[known_span(span)]
        return self._connection.engine.metrics.samples(series)

    def set_aside(self) -> list[Aside]:
        """What the duties could not do and have put aside, with the reason."""
        return self._connection.engine.upkeep.asides()
