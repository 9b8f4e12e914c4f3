"""The nouns of the queue, as values.

A **message** is a payload that the queue never looks into, with the few facts that the queue needs beside it. Stored,
it is a *record* (``keyspace/codec.py``) at one *place* in one of the ranges ready, delayed or leased. A **delivery** is
a message under a **lease**, and a lease belongs to a **session**: the consumer process that may settle it.

Durations end in ``_s`` (seconds) or ``_ms`` (milliseconds); moments in ``_ms`` are wall-clock milliseconds since 1970
UTC.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NewType, cast, get_args

#: A fairness key's longest UTF-8 form, in bytes.
LONGEST_KEY = 512
#: A queue's longest name in UTF-8, in bytes: AMQP's short string.
LONGEST_NAME = 255
#: A task id's longest UTF-8 form, in bytes.
LONGEST_TASK_ID = 255
#: The most urgent priority, as in AMQP; the least urgent is 0.
URGENT = 9
NO_PRIORITY = 0

#: The state of a message that rests in a queue, or is held.
State = Literal["ready", "delayed", "leased"]
#: 9 minus the priority, packed as one integer of a key: 1 or 2 bytes.
Rank = NewType("Rank", bytes)
#: Orders the messages of one rank: 10 bytes of the commit and 2 of its writer, without their code.
Stamp = NewType("Stamp", bytes)
#: Where a ready message stands in its queue, and a leased one stood: packed key if it has one, rank, code and stamp.
Place = NewType("Place", bytes)
#: A consumer process: 16 random bytes.
SessionId = NewType("SessionId", bytes)
#: No session: that of a reader, and of a message that is under no lease.
NO_SESSION = SessionId(b"")


class Publication(NamedTuple):
    """A message on its way in.

    ``due_ms``: not delivered before this moment; 0 for at once. ``ttl_ms``: dropped or dead-lettered when it has waited
    longer, counted from ``due_ms`` if that is later than now (Tarantool: a delay extends the time to live); None for
    never. ``expires_ms``: absolute counterpart that no delay extends; 0 for never.
    """

    exchange: str
    routing_key: str
    payload: bytes
    priority: int = NO_PRIORITY
    due_ms: int = 0
    ttl_ms: int | None = None
    expires_ms: int = 0
    #: Whose message it is, for fair scheduling; "" is a key of its own. See :data:`LONGEST_KEY`.
    key: str = ""
    #: Time to run: how long its consumer may take from the claim on; 0 for any time. The consumer's process enforces
    #: it.
    ttr_ms: int = 0
    #: The id by which the message can be found and cancelled; "" for none. See :data:`LONGEST_TASK_ID`.
    task_id: str = ""
    #: Publications with one id to one exchange and routing key count as one within the window
    #: (``engine/messages/publish.py``).
    dedup_id: str = ""
    dedup_window_ms: int = 0
    #: Likewise, for a publisher that may publish the same message again, whatever its dedup id: an outbox.
    once_id: str = ""
    once_window_ms: int = 0
    #: 16 unique bytes, if the publisher wants to know the id. Only for a message that reaches one queue.
    message_id: bytes = b""


class DeliveryInfo(NamedTuple):
    """As in kombu's ``delivery_info``: by which exchange and routing key a message came to the queue where it is."""

    exchange: str
    routing_key: str


class Lease(NamedTuple):
    """Proof of ownership: the session and the number of the claim inside it."""

    session: SessionId
    number: int


class ClaimTerms(NamedTuple):
    """The terms of a claim. ``no_ack``: queues whose messages are taken without a lease, at most once.

    ``acks`` are settled in the same transaction. ``consumers``: the tag of the consumer by queue; a queue with
    ``x-single-active-consumer`` serves one of them. ``first``: the number that was reserved for the first lease, for a
    caller that may have to recover this claim. ``gives_way``: the claim raises ``Outrun`` if others are in a wait queue
    for the same queues, or one was faster. ``stands``: whether its caller still wants it, asked before each commit with
    those of the queues that have a single active consumer; it raises ``Outrun`` if not.
    """

    no_ack: Collection[str] = ()
    acks: Sequence[Lease] = ()
    consumers: Mapping[str, str] = {}
    first: int | None = None
    gives_way: bool = False
    stands: Callable[[Collection[str]], bool] = lambda _: True


class Demand(NamedTuple):
    """What a consumer waits for in a wait queue (``engine/scheduling/wait_queue.py``).

    ``wait_queue``: 16 bytes, the same for all consumers of the same queues. ``first``: the number of its first lease,
    which no other demand of the session has; ``want``: how many messages at most.
    """

    wait_queue: bytes
    session: SessionId
    first: int
    want: int


