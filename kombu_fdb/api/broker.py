"""The queue for Python programs without Kombu or Celery.

::

    with Broker.open("fdb+sqlite:////var/lib/app/broker.db") as broker:
        jobs = broker.queue("jobs")
        jobs.put("build 42", key="alice", priority=5, delay=1.5)
        for job in jobs.consume(timeout=10):
            with job:  # acked, or released if an exception comes out
                build(job.payload)

It is the same store and engine: what Celery or Kombu puts there can be counted, peeked at, paused, limited and replayed
here. Their messages have an envelope (``transport/envelope.py``), so take each message with the kind of API that put
it. All brokers and Kombu connections of a process with equal options share one client, and so one session: one
heartbeat, which begins when something is first taken.

Names are the field's: a job is *put*, *taken*, and then *acked*, *released* or *buried*; buried ones are *replayed*.
Times are seconds. Every call ends within the options' timeouts, except ``take`` and ``consume``, which wait as long as
their ``timeout`` says.

For its operator a broker has three more parts:

* inspection changes nothing. Dashboards, metrics and people on call use it. Its cost does not grow with the number of
  messages, but with that of queues, sessions and keys; ``held`` counts a session's messages one by one.
* topology is exchanges and bindings.
* transfer moves everything out of a broker, and into another one: ``celery fdb export`` and ``import``. Each verb may
  be called again after any failure: a message is stored by the transaction that marks it as stored
  (``engine/transfer.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Self, Unpack, get_args

from kombu_fdb.api.arguments import Declaration, Named, check_name, queue_names
from kombu_fdb.api.connection import Connection
from kombu_fdb.api.consumer import Consumer, take_many
from kombu_fdb.api.dead_letters import DeadLetters
from kombu_fdb.api.job import Job
from kombu_fdb.api.queue import Queue
from kombu_fdb.engine import transfer
from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.metrics.samples import SERIES, Sample, Span
from kombu_fdb.engine.metrics.totals import KeyTotals
from kombu_fdb.engine.topology import ARGUMENT_KINDS
from kombu_fdb.engine.upkeep.quarantine import Aside
from kombu_fdb.errors import InvalidArgument
from kombu_fdb.model import (
    KeyLimits,
    Listed,
    Peeked,
    QueueControl,
    QueueCounts,
    QueueFacts,
    SessionFacts,
    StoredMessage,
)
from kombu_fdb.primitives.ranges import shown
from kombu_fdb.process.client import Client, client_for
from kombu_fdb.routing.tables import Exchange, QueueDeclaration
from kombu_fdb.settings.location import Location, locate, parse_url
from kombu_fdb.settings.options import Options, parse_options
from kombu_fdb.store.protocol import Database

#: For callers of the class itself.
FIX_OPEN = "To open a store, call Broker.open(url)."


class Broker:
    """An open broker. Thread-safe; not for a forked child, which opens its own (``ForkedError``).

    A broker to which no reference is left, not even to its queues and jobs, closes by itself: what it held is released.
    """

    def __init__(self, client: Client, *, connect_timeout: float | None = None) -> None:
        """Use :meth:`open`. A broker with its own ``Client`` has its own session, like that of another process."""
        if not isinstance(client, Client):  # a URL may contain a password: don't repeat it
            raise InvalidArgument("a broker is not made of this", given=type(client).__name__, fix=FIX_OPEN)
        timeout_s = client.options.connect_timeout if connect_timeout is None else connect_timeout
        self._connect(Connection(client, timeout_s=timeout_s))

    def _connect(self, connection: Connection) -> None:
        #: For the asyncio API (``kombu_fdb.aio``).
        self.connection = connection

    @classmethod
    def open(cls, url: str, **options: Any) -> Self:
        """Open a store. ``url``: :mod:`kombu_fdb.settings.location`; ``options``: :mod:`kombu_fdb.settings.options`.

        Raises ``OptionError``, or within ``connect_timeout`` seconds ``StoreUnavailable`` or ``FormatError``.
        """
        parsed = parse_options(options)
        return cls(client_for(locate(parse_url(url), parsed), parsed), connect_timeout=parsed.connect_timeout)

    @classmethod
    def on(cls, location: Location, engine: Engine, **options: Any) -> Self:
        """A broker with a session of its own on a store that is open already, and is closed with it: for tests."""
        return cls(Client(location, parse_options(options), engine))

    @classmethod
    def of(cls, client: Client) -> Self:
        """On the client of a Kombu channel, which is open as long as the channel's connection."""
        broker = cls.__new__(cls)
        broker._connect(Connection(client, timeout_s=None))
        return broker

    def close(self) -> None:
        """Release what was taken here and not settled, at once and uncounted; end every waiting ``take``. Idempotent.

        If the store does not answer, the session's end releases the jobs.
        """
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.location}{' (closed)' if self.connection.closed else ''}>"

    @property
    def location(self) -> Location:
        """Where it is; as a text, without its secrets."""
        return self._client.location

    @property
    def options(self) -> Options:
        return self.connection.options

    @property
    def database(self) -> Database:
        """For other users of the same store. Raises ``StoreUnavailable`` when closed."""
        return self._client.database

    @property
    def _client(self) -> Client:
        return self.connection.client

    @property
    def _engine(self) -> Engine:
        return self.connection.engine

    # -- queues ----------------------------------------------------------------------------------------------------

    def queue(self, name: str) -> Queue:
        """A queue by name. Asks the store for nothing; a queue needs no declaration to be used."""
        return Queue(self.connection, check_name("queue's name", name))

    def declare(self, name: str, **declaration: Unpack[Declaration]) -> Queue:
        """Create a queue, or change its ``arguments``, such as ``{"x-max-length": 128}`` (docs/queue-arguments.md).

        Raises ``InvalidArgument`` for an invalid one. A queue with ``x-single-active-consumer`` serves one broker, from
        its first ``take`` until it is closed.
        """
        _check_declaration(declaration)
        self._engine.queues.declare(QueueDeclaration(name, **declaration))
        return self.queue(name)

    def queues(self) -> dict[str, QueueCounts]:
        """All queues that are declared or hold messages."""
        return self._engine.inspect.queues()

    def dead_letters(self, dead_queue: str) -> DeadLetters:
        """Those in a queue that a dead-letter exchange leads to, or in any ``<queue>.dead``."""
        return DeadLetters(self.connection, check_name("queue's name", dead_queue))

    # -- for its operator --------------------------------------------------------------------------------

    @property
    def inspect(self) -> Inspection:
        """Facts, counters and sessions: what dashboards and metrics show."""
        return Inspection(self.connection)

    @property
    def topology(self) -> Topology:
        """Exchanges and bindings."""
        return Topology(self.connection)

    @property
    def transfer(self) -> Transfer:
        """Everything out of this broker, and into it."""
        return Transfer(self.connection)

    @property
    def migration(self) -> Transfer:
        """The name that :attr:`transfer` had in 0.2.0; it goes with 0.4."""
        warnings.warn("Broker.migration is called Broker.transfer", DeprecationWarning, stacklevel=2)
        return self.transfer

    # -- tasks by their ids ----------------------------------------------------------------------------------------

    def find(self, task_id: str) -> list[Peeked]:
        """The messages of a task (Celery's task id, or ``put``'s), in whatever queue and state; none if it is done.

        If publishers have given the same id to many messages, the first 500.
        """
        return self._engine.inspect.find_task(check_name("task id", task_id))

    def spots(self, task_id: str) -> list[Listed]:
        """The same messages as a page shows them: with their spots, and the beginnings of their payloads."""
        return self._engine.inspect.list_task(check_name("task id", task_id))

    def cancel(self, task_id: str) -> list[Peeked]:
        """Cancel a task that no worker has begun: ready, delayed or dead. Needs no worker. Returns what was deleted.

        What a worker holds stays with it; :meth:`find` shows it as leased.
        """
        return self._engine.messages.cancel(check_name("task id", task_id))

    # -- taking ----------------------------------------------------------------------------------------------------

    def take(
        self, queues: Iterable[Named | str], timeout: float | None = None, *, in_order: bool = False
    ) -> Job | None:
        """The next job of several queues; None after ``timeout`` seconds (None: no limit, 0: don't wait).

        The queues take turns: the one that was served longest ago comes first. ``in_order``: always the first of them
        that has a job. The call sleeps until the store reports a change. (For many sub-queues, each with a priority, a
        capacity and a switch, use the keys of one queue, see :meth:`.queue.Queue.limit`.)
        """
        jobs = self.take_many(queues, 1, timeout, in_order=in_order)
        return jobs[0] if jobs else None

    def take_many(
        self, queues: Iterable[Named | str], limit: int, timeout: float | None = None, *, in_order: bool = False
    ) -> list[Job]:
        """Up to ``limit`` jobs in one transaction, at least one unless ``timeout`` seconds have passed."""
        return take_many(self.connection, queue_names(queues), limit, timeout, in_order=in_order)

    def consume(
        self,
        queues: Iterable[Named | str],
        *,
        timeout: float | None = None,
        limit: int | None = None,
        in_order: bool = False,
    ) -> Consumer:
        """``for job in broker.consume([...])``: as :meth:`.queue.Queue.consume`, of several queues as :meth:`take`."""
        names = queue_names(queues)
        return Consumer(self.connection, names, timeout=timeout, limit=limit, in_order=in_order)


