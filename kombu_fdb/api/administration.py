"""A broker's administration: inspection, migration and topology.

Inspection changes nothing. It is what dashboards, metrics and people on call ask for. What any of it costs does not
grow with the number of messages, but with that of queues, sessions and keys; ``held`` counts a session's messages one
by one.

Migration is everything out of a broker, and into another one: ``celery fdb export`` and ``import``. Each verb may be
called again after any failure: a message is stored by the transaction that marks it as stored
(``engine/migration.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from kombu_fdb.api.arguments import Span, check_name, names_of
from kombu_fdb.api.connection import Connection
from kombu_fdb.engine import migration
from kombu_fdb.engine.metrics.samples import DAY, HOUR, WEEK, Sample
from kombu_fdb.engine.metrics.totals import KeyTotals
from kombu_fdb.engine.upkeep.quarantine import Aside
from kombu_fdb.errors import InvalidArgument
from kombu_fdb.model import KeyLimits, QueueControl, QueueFacts, SessionFacts, StoredMessage
from kombu_fdb.primitives.ranges import shown
from kombu_fdb.routing.tables import Exchange, QueueDeclaration

# -- inspection --------------------------------------------------------------------------------------------------------


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
        """What the queues held and did, the oldest first.

        Each 15 s of the last "hour", each 5 minutes of a "day", or each half hour of a "week".
        The processes that consume write it; while there is none, or where there are very many queues, some are
        missing. The 50 busiest queues have names, the others stand together under ``""``.
        Raises ``InvalidArgument`` for another span.
        """
        series = {"hour": HOUR, "day": DAY, "week": WEEK}[_known(span)]
        return self._connection.engine.metrics.samples(series)

    def set_aside(self) -> list[Aside]:
        """What the duties could not do and have put aside, with the reason."""
        return self._connection.engine.upkeep.asides()


# -- migration ---------------------------------------------------------------------------------------------------------


class Migration:
    """Get it from :attr:`.broker.Broker.migration`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def _verbs(self) -> migration.Migration:
        return self._connection.engine.migrate

    # -- out -------------------------------------------------------------------------------------------------------

    def dump(self, queue: str, *, leased: bool = False) -> Iterator[StoredMessage]:
        """Every message of a queue that rests, in the order in which to store it again.

        ``leased``: those under leases too, as ready ones.
        """
        return self._verbs.dump(queue, leased=leased)

    def dedups(self) -> Iterator[migration.DedupEntry]:
        """Exchange, routing key, dedup id and end (wall clock, ms) of each window that may still be open."""
        return self._verbs.dedups()

    # -- in --------------------------------------------------------------------------------------------------------

    def restore(self, import_id: bytes, messages: Sequence[tuple[bytes, StoredMessage]]) -> int:
        """Store messages of another store, each with its mark, in one transaction: those that are not here yet.

        Returns how many were stored. Up to ``MOST_MESSAGES`` of ``MOST_BYTES`` together (``engine/migration.py``).
        """
        return self._verbs.restore(import_id, messages)

    def restore_dedups(self, entries: Sequence[migration.DedupEntry]) -> None:
        """Open these windows here too."""
        self._verbs.restore_dedups(entries)

    def restore_queue(self, declaration: QueueDeclaration) -> None:
        """As it was declared there."""
        self._connection.engine.queues.declare(declaration)

    def restore_control(self, queue: str, control: QueueControl) -> None:
        """All of it, in place of what is set here."""
        self._connection.engine.queues.set_control(queue, control)

    def restore_limits(self, queue: str, key: str, limits: KeyLimits) -> None:
        """All of a key's limits, in place of those it has here."""
        self._connection.engine.queues.limit(queue, key, limits)

    def restore_binding(self, queue: str, exchange: str, routing_key: str) -> None:
        """As it is bound in another store: in an older one, by a key that would be too long today."""
        self._verbs.bind(queue, exchange, routing_key)

    def finished(self, import_id: bytes) -> dict[str, Any] | None:
        """What :meth:`finish` was told; None if the import is new or under way."""
        return self._verbs.finished(import_id)

    def finish(self, import_id: bytes, facts: dict[str, Any]) -> None:
        """Everything is here: forget the marks. Idempotent."""
        self._verbs.finish(import_id, facts)


# -- topology ----------------------------------------------------------------------------------------------------------


class Topology:
    """Get it from :attr:`.broker.Broker.topology`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def exchanges(self) -> list[Exchange]:
        """Those that were declared."""
        return self._connection.engine.inspect.exchanges()

    def bindings(self) -> list[tuple[str, str, str]]:
        """``(exchange, queue, routing key)`` of every binding."""
        return self._connection.engine.inspect.bindings()

    def route(self, exchange: str, routing_key: str) -> list[str]:
        """The queues that a message would reach now. Raises ``ExchangeNotFound``."""
        return self._connection.engine.inspect.route(_exchange(exchange), check_name("routing key", routing_key))

    def declare_exchange(self, exchange: Exchange) -> None:
        """Create an exchange. Raises ``NotEquivalent`` if it has another type, ``QueueError`` for a long name."""
        self._connection.engine.queues.declare_exchange(exchange)

    def delete_exchange(self, name: str, *, if_unused: bool = False) -> bool:
        """Delete an exchange and its bindings; False if refused. The queues stay."""
        return self._connection.engine.queues.delete_exchange(_exchange(name), if_unused=if_unused)

    def bind(self, queue: str, exchange: str, routing_key: str) -> None:
        """Raises ``ExchangeNotFound``, and ``QueueError`` for a key of more than AMQP's 255 bytes. Idempotent."""
        self._connection.engine.queues.bind(queue, _exchange(exchange), routing_key)

    def unbind(self, queue: str, exchange: str, routing_key: str) -> None:
        """Idempotent."""
        names = check_name("queue's name", queue), _exchange(exchange), check_name("routing key", routing_key)
        self._connection.engine.queues.unbind(*names)


def _exchange(name: str) -> str:
    return check_name("exchange's name", name)


def _known(span: Span) -> Span:
    """Raises ``InvalidArgument``."""
    if span not in get_args(Span):
        raise InvalidArgument("no samples of that span", given=shown(span), fix='Pass "hour", "day" or "week".')
    return span