class Delivery(NamedTuple):
    """A claimed message."""

    lease: Lease
    queue: str
    payload: bytes
    message_id: bytes
    #: How often it was handed out before, and came back.
    redeliveries: int
    deaths: tuple[Death, ...]
    key: str = ""
    ttr_ms: int = 0
    #: Whether it is under its lease; for a consumer without acks, the claim may have deleted the message.
    leased: bool = True
    #: None: as it was published.
    delivery_info: DeliveryInfo | None = None
    #: Whether a consumer has had it before, counted or not.
    seen: bool = False


class Peeked(NamedTuple):
    """A message seen in the store, without being taken. It may be elsewhere by now.

    ``state``: ready, delayed or leased; ``owner``: the session that holds a leased one; ``expires_ms``: 0 for never;
    ``published_ms``: since when it waits; for one that was delayed, the moment it was due; ``due_ms``: for one that is
    still delayed.
    """

    message_id: bytes
    queue: str
    state: State
    payload: bytes
    key: str
    redeliveries: int
    published_ms: int
    expires_ms: int
    deaths: tuple[Death, ...]
    owner: SessionId = NO_SESSION
    task_id: str = ""
    priority: int = NO_PRIORITY
    due_ms: int = 0


class Spot(NamedTuple):
    """Where a page has shown a message. A caller that goes there finds that message, or none.

    ``state``: ready, delayed or leased; ``position``: opaque.
    """

    state: State
    position: bytes
    message_id: bytes

    def __str__(self) -> str:
        """For a URL or a form: words, digits and dots."""
        return f"{self.state}.{self.position.hex()}.{self.message_id.hex()}"

    @classmethod
    def parse(cls, token: str) -> Spot:
        """Reads what ``str`` has made. Raises ``ValueError``."""
        state, position, message_id = token.split(".")
        if state not in get_args(State):
            raise ValueError(state)
        return cls(cast("State", state), bytes.fromhex(position), bytes.fromhex(message_id))


class Listed(NamedTuple):
    """A message on a page. ``message.payload`` may be its beginning only; ``size`` is all of it, in bytes.

    ``position``: where it stands in its state, opaque. ``due_ms``: for a delayed one, else 0.
    """

    position: bytes
    message: Peeked
    size: int
    priority: int
    due_ms: int

    @property
    def spot(self) -> Spot:
        """The spot at which it is looked at, deleted or replayed."""
        return Spot(self.message.state, self.position, self.message.message_id)


class View(NamedTuple):
    """Which messages of a queue to page through. ``state``: ready, delayed or leased. ``key``: ready ones of this key.

    ``after``: the position behind which the page begins, b"" for the first one; ``reverse``: from the end.
    """

    state: State
    key: str | None = None
    after: bytes = b""
    reverse: bool = False


class Page(NamedTuple):
    """Some messages, and the position behind which the next page begins; None if this is the last one."""

    messages: list[Listed]
    following: bytes | None


class Part(NamedTuple):
    """What one transaction of a long verb did to ``number`` messages, and the mark to go on with; None at the end."""

    number: int
    following: bytes | None


class RoundSnapshot(NamedTuple):
    """A fair queue as queue-by shows it: the rest of the current round, and what waits after it, by key."""

    round: list[Peeked]
    queues: dict[str, list[Peeked]]


@dataclass(frozen=True, slots=True)
class Death:
    """One ``x-death`` entry (https://www.rabbitmq.com/docs/dlx#effects).

    ``exchange``, ``routing_keys``: by which the message had come to the queue when it died there for the first time.
    ``time_ms``: the last time; ``since_ms``: the first time, 0 if that is the same. ``first``: whether its very first
    death was one of these.
    """

    queue: str
    reason: str
    count: int
    time_ms: int
    exchange: str = ""
    routing_keys: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    first: bool = False
    since_ms: int = 0


#: The endings of the names of queues by which Celery's workers are controlled remotely, and of those for the replies.
CONTROL = ".celery.pidbox"


def is_internal(queue: str) -> bool:
    """Whether Kombu or Celery made the queue for itself: for remote control, its replies, events."""
    return queue.endswith(".pidbox") or queue.startswith("celeryev.")


def controlled_worker(queue: str) -> str:
    """The Celery worker that is controlled through the queue; "" for any other queue."""
    name = queue.removesuffix(CONTROL)
    return name if name != queue and "@" in name else ""


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """How many messages of a queue are in which state; ``ready_bytes``: the payloads of the ready ones.

    ``newer``: written by a newer version, and kept for it by a process that could not read them.
    """

    ready: int = 0
    delayed: int = 0
    leased: int = 0
    ready_bytes: int = 0
    newer: int = 0