def _check_declaration(given: Collection[str]) -> None:
    """Raises ``InvalidArgument`` for an unknown field: AMQP's arguments go into ``arguments``, with their names."""
    known = Declaration.__optional_keys__
    for name in sorted(set(given) - known):
        amqp = f"x-{name.replace('_', '-')}"
        fix = f'Pass arguments={{"{amqp}": ...}}.' if amqp in ARGUMENT_KINDS else f"Known: {', '.join(sorted(known))}."
        raise InvalidArgument("a queue is declared with no such argument", name=name, fix=fix)


# -- inspection --------------------------------------------------------------------------------------------------------


class Inspection:
    """Get it from :attr:`.Broker.inspect`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def facts(self, queues: Sequence[str]) -> dict[str, QueueFacts]:
        """Declaration, control and age of these queues; their counters are ``Broker.queues()``."""
        return self._connection.engine.inspect.facts(queue_names(queues))

    def sessions(self, *, held: bool = False) -> list[SessionFacts]:
        """Each session that is open or not yet cleaned up, one per consumer process. ``held``: count their messages."""
        return self._connection.engine.inspect.sessions(held=held)

    def totals(self) -> dict[str, dict[str, int]]:
        """How many messages ever were published, claimed, acked, ... by queue and event.

        Lost leases whose queue is unknown are counted under ``""``.
        """
        return self._connection.engine.inspect.totals()

    def key_totals(self) -> dict[str, KeyTotals]:
        """The same by queue, key and event, for the busiest keys; a queue's other keys are counted under ``""``."""
        return self._connection.engine.inspect.key_totals()

    def samples(self, span: Span) -> list[Sample]:
        """What the queues held and did, the oldest first.

        Each 15 s of the last "hour", each 5 minutes of a "day", or each half hour of a "week". Processes that consume
        write them; while there is none, or where there are very many queues, some are missing. The 50 busiest queues
        have names, the others are summed under ``""``. Raises ``InvalidArgument`` for another span.
        """
        if span not in get_args(Span):
            raise InvalidArgument("no samples of that span", given=shown(span), fix='Pass "hour", "day" or "week".')
        return self._connection.engine.inspect.samples(SERIES[span])

    def set_aside(self) -> list[Aside]:
        """What the duties could not handle and have set aside, with the reason."""
        return self._connection.engine.upkeep.asides()


