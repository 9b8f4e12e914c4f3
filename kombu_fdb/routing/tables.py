"""Routing: from an exchange and a routing key to queues, by tables that are reloaded when their epoch changes.

Patterns. The routing keys that a binding matches (https://www.rabbitmq.com/tutorials/amqp-concepts#exchanges):

* direct: the keys are equal.
* fanout: always.
* topic: words separated by dots; in the binding, ``*`` matches exactly one word, ``#`` any number, including none.

Tables. A process caches each exchange with its bindings, under the exchange's epoch: a key that every change of that
exchange sets to its versionstamp. A publish to a named exchange reads the epoch in its transaction, as a conflict, and
reloads the exchange if the epoch has changed. So a binding applies exactly from the commit that creates it to the one
that removes it. A client that binds its reply queue and then sends its request gets every answer, and a deleted queue
gets no later message. A burst of short-lived reply queues reloads only their own exchange.

Bindings are matched once for each routing key, before the transaction (:meth:`RoutingTables.prepare`) and by the tables
that this process has: so even very many bindings cost a transaction no time. If the tables have changed, the bindings
are matched inside the transaction, and its next attempt finds the result.

Declarations of queues are cached for a second: the arguments a publish needs (time to live, limits) change rarely, and
the most frequent publish, to a queue through the default exchange, should read nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from kombu_fdb.errors import ExchangeNotFound, FormatError
from kombu_fdb.keyspace.codec import control_of, decode_json, encode_json
from kombu_fdb.keyspace.layout import Keyspace, read_or
from kombu_fdb.model import URGENT, QueueControl
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.ranges import LONGEST_MS
from kombu_fdb.store.protocol import Transaction

# -- patterns and headers ----------------------------------------------------------------------------------------------


EXCHANGE_TYPES = frozenset({"direct", "fanout", "topic"})


def matches(exchange_type: str, binding_key: str, routing_key: str) -> bool:
    """Whether a message with ``routing_key`` reaches a queue bound with ``binding_key``."""
    if exchange_type == "fanout":
        return True
    if exchange_type == "direct" or ("*" not in binding_key and "#" not in binding_key):
        return binding_key == routing_key
    return _topic_matches(_parts(binding_key), _words(routing_key))


@lru_cache(4096)
def _words(key: str) -> tuple[str, ...]:
    """The empty key has no words (RabbitMQ)."""
    return tuple(key.split(".")) if key else ()


@lru_cache(4096)
def _parts(binding: str) -> tuple[tuple[str, ...], ...]:
    """The words between the ``#`` of a binding; several ``#`` in a row count as one."""
    parts: list[list[str]] = [[]]
    hashes = 0
    for word in _words(binding):
        if word != "#":
            parts[-1].append(word)
        elif parts[-1] or not hashes:
            parts.append([])
            hashes += 1
    return tuple(map(tuple, parts))


def _topic_matches(parts: Sequence[tuple[str, ...]], key: tuple[str, ...]) -> bool:
    """The first part must match at the beginning, the last at the end, the others in this order between them.

    Each of those is matched as early as possible: the words before it belong to the ``#``, and a later match would
    leave fewer for the next part. So it takes at most as many steps as the product of both word counts (a regular
    expression with several ``#`` takes exponential time, and following all possible matches at once is still quadratic
    in the binding).
    """
    first, *others = parts
    if not others:
        return len(first) == len(key) and _fits(first, key, 0)
    last = others.pop()
    at, end = len(first), len(key) - len(last)
    if at > end or not _fits(first, key, 0) or not _fits(last, key, end):
        return False
    for part in others:
        while at + len(part) <= end and not _fits(part, key, at):
            at += 1
        at += len(part)
        if at > end:
            return False
    return True


def _fits(part: tuple[str, ...], key: tuple[str, ...], at: int) -> bool:
    return all(word in ("*", found) for word, found in zip(part, key[at : at + len(part)], strict=True))


# -- tables ------------------------------------------------------------------------------------------------------------


V = TypeVar("V")

