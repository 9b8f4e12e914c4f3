"""Every key of the store, in one table. ``docs/keyspace.md`` is this page for readers.

All keys are tuples (``tuples.py``) under one namespace, ``("celery-fdb", namespace)``.

================================================== ============================================ =====================
key                                                value                                        written by
================================================== ============================================ =====================
``("format",)``                                    format version                               first open
``("ready", queue, rank, stamp)``                  record                                       publish, promote, release, sweep; cleared by claim
``("delayed", queue, due_ms, rank, stamp)``        record                                       publish, release; cleared by promote
``("lease", session, number)``                     queue, place, record                         claim; cleared by ack, release, sweep
``("body", message_id, chunk)``                    a piece of a large payload                   publish; cleared with the message
``("count", queue, state)``                        number of messages, atomic add               every verb
``("bell", queue)``                                versionstamp; watched by idle consumers      whoever makes a message ready
``("waiting", queue)``                             "": the queue has delayed messages           publish, release; cleared by promote
``("alarm",)``                                     versionstamp; watched by the promoter        whoever delays a message
``("session", session)``                           who it is; absent once fenced                session; cleared by sweep
``("beat", session)``                              versionstamp of the last heartbeat           session
``("role", role)``                                 session that holds it, versionstamp          promoter
``("exchange", name)``                             type, properties                             declare
``("binding", exchange, queue, routing_key)``      arguments                                    bind
``("bound", queue, exchange, routing_key)``        "": the same bindings by queue               bind
``("queue", name)``                                properties, arguments                        declare
``("expiring", queue)``                            versionstamp of the last use                 declare, get, consume
``("consumer", queue, session, tag)``              ""                                           consume on queues that can vanish
``("epoch", exchange)``                            versionstamp of its last change              declare, bind, unbind, delete
``("token", client, slot)``                        commit token (``store/retry.py``)            every writing transaction
================================================== ============================================ =====================

``rank`` is 9 minus the priority, so the most urgent sorts first; inside a rank the stamp is commit order. ``rank`` and
``stamp`` together are a message's *place*; a requeued message goes back to it.
"""

from __future__ import annotations

from functools import lru_cache

from kombu_fdb.keyspace.tuples import STAMP_CODE, STAMP_LENGTH, pack, pack_int, range_of, unpack
from kombu_fdb.model import URGENT

__all__ = ["FORMAT_VERSION", "Keyspace", "Range"]

#: Raised by one whenever a key or a value changes its meaning.
FORMAT_VERSION = 1

Range = tuple[bytes, bytes]

#: Ranks are one packed integer each.
_RANKS = [pack_int(URGENT - priority) for priority in range(URGENT + 1)]


