"""An overview of a broker: its queues, keys and sessions as plain data. Also, which host names a request may use.

Host names: the check protects pages and metrics from DNS rebinding. If another site points its name at this machine, a
browser still sends that site's name, and the request is refused. IP addresses are accepted: only a name can be pointed
elsewhere.

The command line, the metrics and the pages use the overview.

Numbers come from the store's counters and never from a scan: what it costs grows with the number of queues, not with
their messages, and is bounded in the number of keys. The parts are read in transactions of their own, so they may be
some milliseconds apart; each number by itself is exact.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from itertools import islice
from typing import Any, get_args

from kombu_fdb import Broker
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.engine.metrics.totals import OTHERS
from kombu_fdb.errors import QueueNotFound
from kombu_fdb.model import KeyCounts, QueueCounts, QueueFacts, SessionFacts, State, is_internal
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.masking import masked

# -- hosts -------------------------------------------------------------------------------------------------------------


#: The names by which a browser on this machine calls it.
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def is_ours(host: str, names: Collection[str]) -> bool:
    """Whether the header ``Host`` is ours. ``names``: without ports, in small letters."""
    head, _, port = host.lower().rpartition(":")
    name = head if head and port.isdigit() else host.lower()
    try:
        return name in names or bool(ip_address(name.removeprefix("[").removesuffix("]")))
    except ValueError:
        return False


# -- the overview ------------------------------------------------------------------------------------------------------


#: The states of a message, and what pages, commands and metrics count of a queue.
STATES: tuple[State, ...] = get_args(State)
COUNTED = (*STATES, "dead")
#: Keys of one queue that are read to find its longest, and at once.
KEYS_READ = 10_000
KEYS_PER_LOOK = 1_000


@dataclass(frozen=True, slots=True)
class QueueView:
    """One queue. ``dead``: messages in ``<queue>.dead``, which is a queue of its own with this one as its ``dead_of``.

    ``oldest_age_s``: seconds since the oldest ready message was published or due, None without one; in a queue with
    very many keys, of the oldest among the keys next in turn. ``ready_bytes``: payloads of the ready messages.
    ``keys``: the longest ones; "" is the key of messages without one. ``keys`` and ``key_totals`` are empty unless they
    were asked for.
    """

    name: str
    ready: int = 0
    delayed: int = 0
    leased: int = 0
    dead: int = 0
    oldest_age_s: float | None = None
    paused: bool = False
    declared: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    dead_of: str | None = None
    #: How many sessions consume it.
    consumers: int = 0
    #: Messages ever, by event: published, claimed, acked, returned, dead, conflicts
    #: (``kombu_fdb/engine/metrics/totals.py``).
    totals: dict[str, int] = field(default_factory=dict)
    #: Whether the queue vanishes by itself when it is unused, as reply queues do.
    passing: bool = False
    ready_bytes: int = 0
    #: Messages that an older worker, which can't read them, keeps for a newer one.
    newer: int = 0
    keys: dict[str, KeyCounts] = field(default_factory=dict)
    #: ``totals`` by key, of the busiest keys; "" for its others together (``kombu_fdb/engine/metrics/totals.py``).
    key_totals: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def is_internal(self) -> bool:
        """Whether the queue is Celery's own: remote control, its replies, events."""
        return is_internal(self.name)


@dataclass(frozen=True, slots=True)
class Overview:
    """``taken_ms``: wall clock, milliseconds since 1970. ``broker``: where, with secrets masked."""

    taken_ms: int
    broker: str
    queues: list[QueueView]
    sessions: list[SessionFacts]
    #: Settlements that came too late, of any queue.
    late_settlements: int = 0
    #: Failing background jobs, each with its duty, subject, error, times and since_ms.
    asides: list[dict[str, Any]] = field(default_factory=list)
    #: What is still counted of queues that are gone: an undeclared one comes and goes with its messages.
    gone: list[QueueView] = field(default_factory=list)

    @property
    def live_queues(self) -> list[QueueView]:
        """All queues but those of dead letters, which are counted in the ``dead`` of the others."""
        return [queue for queue in self.queues if queue.dead_of is None]

    @property
    def own_queues(self) -> list[QueueView]:
        """The application's queues, the longest first, without those that Celery makes for itself."""
        return sorted((q for q in self.live_queues if not q.is_internal), key=lambda q: (-q.ready, q.name))

    def total(self, field_name: str) -> int:
        """The sum of a field over :attr:`own_queues`."""
        return sum(getattr(queue, field_name) for queue in self.own_queues)

    def heard_s(self, session: SessionFacts) -> float | None:
        """Seconds since a session's last heartbeat, by its own clock and ours; None if it sent no time."""
        return max(0.0, (self.taken_ms - session.beat_ms) / 1000) if session.beat_ms else None

    def rates(self, before: Overview) -> dict[str, dict[str, float]]:
        """Messages a second since an earlier look, by queue and event of :attr:`QueueView.totals`.

        ``growth`` is that of the waiting messages, ready or delayed; negative when they become fewer. Empty if no time
        has passed between the looks.
        """
        seconds = (self.taken_ms - before.taken_ms) / 1000
        if seconds <= 0:
            return {}
        was = {queue.name: queue for queue in [*before.queues, *before.gone]}
        found = {}
        for now in self.queues:
            old = was.get(now.name, QueueView(now.name))
            growth = now.ready + now.delayed - old.ready - old.delayed
            found[now.name] = {**_speeds(old.totals, now.totals, seconds), "growth": growth / seconds}
        return found

    def key_rates(self, before: Overview) -> dict[str, dict[str, dict[str, float]]]:
        """The same by queue, key and event of :attr:`QueueView.key_totals`; "" is for the others."""
        seconds = (self.taken_ms - before.taken_ms) / 1000
        if seconds <= 0:
            return {}
        was = {queue.name: queue.key_totals for queue in [*before.queues, *before.gone]}
        return {
            queue.name: {
                key: _speeds(was.get(queue.name, {}).get(key, {}), events, seconds)
                for key, events in queue.key_totals.items()
            }
            for queue in self.queues
            if queue.key_totals
        }

    def as_json(self) -> dict[str, Any]:
        """The overview as dicts, lists, strings and numbers; secrets in queue arguments are masked."""
        document = dataclasses.asdict(self)
        del document["gone"]
        document["sessions"] = [_session_as_json(each) for each in self.sessions]
        for queue in document["queues"]:
            queue["arguments"] = {name: masked(name, value) for name, value in queue["arguments"].items()}
            queue["keys"] = [key_as_json(key, counts) for key, counts in queue["keys"].items()]
        return document