#: How long a cached declaration is valid, in seconds.
DECLARATION_AGE_S = 1.0
#: How many declarations are remembered; reply queues come and go.
MOST_DECLARATIONS = 10_000
#: How many exchanges are remembered, with their bindings.
MOST_EXCHANGES = 1_000
#: How many routing keys are remembered for an exchange; some applications use one for each message.
MOST_ROUTES = 1_000
#: Messages that expire within this time are soon gone: Celery's remote control messages do, ``rpc://`` results take a
#: day.
SOON_MS = 300_000
#: Arguments that are used in arithmetic.
_WHOLE_NUMBERS = (
    "x-message-ttl",
    "x-expires",
    "x-max-length",
    "x-max-length-bytes",
    "x-delivery-limit",
    "x-max-priority",
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """``type``: direct, topic or fanout."""

    name: str
    type: str = "direct"
    durable: bool = True
    auto_delete: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        return encode_json([self.type, self.durable, self.auto_delete, self.arguments])

    @property
    def alternate(self) -> str | None:
        """``alternate-exchange``: where messages go that reach no queue. "" means none, as in RabbitMQ."""
        given = self.arguments.get("alternate-exchange")
        return given if isinstance(given, str) else None

    @classmethod
    def decode(cls, name: str, value: bytes) -> Exchange:
        """Raises ``FormatError``."""
        fields = _fields(value, str, bool, bool, dict)
        if fields[0] not in EXCHANGE_TYPES:
            raise FormatError("unknown type of exchange", exchange=name, type=fields[0])
        return cls(name, *fields)


#: Exchanges that exist without being declared (https://www.rabbitmq.com/tutorials/amqp-concepts#exchanges).
PREDECLARED = {
    exchange.name: exchange
    for exchange in (
        Exchange("amq.direct", "direct"),
        Exchange("amq.fanout", "fanout"),
        Exchange("amq.topic", "topic"),
    )
}


@dataclass(frozen=True)
class QueueDeclaration:
    """``arguments`` keep AMQP's names and units (``x-message-ttl`` and ``x-expires`` in milliseconds)."""

    name: str
    durable: bool = True
    exclusive: bool = False
    auto_delete: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        return encode_json([self.durable, self.exclusive, self.auto_delete, self.arguments])

    @classmethod
    def decode(cls, name: str, value: bytes) -> QueueDeclaration:
        """Raises ``FormatError``."""
        fields = _fields(value, bool, bool, bool, dict)
        arguments = fields[3]
        if not all(arguments.get(name) is None or type(arguments[name]) is int for name in _WHOLE_NUMBERS):
            raise FormatError("unreadable arguments of a queue", queue=name, arguments=str(arguments)[:80])
        return cls(name, *fields)

    @classmethod
    def if_readable(cls, name: str, value: bytes | None) -> QueueDeclaration | None:
        """The stored declaration; None if there is none, or if it can't be read, so that no work stops for it."""
        return None if value is None else read_or(None, cls.decode, name, value)

    # Used for each message, hence cached.

    @cached_property
    def message_ttl_ms(self) -> int | None:
        """``x-message-ttl``; an old declaration's value out of range is read as the nearest value in range."""
        ttl_ms = self.arguments.get("x-message-ttl")
        return None if ttl_ms is None else min(max(ttl_ms, 0), LONGEST_MS)

    @cached_property
    def empties_itself(self) -> bool:
        """Whether it and its messages expire soon, as those of Celery's remote control and events do."""
        return self.expires_ms is not None and self._given("x-message-ttl", SOON_MS + 1) <= SOON_MS

    @cached_property
    def max_load(self) -> tuple[int | None, int | None]:
        """``x-max-length`` and ``x-max-length-bytes``."""
        return self.arguments.get("x-max-length"), self.arguments.get("x-max-length-bytes")

    @cached_property
    def max_priority(self) -> int:
        """``x-max-priority``; the highest priority if not set."""
        return int(self._given("x-max-priority", URGENT))

    @property
    def overflow(self) -> str:
        """``x-overflow``."""
        return str(self._given("x-overflow", "drop-head"))

    def delivery_limit(self, default: int | None) -> int | None:
        """``x-delivery-limit``; a negative one means no limit, as in RabbitMQ."""
        limit = self._given("x-delivery-limit", default)
        return None if limit is None or limit < 0 else limit

    @property
    def dead_letter_exchange(self) -> str | None:
        """``x-dead-letter-exchange``; "" is the default exchange."""
        return self._text("x-dead-letter-exchange")

    @property
    def dead_letter_routing_key(self) -> str | None:
        """``x-dead-letter-routing-key``; None if not set: the message's own applies."""
        return self._text("x-dead-letter-routing-key")

    def _text(self, argument: str) -> str | None:
        given = self.arguments.get(argument)
        return None if given is None else str(given)

    def _given(self, argument: str, default: Any) -> Any:
        given = self.arguments.get(argument)
        return default if given is None else given

    @property
    def expires_ms(self) -> int | None:
        """``x-expires``."""
        return self.arguments.get("x-expires")

    @property
    def can_vanish(self) -> bool:
        """Whether it is deleted when it becomes unused."""
        return self.auto_delete or self.exclusive or self.expires_ms is not None

    @property
    def single_active(self) -> bool:
        """Whether it serves one consumer at a time."""
        return bool(self.arguments.get("x-single-active-consumer"))


def _fields(value: bytes, *types: type) -> list[Any]:
    fields = decode_json(value)
    if not isinstance(fields, list) or [type(each) for each in fields] != [*types]:
        raise FormatError("unreadable declaration", value=value[:80])
    return fields


@dataclass(frozen=True, slots=True)
class _CachedExchange:
    epoch: bytes | None
    exchange: Exchange | None
    #: (routing key, queue)
    bindings: list[tuple[str, str]]
    #: Routing key -> the queues a message with it reaches.
    routes: dict[str, list[str]] = field(default_factory=dict)

    def route(self, routing_key: str) -> list[str]:
        """The queues a message reaches, each once."""
        kind = "direct" if self.exchange is None else self.exchange.type
        if kind == "fanout":
            routing_key = ""  # all keys reach the same queues
        queues = self.routes.get(routing_key)
        if queues is None:
            reached = (queue for key, queue in self.bindings if matches(kind, key, routing_key))
            if len(self.routes) >= MOST_ROUTES:
                self.routes.clear()
            queues = self.routes[routing_key] = list(dict.fromkeys(reached))
        return [*queues]


def _go_on(
    loaded: Mapping[str, _CachedExchange], tried: Mapping[tuple[str, str], list[str]]
) -> dict[tuple[str, str], list[str]]:
    """Where to try messages that reached no queue: by address, the exchanges so far, and the next one."""
    following = {}
    for address, names in tried.items():
        exchange = loaded[names[-1]].exchange
        alternate = None if exchange is None else exchange.alternate
        if alternate and alternate not in names:
            following[address] = [*names, alternate]
    return following


class RoutingTables:
    """One process's view. Thread-safe: entries are replaced whole."""

    def __init__(self, keys: Keyspace, clock: Clock) -> None:
        self._keys = keys
        self.clock = clock
        self._loaded: dict[str, _CachedExchange] = {}
        #: Until when each is valid, by the monotonic clock.
        self.declarations: dict[str, tuple[float, QueueDeclaration]] = {}
        self._controls: dict[str, tuple[float, QueueControl]] = {}

    # -- exchanges -------------------------------------------------------------------------------------------------

    def route(self, tr: Transaction, exchange: str, routing_key: str) -> list[str]:
        """The queues a message reaches, each once. Raises ``ExchangeNotFound``, and ``FormatError``.

        A message that reaches none continues to the alternate exchange, if that exists and has not been tried.
        """
        return self.routes(tr, [(exchange, routing_key)])[0]

    def routes(self, tr: Transaction, addresses: Sequence[tuple[str, str]]) -> list[list[str]]:
        """:meth:`route` for several exchanges and routing keys, in their order.

        One round trip if no exchange has changed, and another for each successive alternate exchange.
        """
        return [*map(self._routes(tr, dict.fromkeys(addresses)).__getitem__, addresses)]

    def _routes(self, tr: Transaction, addresses: Collection[tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
        names = {exchange: None for exchange, _ in addresses if exchange}
        loaded = self._load(tr, names)
        for name, each in loaded.items():
            if each.exchange is None:
                raise ExchangeNotFound(exchange=name, fix="Declare it before publishing to it")
        reached = {
            (exchange, routing_key): loaded[exchange].route(routing_key) if exchange else [routing_key]
            for exchange, routing_key in addresses
        }
        tried = {address: [address[0]] for address, queues in reached.items() if not queues}
        while tried := _go_on(loaded, tried):
            loaded = self._load(tr, [names[-1] for names in tried.values()])
            reached |= {address: loaded[names[-1]].route(address[1]) for address, names in tried.items()}
            tried = {address: names for address, names in tried.items() if not reached[address]}
        return reached

    def prepare(self, exchange: str, routing_key: str) -> None:
        """Match now, outside any transaction, what a publish will need, by the tables as last read."""
        loaded = self._loaded.get(exchange)
        if loaded is not None:
            loaded.route(routing_key)

    def _load(self, tr: Transaction, names: Iterable[str]) -> dict[str, _CachedExchange]:
        names = list(dict.fromkeys(names))
        epochs = tr.get_many([self._keys.epoch(name) for name in names]) if names else []
        return {name: self._load_one(tr, name, epoch) for name, epoch in zip(names, epochs, strict=True)}

    def _load_one(self, tr: Transaction, name: str, epoch: bytes | None) -> _CachedExchange:
        loaded = self._loaded.get(name)
        if loaded is None or loaded.epoch != epoch:
            if len(self._loaded) >= MOST_EXCHANGES:
                self._loaded.clear()
            exchange = self.read_exchange(tr, name)
            rows = self._keys.read(tr.get_range(*self._keys.bindings(name), snapshot=True), str, str, str)
            bindings = [(routing_key, queue) for (_exchange, queue, routing_key), _ in rows]
            loaded = self._loaded[name] = _CachedExchange(epoch, exchange, bindings)
        return loaded

    def read_exchange(self, tr: Transaction, name: str) -> Exchange | None:
        """Raises ``FormatError``."""
        value = tr.get(self._keys.exchange(name), snapshot=True)
        return PREDECLARED.get(name) if value is None else Exchange.decode(name, value)

    # -- queues ----------------------------------------------------------------------------------------------------

    def read_queue(self, tr: Transaction, name: str) -> QueueDeclaration | None:
        """Raises ``FormatError``."""
        value = tr.get(self._keys.queue(name), snapshot=True)
        return None if value is None else QueueDeclaration.decode(name, value)

    def forget_queue(self, name: str) -> None:
        """Have the declaration read again next time, as this process has changed it."""
        self.declarations.pop(name, None)
        self._controls.pop(name, None)

    def queue(self, tr: Transaction, name: str) -> QueueDeclaration:
        """The queue's declaration, up to a second old; without arguments if it is not declared."""
        return self.known(name) or self.queues(tr, [name])[name]

    def known(self, name: str) -> QueueDeclaration | None:
        """:meth:`queue` without a read; None if the cache lacks it."""
        known = self.declarations.get(name)
        return known[1] if known is not None and self.clock.monotonic() < known[0] else None

    def queues(self, tr: Transaction, names: Collection[str]) -> dict[str, QueueDeclaration]:
        """:meth:`queue` for several, in one round trip."""

        def read(asked: list[str]) -> list[QueueDeclaration]:
            values = tr.get_many([self._keys.queue(name) for name in asked], snapshot=True)
            return [
                QueueDeclaration.if_readable(*each) or QueueDeclaration(each[0])
                for each in zip(asked, values, strict=True)
            ]

        return self._believed(self.declarations, names, read)

    def controls(self, tr: Transaction, queues: Collection[str]) -> dict[str, QueueControl]:
        """The controls of these queues, cached as long as a declaration, and read in one round trip."""

        def read(asked: list[str]) -> list[QueueControl]:
            return [*map(control_of, tr.get_many([self._keys.control(queue) for queue in asked], snapshot=True))]

        return self._believed(self._controls, queues, read)

    def _believed(
        self, known: dict[str, tuple[float, V]], names: Collection[str], read: Callable[[list[str]], list[V]]
    ) -> dict[str, V]:
        now = self.clock.monotonic()
        found: dict[str, V] = {}
        asked: list[str] = []
        for name in names:
            each = known.get(name)
            if each is not None and now < each[0]:
                found[name] = each[1]
            else:
                asked.append(name)
        if asked:
            if len(known) >= MOST_DECLARATIONS:
                known.clear()
            for name, value in zip(asked, read(asked), strict=True):
                found[name] = value
                known[name] = now + DECLARATION_AGE_S, value
        return found