# -- transfer ---------------------------------------------------------------------------------------------------------


class Transfer:
    """Get it from :attr:`.Broker.transfer`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def _verbs(self) -> transfer.Transfer:
        return self._connection.engine.transfer

    # -- out -------------------------------------------------------------------------------------------------------

    def dump(self, queue: str, *, leased: bool = False) -> Iterator[StoredMessage]:
        """Every message of a queue at rest, in the order in which to store it again.

        ``leased``: those under leases too, as ready ones.
        """
        return self._verbs.dump(queue, leased=leased)

    def dedups(self) -> Iterator[transfer.DedupEntry]:
        """Exchange, routing key, dedup id and end (wall clock, ms) of each window that may still be open."""
        return self._verbs.dedups()

    # -- in --------------------------------------------------------------------------------------------------------

    def restore(self, import_id: bytes, messages: Sequence[tuple[bytes, StoredMessage]]) -> int:
        """Store messages of another store, each with its mark, in one transaction, unless they are here already.

        Returns how many were stored. Up to ``MOST_RESTORED`` together (``engine/transfer.py``).
        """
        return self._verbs.restore(import_id, messages)

    def restore_dedups(self, entries: Sequence[transfer.DedupEntry]) -> None:
        """Open these windows here too."""
        self._verbs.restore_dedups(entries)

    def restore_queue(self, declaration: QueueDeclaration) -> None:
        """Declare the queue as it was declared there."""
        self._connection.engine.queues.declare(declaration)

    def restore_control(self, queue: str, control: QueueControl) -> None:
        """Set the whole control, in place of what is set here."""
        self._connection.engine.queues.set_control(queue, control)

    def restore_limits(self, queue: str, key: str, limits: KeyLimits) -> None:
        """Set all of a key's limits, in place of those it has here."""
        self._connection.engine.queues.limit(queue, key, limits)

    def restore_binding(self, queue: str, exchange: str, routing_key: str) -> None:
        """Bind the queue as in another store; an older version's may have a key that would be too long today."""
        self._verbs.bind(queue, exchange, routing_key)

    def finished(self, import_id: bytes) -> dict[str, Any] | None:
        """What :meth:`finish` was given; None if the import is new or under way."""
        return self._verbs.finished(import_id)

    def finish(self, import_id: bytes, facts: dict[str, Any]) -> None:
        """Note that everything is here, and forget the marks. Idempotent."""
        self._verbs.finish(import_id, facts)


# -- topology ----------------------------------------------------------------------------------------------------------


class Topology:
    """Get it from :attr:`.Broker.topology`."""

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