def _session_as_json(session: SessionFacts) -> dict[str, Any]:
    """A session as JSON has it. ``beat`` changes with every heartbeat, and is not a time."""
    return {
        **{name: getattr(session, name) for name in ("id", "host", "pid", "program", "ttl_s", "open")},
        "beat": session.beat[:10].hex(),
        "queues": session.consumed,
        "leased": session.held,
        "beat_ms": session.beat_ms,
    }


def key_as_json(key: str, counts: dict[str, Any]) -> dict[str, Any]:
    """``counts``: the fields of its ``KeyCounts``."""
    return {"key": key, **counts, **({} if key else {"ready": None})}


def _speeds(before: Mapping[str, int], after: Mapping[str, int], seconds: float) -> dict[str, float]:
    # Totals restart when a queue is deleted, or when a key is folded into the others.
    return {event: max(0, number - before.get(event, 0)) / seconds for event, number in after.items()}


def look(broker: Broker, *, queues: Collection[str] | None = None, top_keys: int = 0, held: bool = False) -> Overview:
    """Read the overview. ``queues``: only these. ``top_keys``: with so many of each queue's longest keys, and totals.

    ``held``: count each session's messages, one by one. Raises ``QueueNotFound`` for a name in ``queues`` that is
    neither declared nor holds anything, and ``StoreUnavailable``.
    """
    now_ms = Clock().wall_ms()
    counts = broker.queues()
    for name in list(counts):
        if name.endswith(DEAD_SUFFIX):  # its queue may be empty and undeclared by now
            counts.setdefault(name.removesuffix(DEAD_SUFFIX), QueueCounts())
    names = sorted(counts) if queues is None else list(queues)
    for name in names:
        if name not in counts:
            raise QueueNotFound(queue=name, fix="Run `queues` to list the queues.")
    facts, totals = broker.inspect.facts(names), broker.inspect.totals()
    known = broker.inspect.sessions(held=held)
    sessions = [each for each in known if not each.is_internal]
    consumers = Counter(queue for each in known if each.open for queue in each.consumed)
    by_key = broker.inspect.key_totals() if top_keys else {}
    views = [
        _queue(
            name,
            counts,
            facts[name],
            now_ms,
            totals=totals.get(name, {}),
            consumers=consumers[name],
            keys=look_at_keys(broker, name, top=top_keys) if top_keys else {},
            key_totals=by_key.get(name, {}),
        )
        for name in names
    ]
    asides = [each._asdict() for each in broker.inspect.set_aside()]
    late = totals.pop(OTHERS, {}).get("late", 0)
    gone = [
        QueueView(name, totals=events, key_totals=by_key.get(name, {}))
        for name, events in totals.items()
        if name not in counts
    ]
    return Overview(now_ms, str(broker.location), views, sessions, late, asides, gone)


def _queue(name: str, counts: Mapping[str, QueueCounts], facts: QueueFacts, now_ms: int, **besides: Any) -> QueueView:
    """The view of a queue. ``besides``: the fields that are neither in counts nor in facts."""
    own, dead = counts[name], counts.get(name + DEAD_SUFFIX, QueueCounts())
    is_dead = name.endswith(DEAD_SUFFIX)
    age_s = None if facts.oldest_ms is None or not own.ready else max(now_ms - facts.oldest_ms, 0) / 1000
    return QueueView(
        name,
        ready=own.ready,
        delayed=own.delayed,
        leased=own.leased,
        dead=dead.ready,
        oldest_age_s=age_s,
        paused=facts.control.paused,
        declared=facts.declared,
        arguments=facts.arguments,
        dead_of=name.removesuffix(DEAD_SUFFIX) if is_dead else None,
        passing=facts.can_vanish,
        ready_bytes=own.ready_bytes,
        newer=own.newer,
        **besides,
    )


def look_at_keys(broker: Broker, queue: str, *, top: int | None = None) -> dict[str, KeyCounts]:
    """A queue's keys, the longest first. ``top``: how many, found among the first :data:`KEYS_READ` by name."""
    found: dict[str, KeyCounts] = {}
    after: str | None = None
    keys = partial(broker.queue(queue).keys, limit=KEYS_PER_LOOK)
    while (top is None or len(found) < KEYS_READ) and (page := keys(after=after)):
        found |= page
        after = next(reversed(page))
    most = len(found) if top is None else top
    return dict(heapq.nsmallest(most, found.items(), key=lambda each: (-each[1].ready, -each[1].leased, each[0])))


def find_keys(
    broker: Broker, queue: str, limit: int, *, prefix: str = "", after: str | None = None
) -> tuple[dict[str, KeyCounts], str | None]:
    """Up to ``limit`` keys with messages or limits, and the key behind which the next page begins; None at the end."""
    found = broker.queue(queue).keys(after=after, limit=limit + 1, prefix=prefix)
    shown = dict(islice(found.items(), limit))
    return shown, next(reversed(shown)) if len(found) > limit else None
