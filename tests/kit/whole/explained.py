"""Which rows may exist, given what is declared, who lives, and which messages there are.

Guarantee: after any crash, the duties reach a state in which no row exists that nothing declared refers to. A rule for
each tag of ``keyspace/layout.py`` says what a row refers to; the messages are what refers to all others. Declared are
queues, exchanges, bindings, limits and imports that are not done: they are there because a client has said so, and go
when a client says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.engine.scheduling.fair import tenant_of
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import Message, Record, decode_count
from kombu_fdb.keyspace.layout import Keyspace, has_key, range_of, split_place
from kombu_fdb.model import Rank, SessionId
from kombu_fdb.routing.tables import PREDECLARED, QueueDeclaration
from kombu_fdb.store.protocol import KeyValue

Elements = tuple[Any, ...]


def unexplained(engine: Engine, live: Collection[SessionId]) -> list[str]:
    """The rows that nothing explains, in words.

    ``live``: the sessions whose processes do, ``engine`` being of one of them.
    """
    world = _World(engine, live)
    return [
        f"{world.keys.unpack(key)!r} = {value[:60]!r}" for key, value in world.rows if not world.explains(key, value)
    ]


class _World:
    """What there is."""

    def __init__(self, engine: Engine, live: Collection[SessionId]) -> None:
        self.keys: Keyspace = engine.keys
        self.live = set(live)
        self.token_key = engine.transactions.retry.token_key
        self.now_ms = engine.transactions.now()
        self.rows: list[KeyValue] = engine.upkeep.rows(range_of(self.keys.prefix))
        self.has = {key for key, _ in self.rows}
        self.by_tag: dict[str, list[tuple[Elements, bytes, bytes]]] = {}
        for key, value in self.rows:
            tag, *elements = self.keys.unpack(key)
            self.by_tag.setdefault(str(tag), []).append((tuple(elements), key, value))
        self.declared = {str(name): QueueDeclaration.decode(str(name), value) for (name,), _, value in self.of("queue")}
        self.exchanges = {str(name) for (name,), _, _ in self.of("exchange")} | set(PREDECLARED)
        #: Queue and key of each ready message, and of each that is held and counted among those of its key.
        self.waiting: Counter[tuple[str, str]] = Counter()
        self.held: Counter[tuple[str, str]] = Counter()
        self.ranks: set[tuple[str, str, Rank]] = set()
        self.queues = set(self.declared)
        self.ids: set[bytes] = set()
        self.tasks: set[str] = set()
        self._note_messages()

    def of(self, tag: str) -> list[tuple[Elements, bytes, bytes]]:
        return self.by_tag.get(tag, [])

    def explains(self, key: bytes, value: bytes) -> bool:
        tag, *elements = self.keys.unpack(key)
        rule = RULES.get(str(tag))
        return rule is not None and rule(self, tuple(elements), key, value)

    def _note_messages(self) -> None:
        for tag in ("ready", "keyed"):
            for (queue, *_), key, record in self.of(tag):
                fair_key, rank = split_place(self.keys.place(queue, key))
                self.ranks.add((queue, fair_key, rank))
                self.waiting[queue, fair_key] += tag == "keyed"
                self._note(queue, record)
        for (queue, *_), _, record in self.of("delayed"):
            self._note(queue, record)
        for (session, _number), _, lease in self.of("lease"):
            queue, place, record = Message.of_lease(lease)
            self.held[queue, split_place(place)[0]] += has_key(place)
            if session in self.live:
                self._note(queue, record)
        for (_kind, _version, queue, *_), _, record in self.of("newer"):
            self._note(queue, record)

    def _note(self, queue: str, record: bytes) -> None:
        self.queues.add(queue)
        try:
            self.ids.add(Record.outline(record).message_id)
            self.tasks.add(Record.known(record).task_id)
        except FormatError:
            return

    # -- what rules ask ------------------------------------------------------------------------------------------------

    def stays(self, queue: str) -> bool:
        """Whether messages may wait there."""
        return queue in self.declared or queue.endswith(DEAD_SUFFIX)

    def has_limits(self, queue: str, key: str) -> bool:
        return self.keys.limits(queue, key) in self.has or self.keys.control(queue) in self.has


_Rule = Callable[[_World, Elements, bytes, bytes], bool]


def _always(_world: _World, _of: Elements, _key: bytes, _value: bytes) -> bool:
    """One row for the store, or a fixed number of them; or a declaration."""
    return True


def _never(_world: _World, _of: Elements, _key: bytes, _value: bytes) -> bool:
    """A step of something that has come to its end by now."""
    return False


def _waits(world: _World, of: Elements, _key: bytes, _value: bytes) -> bool:
    return world.stays(of[0])


def _token(world: _World, of: Elements, key: bytes, _value: bytes) -> bool:
    assert world.token_key is not None
    return key == world.token_key(of[1])


def _turns(world: _World, of: Elements, _key: bytes, _value: bytes) -> bool:
    queue, rank, tenant = of
    return any(
        kind == "ring" and (each, of_ring) == (queue, rank) and tenant_of(more[-1]) == tenant
        for (each, kind, of_ring, *more), _, _ in world.of("todo")
    )


def _of_queue(world: _World, of: Elements, _key: bytes, _value: bytes) -> bool:
    """Of a queue that is declared, or of which a session holds a message; "" is no queue."""
    return of[0] in world.queues or not of[0]


def _bell(world: _World, of: Elements, _key: bytes, _value: bytes) -> bool:
    """Also of a queue that is gone, if it has dead letters."""
    return of[0] in world.queues or f"{of[0]}{DEAD_SUFFIX}" in world.queues


def _of_declared(world: _World, of: Elements, _key: bytes, _value: bytes) -> bool:
    return of[0] in world.declared


def _of_live(world: _World, of: Elements, _key: bytes, _value: bytes) -> bool:
    return of[0] in world.live


def _by_live(world: _World, _of: Elements, _key: bytes, value: bytes) -> bool:
    """The value begins with a session."""
    return value[:16] in world.live


def _todo(world: _World, of: Elements, key: bytes, _value: bytes) -> bool:
    queue, kind, *rest = of
    if kind == "ring":
        *_, fair_key = rest
        return (queue, fair_key) in {(each, named) for each, named, _ in world.ranks}
    fair_key = rest[1] if kind == "door" else rest[0]
    if kind == "freed" and world.keys.fair(queue) not in world.has:
        return queue not in world.declared  # else no claim ever looks
    return (queue, fair_key) in {(each, named) for each, named, _ in world.ranks}


def _active(world: _World, of: Elements, key: bytes, _value: bytes) -> bool:
    queue, fair_key, _ = of
    return (queue, fair_key, world.keys.active_rank(queue, fair_key, key)) in world.ranks


def _flight(world: _World, of: Elements, _key: bytes, value: bytes) -> bool:
    return 0 < world.held[of[0], of[1]] == decode_count(value)


def _backlog(world: _World, of: Elements, _key: bytes, value: bytes) -> bool:
    return 0 < world.waiting[of[0], of[1]] == decode_count(value)


def _bucket(world: _World, of: Elements, _key: bytes, _value: bytes) -> bool:
    return of[0] in world.declared and world.has_limits(of[0], of[1])


def _thaw(world: _World, of: Elements, _key: bytes, _value: bytes) -> bool:
    _due_ms, queue, fair_key = of
    return (queue, fair_key) in {(each, named) for each, named, _ in world.ranks}


def _task(world: _World, of: Elements, _key: bytes, _value: bytes) -> bool:
    return of[0] in world.tasks


def _dedup(world: _World, of: Elements, key: bytes, _value: bytes) -> bool:
    return any(world.keys.dedup_of(end) == key for _, end, _ in world.of("dedup_end"))


def _dedup_end(world: _World, of: Elements, key: bytes, _value: bytes) -> bool:
    return world.keys.dedup_of(key) in world.has and of[0] > world.now_ms - 24 * 3600 * 1000


def _imported(world: _World, of: Elements, _key: bytes, _value: bytes) -> bool:
    """An import that is not done stays: to run it again stores what is missing, whenever that is."""
    return world.keys.import_(of[0]) not in world.has


def _body(world: _World, of: Elements, _key: bytes, _value: bytes) -> bool:
    return of[0] in world.ids


def _waiting(world: _World, of: Elements, _key: bytes, _value: bytes) -> bool:
    return any(queue == of[0] for (queue, *_), _, _ in world.of("delayed"))


def _line(world: _World, of: Elements, _key: bytes, value: bytes) -> bool:
    return value[:16] in world.live


def _exchange_of(world: _World, of: Elements, _key: bytes, _value: bytes) -> bool:
    return of[0] in world.exchanges


def _binding(world: _World, of: Elements, _key: bytes, _value: bytes) -> bool:
    exchange, queue, routing_key = of
    twin = world.keys.bound(queue, exchange, routing_key)
    return exchange in world.exchanges and queue in world.declared and twin in world.has


def _bound(world: _World, of: Elements, _key: bytes, _value: bytes) -> bool:
    queue, exchange, routing_key = of
    return world.keys.binding(exchange, queue, routing_key) in world.has


def _expiring(world: _World, of: Elements, _key: bytes, _value: bytes) -> bool:
    return of[0] in world.declared and "x-expires" in world.declared[of[0]].arguments


def _consumer(world: _World, of: Elements, _key: bytes, _value: bytes) -> bool:
    return of[0] in world.declared and of[1] in world.live


def _single(world: _World, of: Elements, _key: bytes, value: bytes) -> bool:
    return of[0] in world.declared and (len(value) < 16 or value[:16] in world.live)


def _lease(world: _World, of: Elements, _key: bytes, _value: bytes) -> bool:
    return of[0] in world.live


#: By tag.
RULES: dict[str, _Rule] = {
    "format": _always,
    "ready": _waits,
    "keyed": _waits,
    "delayed": _waits,
    "fair": _of_queue,
    "todo": _todo,
    "active": _active,
    "round": _of_queue,
    "turns": _turns,
    "flight": _flight,
    "backlog": _backlog,
    "limits": _of_declared,
    "control": _of_declared,
    "bucket": _bucket,
    "thaw": _thaw,
    "relimit": _never,
    "lease": _lease,
    "task": _task,
    "dedup": _dedup,
    "dedup_end": _dedup_end,
    "import": _always,
    "imported": _imported,
    "body": _body,
    "copy": _never,
    "count": _of_queue,
    "total": _of_queue,
    "key_total": _of_queue,
    "sample": _always,
    "bell": _bell,
    "waiting": _waiting,
    "alarm": _always,
    "session": _of_live,
    "beat": _of_live,
    "role": _by_live,
    "line": _line,
    "demand": _of_live,
    "served": _by_live,
    "exchange": _always,
    "binding": _binding,
    "bound": _bound,
    "queue": _always,
    "expiring": _expiring,
    "deleting": _never,
    "consumer": _consumer,
    "single": _single,
    "epoch": _exchange_of,
    "token": _token,
    "aside": _never,
    "newer": _waits,
}