class Keyspace:
    """Makes the keys of one namespace. Prefixes of queues are cached; joining a suffix is one concatenation."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.prefix = pack("celery-fdb", namespace)
        self.format = self._key("format")
        self.alarm = self._key("alarm")
        self.ready = lru_cache(4096)(self._ready)
        self.bell = lru_cache(4096)(self._bell)
        self.count = lru_cache(16384)(self._count)
        self.waiting = lru_cache(4096)(self._waiting)
        self.epoch = lru_cache(1024)(self._epoch)

    def _key(self, tag: str, *rest: str | bytes | int) -> bytes:
        return self.prefix + pack(tag, *rest)

    # -- messages ------------------------------------------------------------------------------------------------

    def _ready(self, queue: str) -> bytes:
        """Prefix; append a place."""
        return self._key("ready", queue)

    @staticmethod
    def rank(priority: int) -> bytes:
        """The first half of a place. ``priority`` 0 to 9."""
        return _RANKS[priority]

    @staticmethod
    def user_version(number: int) -> bytes:
        """The last 2 bytes of a stamp, which order the messages of one transaction."""
        return number.to_bytes(2, "big")

    def ready_prefix(self, queue: str, priority: int) -> bytes:
        """Followed by a stamp: where a new message goes. Includes the stamp's code."""
        return self.ready(queue) + _RANKS[priority] + STAMP_CODE

    def delayed(self, queue: str) -> bytes:
        """Prefix; append due_ms, rank and stamp."""
        return self._key("delayed", queue)

    def delayed_prefix(self, queue: str, due_ms: int, rank: bytes) -> bytes:
        """Followed by a stamp. Includes the stamp's code."""
        return self.delayed(queue) + pack_int(due_ms) + rank + STAMP_CODE

    def delayed_until(self, queue: str, now_ms: int) -> Range:
        """Those due at or before ``now_ms``."""
        prefix = self.delayed(queue)
        return prefix, prefix + pack_int(now_ms + 1)

    def split_delayed(self, queue: str, key: bytes) -> tuple[int, bytes]:
        """``due_ms`` and the rank of a delayed key."""
        due_ms, rank, _stamp = unpack(key[len(self.delayed(queue)) :])
        assert isinstance(due_ms, int)
        assert isinstance(rank, int)
        return due_ms, pack_int(rank)

    def lease(self, session: bytes, number: int) -> bytes:
        return self.leases(session) + pack_int(number)

    @lru_cache(64)  # noqa: B019 - keyspaces live as long as the process
    def leases(self, session: bytes) -> bytes:
        """Prefix of all leases of a session."""
        return self._key("lease", session)

    @property
    def all_leases(self) -> Range:
        return range_of(self._key("lease"))

    def body(self, message_id: bytes, chunk: int) -> bytes:
        return self._key("body", message_id, chunk)

    def bodies(self, message_id: bytes) -> Range:
        """All chunks of a message."""
        return range_of(self._key("body", message_id))

    # -- queues ---------------------------------------------------------------------------------------------------

    def _count(self, queue: str, state: str) -> bytes:
        return self._key("count", queue, state)

    def counts(self, queue: str) -> Range:
        return range_of(self._key("count", queue))

    @property
    def all_counts(self) -> Range:
        return range_of(self._key("count"))

    def _bell(self, queue: str) -> bytes:
        return self._key("bell", queue)

    def _waiting(self, queue: str) -> bytes:
        return self._key("waiting", queue)

    @property
    def all_waiting(self) -> Range:
        return range_of(self._key("waiting"))

    # -- sessions -------------------------------------------------------------------------------------------------

    @lru_cache(64)  # noqa: B019
    def session(self, session: bytes) -> bytes:
        return self._key("session", session)

    @property
    def all_sessions(self) -> Range:
        return range_of(self._key("session"))

    def beat(self, session: bytes) -> bytes:
        return self._key("beat", session)

    @property
    def all_beats(self) -> Range:
        return range_of(self._key("beat"))

    def role(self, role: str) -> bytes:
        return self._key("role", role)

    # -- routing --------------------------------------------------------------------------------------------------

    def exchange(self, name: str) -> bytes:
        return self._key("exchange", name)

    @property
    def all_exchanges(self) -> Range:
        return range_of(self._key("exchange"))

    def _epoch(self, exchange: str) -> bytes:
        return self._key("epoch", exchange)

    def binding(self, exchange: str, queue: str, routing_key: str) -> bytes:
        return self._key("binding", exchange, queue, routing_key)

    def bindings(self, exchange: str) -> Range:
        return range_of(self._key("binding", exchange))

    @property
    def all_bindings(self) -> Range:
        return range_of(self._key("binding"))

    def bound(self, queue: str, exchange: str, routing_key: str) -> bytes:
        return self._key("bound", queue, exchange, routing_key)

    def bindings_of(self, queue: str) -> Range:
        return range_of(self._key("bound", queue))

    def queue(self, name: str) -> bytes:
        return self._key("queue", name)

    @property
    def all_queues(self) -> Range:
        return range_of(self._key("queue"))

    def expiring(self, queue: str) -> bytes:
        return self._key("expiring", queue)

    @property
    def all_expiring(self) -> Range:
        return range_of(self._key("expiring"))

    def consumer(self, queue: str, session: bytes, tag: str) -> bytes:
        return self._key("consumer", queue, session, tag)

    def consumers(self, queue: str) -> Range:
        return range_of(self._key("consumer", queue))

    @property
    def all_consumers(self) -> Range:
        return range_of(self._key("consumer"))

    # -- the rest -------------------------------------------------------------------------------------------------

    def token(self, client: bytes, slot: int) -> bytes:
        return self._key("token", client, slot)

    @property
    def all_tokens(self) -> Range:
        return range_of(self._key("token"))

    def unpack(self, key: bytes) -> tuple[str | bytes | int, ...]:
        """The elements behind the namespace, the tag first."""
        return unpack(key[len(self.prefix) :])


#: Length of a packed place: rank 0 packs into one byte, the others into two.
SHORTEST_PLACE = 1 + 1 + STAMP_LENGTH