#: The least value of each limit that counts something.
LEAST_LIMITS = {"weight": 1, "max_in_flight": 1, "burst": 1, "capacity": 0}
#: When a key that had no messages may get its turn: see :class:`QueueControl`.
NEWCOMERS = ("next", "current", "first")


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of one key of a queue; the defaults limit nothing.

    ``weight``: messages per turn. ``max_in_flight``: how many may be leased at a time (1 is Tarantool's utube).
    ``rate``: messages per second over all consumers, with a burst of ``burst``. ``capacity``: ready messages, beyond
    which publishing to the key is refused. ``priority``: of the whole key, instead of its messages' own.
    """

    paused: bool = False
    weight: int = 1
    max_in_flight: int | None = None
    rate: float | None = None
    burst: int = 1
    capacity: int | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class QueueControl:
    """How a queue is worked on. ``every_key`` holds for keys without limits of their own.

    ``newcomer``: when a key that had no messages gets its turn: after the ``next`` round (queue-by's order), in the
    ``current`` one, or ``first`` of all. ``ageing``: so many seconds of waiting count as one priority
    (``x-fair-ageing``, there in milliseconds); None for strict priority.
    """

    paused: bool = False
    newcomer: str = "next"
    every_key: KeyLimits = KeyLimits()
    #: Whether some key has limits of its own.
    limited: bool = False
    ageing: float | None = None
    #: The queue's ``x-single-active-consumer`` and ``x-consumer-timeout`` (0: none), for its claims.
    single_active: bool = False
    consumer_timeout_ms: int = 0

    @property
    def limits_keys(self) -> bool:
        """If not, no key is parked, or its bell is rung anyway: by the removal of the limits (``limit_changes.py``)."""
        return self.limited or self.every_key != KeyLimits()


@dataclass(frozen=True, slots=True)
class KeyCounts:
    """One key of a queue: its messages and whether it is limited.

    ``ready``: messages without a key are not counted; of all that are ready, they are those that no key has.
    """

    ready: int = 0
    leased: int = 0
    limits: KeyLimits | None = None


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """What to know of a queue besides its counters.

    ``oldest_ms``: since when the oldest ready message waits; None if there is none.
    ``can_vanish``: it is deleted when it is unused.
    """

    declared: bool
    arguments: dict[str, Any]
    control: QueueControl
    oldest_ms: int | None
    can_vanish: bool = False


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """A consumer process. ``beat``: changes with each heartbeat. ``open``: false once it was fenced or has closed.

    ``description``: host, pid and program, as it gave them. ``consumed``: the queues it consumes or waits for, as of
    that beat. ``held``: its messages, if they were counted. ``beat_ms``: the beat by its own wall clock, which may be
    wrong; 0 if the beat has none. ``is_internal``: it has no message and consumes nothing of the application, but reads
    replies or events of Celery's, as a dashboard does. So does a process until its second beat.
    """

    session_id: SessionId
    description: dict[str, Any]
    beat: bytes
    ttl_s: float
    open: bool
    consumed: list[str]
    held: int | None = None
    beat_ms: int = 0
    is_internal: bool = False

    @property
    def id(self) -> str:
        return self.session_id.hex()

    @property
    def host(self) -> str:
        return str(self.description.get("host", ""))

    @property
    def pid(self) -> int | None:
        return self.description.get("pid")

    @property
    def program(self) -> str:
        return str(self.description.get("program", ""))

    def state(self, quiet_s: float | None) -> str:
        """alive, ended, or silent: no heartbeat for longer than its time to live, so others get its messages."""
        if not self.open:
            return "ended"
        return "silent" if (quiet_s or 0.0) > self.ttl_s else "alive"


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """Everything about a message at rest except its position: what it takes to store it elsewhere.

    ``state``: ready or delayed. ``keyed``: it waits among the messages of its key; a dead letter has a key and does
    not. ``unreadable``: ``payload`` is the bytes of a record that can't be read, and the facts that follow it mean
    nothing.
    """

    queue: str
    state: State
    payload: bytes
    priority: int
    due_ms: int = 0
    key: str = ""
    keyed: bool = False
    message_id: bytes = b""
    published_ms: int = 0
    expires_ms: int = 0
    redeliveries: int = 0
    ttr_ms: int = 0
    task_id: str = ""
    deaths: tuple[Death, ...] = ()
    #: For a dead letter: the priority that it had before.
    priority_before: int = NO_PRIORITY
    unreadable: bool = False
    #: The delivery info, by its name in dumps.
    way: DeliveryInfo | None = None
    seen: bool = False
