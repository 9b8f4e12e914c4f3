"""Every key of the queues in one table, with the verbs that write it. ``docs/keyspace.md`` is the users' version.

Results and history have tables of their own: ``celery_fdb/results/records.py`` and ``celery_fdb/history/layout.py``.

All keys are tuples under one namespace, ``("celery-fdb", namespace)``, in a subset of FoundationDB's tuple encoding, so
that every FoundationDB tool can read them (https://github.com/apple/foundationdb/blob/main/design/tuple.md). The
encoding is implemented here, not taken from the binding, because the embedded store must work without ``libfdb_c``, and
because the hot path joins prefixes with fixed suffixes. A test checks that it equals ``fdb.tuple``. Elements: ``str``,
``bytes``, non-negative ``int`` below 2**64 - 1 (the binding writes larger ones another way). A versionstamp is 12 bytes
(10 assigned at commit, 2 chosen by the writer) behind :data:`STAMP_CODE`. Packing any other value raises
``FormatError``: whatever can be packed can be unpacked.

====================================================  =======================================  ==================================================
key                                                   value                                    written by
====================================================  =======================================  ==================================================
``("format",)``                                       format version                           first open
``("ready", queue, rank, stamp)``                     record                                   publish, promote, release, sweep; cleared by claim
``("keyed", queue, key, rank, stamp)``                record of a message with a key           publish, promote, release, sweep; cleared by claim
``("fair", queue)``                                   "": a message with a key was published   publish
``("todo", queue, "door", bucket, key, rank)``        "": look at this key                     publish, release, sweep; cleared by claim
``("todo", queue, "freed", key)``                     "": the key may be served again         ack, release, sweep, limit; cleared by claim
``("active", queue, key, rank)``                      A: in the ring, P: parked                claim; cleared with its last message
``("todo", queue, "ring", rank, round, stamp, key)``  rank of the messages: the key's turn     claim
``("round", queue, rank)``                            the round being served, atomic max       claim
``("turns", queue, rank, tenant)``                    the tenant's turns in the ring           claim; purge, delete, move
``("flight", queue, key)``                            leased messages of the key, atomic add   claim, ack, release, sweep
``("backlog", queue, key)``                           ready messages of the key, atomic add    publish, claim, release, sweep
``("limits", queue, key)``                            the key's limits                         limit
``("control", queue)``                                paused, newcomer, limits of every key    limit, pause, declare
``("bucket", queue, key)``                            token bucket of a rate                   claim; cleared when it is full
``("thaw", due_ms, queue, key)``                      ms to wait: ring the key's bell then     claim; cleared by promote
``("relimit", queue)``                                progress of a change of limits           limit; cleared when it is done
``("delayed", queue, due_ms, rank, stamp)``           record                                   publish, release; cleared by promote
``("lease", session, number)``                        queue, place, record                     claim, limit; cleared by ack, release, sweep
``("task", task_id, stamp)``                          key of its message, without the stamp    publish, promote, release, reject; cleared with it
``("dedup", exchange, routing_key, id)``               end of its window, in ms                 publish; cleared by the duties
``("dedup_end", end_ms, exchange, routing_key, id)``   ""                                       publish; cleared by the duties
``("import", id)``                                    facts about a finished import            import
``("imported", id, mark)``                            "": this message has been stored         import; cleared when it is finished, or by the duties
``("body", message_id, chunk)``                       a piece of a large payload               publish; cleared with the message
``("copy", message_id, target)``                      id of the copy, number of its chunks     burial; cleared by it, or the duties
``("count", queue, state)``                           messages (ready: and bytes), atomic add  every verb
``("total", queue, event)``                           number of messages ever, atomic add       any verb, about once a second
``("key_total", queue, key, event)``                  total of a busy key; "": of all others   any verb, about once a second; cleared by the duties
``("sample", step_s, slot)``                          what queues held and did at that time    the duties
``("bell", queue)``                                   versionstamp; watched by idle consumers  a verb that makes a message ready
``("waiting", queue)``                                "": the queue has delayed messages       publish, release; cleared by promote
``("alarm",)``                                        versionstamp; watched by the promoter    a verb that delays a message
``("session", session)``                              its description; absent once fenced      session; cleared by sweep
``("beat", session)``                                 stamp of the last beat; time, queues; TTL  session
``("role", role)``                                    session that holds it, versionstamp      promoter
``("line", name, stamp)``                             a demand: session, first lease, how many  join; cleared by serve, leave, evict, recover, sweep
``("demand", session, first)``                        state: W waits, G granted, E ended; its stamp  join, serve, leave, evict; cleared by the next join, recover, sweep
``("served", name)``                                  session that served the wait queue last, patience  serve, evict; cleared by sweep
``("exchange", name)``                                type, properties                         declare
``("binding", exchange, queue, routing_key)``         arguments                                bind
``("bound", queue, exchange, routing_key)``           "": the same bindings by queue           bind
``("queue", name)``                                   properties, arguments                    declare
``("expiring", queue)``                               versionstamp of the last use             declare, get, consume
``("deleting", queue)``                               version up to which messages are to be deleted; two more bytes: only held ones may be left  delete; cleared when it is done
``("consumer", queue, session, tag)``                 ""                                       consume; cleared with session or queue
``("single", queue)``                                 session, tag; or versionstamp: vacant    claim; cancel, sweep
``("epoch", exchange)``                               versionstamp of its last change          declare, bind, unbind, delete
``("token", client, slot)``                           commit token (``store/retry.py``)        every writing transaction
``("aside", duty, subject)``                          what a duty could not do, and why        the duties
``("newer", kind, version, queue, place)``            record or lease of a newer version       an older process: claim, bury, sweep; cleared by a newer one's duties
====================================================  =======================================  ==================================================

``rank`` is 9 minus the priority, so the most urgent sorts first; inside a rank the stamp is commit order. ``rank`` and
``stamp`` together are a message's *place*, with the key before them if it has one; a requeued message returns to its
place. A key's ring entry, its active mark and its arrivals are kept per rank: priority is strict across keys.

Code that parses a key raises ``FormatError``, and nothing else, for a key that no version of celery-fdb can have
written. Such a row must not stop any work: a walk over rows skips it (:meth:`Keyspace.read`) or, if it may be a
message, dead-letters it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any, ParamSpec, TypeVar
from zlib import crc32

from kombu_fdb.errors import FormatError, InvalidArgument
from kombu_fdb.model import NO_PRIORITY, URGENT, Place, Rank, SessionId, Stamp

Element = str | bytes | int

BYTES_CODE = b"\x01"
TEXT_CODE = b"\x02"
INT_ZERO = 0x14
STAMP_CODE = b"\x33"
#: From here on, FoundationDB's binding writes integers in another form.
_NO_INT = 2**64 - 1
#: Length of a packed versionstamp without its code.
STAMP_BYTES = 12


def pack(*elements: Element) -> bytes:
    """Encode so that byte order is tuple order."""
    return b"".join([_pack_element(element) for element in elements])


def _pack_element(element: Element) -> bytes:
    if isinstance(element, int):
        return pack_int(element)
    if isinstance(element, str):
        return pack_text(element)
    if not isinstance(element, bytes | bytearray):
        raise _no_text(element)
    return BYTES_CODE + element.replace(b"\x00", b"\x00\xff") + b"\x00"


def pack_text(text: str) -> bytes:
    """:func:`pack` for a single text."""
    if not isinstance(text, str):
        raise _no_text(text)
    return _pack_text(text)


def pack_fresh(text: str) -> bytes:
    """:func:`pack_text` for a text that is unlikely to recur: a task's id."""
    if not isinstance(text, str):
        raise _no_text(text)
    try:
        return b"\x02%b\x00" % text.encode().replace(b"\x00", b"\x00\xff")
    except UnicodeEncodeError as error:
        raise FormatError(
            "a string that can't be encoded as UTF-8 can't be in a key", given=ascii(text)[:80]
        ) from error


#: Names of queues and keys recur, so they are cached.
_pack_text = lru_cache(4096)(pack_fresh)


def _no_text(element: object) -> InvalidArgument:
    return InvalidArgument("a name must be a string", given=ascii(element)[:80])


def pack_int(number: int) -> bytes:
    """A non-negative integer below 2**64 - 1: the code contains its length, so shorter ones sort first."""
    if not 0 <= number < _NO_INT:
        raise FormatError("a number that can't be in a key", bits=number.bit_length(), negative=number < 0)
    length = (number.bit_length() + 7) // 8
    return bytes((INT_ZERO + length,)) + number.to_bytes(length, "big")


def pack_stamp(stamp: bytes) -> bytes:
    """A complete 12-byte versionstamp."""
    return STAMP_CODE + stamp


def range_of(prefix: bytes) -> tuple[bytes, bytes]:
    """The keys that extend ``prefix`` by at least one element."""
    return prefix + b"\x00", prefix + b"\xff"


def unpack(packed: bytes) -> tuple[Element, ...]:
    """Decode; a versionstamp becomes its 12 bytes. Raises ``FormatError`` for what :func:`pack` never writes."""
    elements: list[Element] = []
    position = 0
    while position < len(packed):
        element, position = _unpack_element(packed, position)
        elements.append(element)
    return tuple(elements)


def unpack_as(packed: bytes, *types: type) -> tuple[Any, ...]:
    """Decode elements of exactly these types (a versionstamp: bytes). Raises ``FormatError``."""
    elements = unpack(packed)
    if [type(each) for each in elements] != [*types]:
        raise FormatError("unreadable key", key=packed[:200])
    return elements


def _unpack_element(packed: bytes, position: int) -> tuple[Element, int]:
    code = packed[position]
    if code in (BYTES_CODE[0], TEXT_CODE[0]):
        raw, end = _unescape(packed, position + 1)
        return (_text(raw) if code == TEXT_CODE[0] else raw), end
    if INT_ZERO <= code <= INT_ZERO + 8 and position + code - INT_ZERO < len(packed):
        end = position + 1 + code - INT_ZERO
        return int.from_bytes(packed[position + 1 : end], "big"), end
    if code == STAMP_CODE[0] and position + STAMP_BYTES < len(packed):
        end = position + 1 + STAMP_BYTES
        return packed[position + 1 : end], end
    raise FormatError("unreadable key", key=packed)


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise FormatError("unreadable key", key=raw) from error


def _unescape(packed: bytes, start: int) -> tuple[bytes, int]:
    end = packed.find(b"\x00", start)
    while end != -1 and packed[end + 1 : end + 2] == b"\xff":
        end = packed.find(b"\x00", end + 2)
    if end == -1:
        raise FormatError("unreadable key", key=packed)
    return packed[start:end].replace(b"\x00\xff", b"\x00"), end + 1


D = TypeVar("D")
P = ParamSpec("P")
T = TypeVar("T")

#: The format version: raised by one whenever a key or a value changes its meaning.
FORMAT_VERSION = 1

Range = tuple[bytes, bytes]

#: The prefix for the place of a keyless message leased from a fair queue, where the key "" is counted like others.
NO_KEY = pack("")

#: Arrivals are spread by a hash of their key, so that a claim can begin anywhere: no name is always first.
BUCKETS = 256

#: The position of a rank's last byte in a place: a stamp's code and 12 bytes follow.
RANK_FROM_END = 14

#: In place of a rank, for the prefix of all ranks.
EVERY_RANK = Rank(b"")
#: The packed ranks, one integer each.
_RANKS = [Rank(pack_int(URGENT - priority)) for priority in range(URGENT + 1)]
#: The bytes behind a rank: a stamp and its code.
_PACKED_RANKS: dict[bytes, Rank] = {rank: rank for rank in _RANKS}
#: Tags of ranges in which messages wait.
_OF_MESSAGES = frozenset({"ready", "keyed", "delayed"})
#: Rounds count up from the last one served, in 8 bytes.
MOST_ROUNDS = 2**62


class Keyspace:
    """Makes the keys of one namespace. Prefixes of queues are cached; joining a suffix is one concatenation."""

    #: The first half of a place, for a priority from 0 to 9.
    rank = staticmethod(_RANKS.__getitem__)
    #: The priority of a rank.
    priority = staticmethod({rank: number for number, rank in enumerate(_RANKS)}.__getitem__)

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.prefix = pack("celery-fdb", namespace)
        self.format = self._key("format")
        self.alarm = self._key("alarm")
        self._tasks = self._key("task")
        self.items: Callable[[str, str, Rank], bytes] = lru_cache(4096)(self._items)  # the cache knows no types
        #: Prefix of a queue's ready messages; append a place.
        self.ready = self._cached("ready")
        #: Prefix of its messages with keys; append a place that begins with a key.
        self.keyed = self._cached("keyed")
        #: Prefix of its delayed messages; append due_ms, rank and stamp.
        self.delayed = self._cached("delayed")
        self.bell = self._cached("bell")
        self.waiting = self._cached("waiting")
        self.fair = self._cached("fair")
        self.control = self._cached("control")
        #: By queue and state.
        self.count: Callable[[str, str], bytes] = lru_cache(16384)(partial(self._key, "count"))
        #: By exchange.
        self.epoch = self._cached("epoch")
        self._of_queue = lru_cache(16384)(self._key)
        #: Prefix of the leases of all sessions.
        self.leases_prefix = self._key("lease")
        # All rows with a tag.
        self.all_leases = range_of(self.leases_prefix)
        self.all_asides = range_of(self._key("aside"))
        self.all_beats = range_of(self._key("beat"))
        self.all_bells = range_of(self._key("bell"))
        self.all_bindings = range_of(self._key("binding"))
        self.all_buckets = range_of(self._key("bucket"))
        self.all_consumers = range_of(self._key("consumer"))
        self.all_copies = range_of(self._key("copy"))
        self.all_counts = range_of(self._key("count"))
        self.all_dedups = range_of(self._key("dedup"))
        self.all_deleting = range_of(self._key("deleting"))
        self.all_demands = range_of(self._key("demand"))
        self.all_epochs = range_of(self._key("epoch"))
        self.all_exchanges = range_of(self._key("exchange"))
        self.all_expiring = range_of(self._key("expiring"))
        self.all_key_totals = range_of(self._key("key_total"))
        self.all_wait_queues = range_of(self._key("line"))
        self.all_newer = range_of(self._key("newer"))
        self.all_queues = range_of(self._key("queue"))
        self.all_relimits = range_of(self._key("relimit"))
        self.all_served = range_of(self._key("served"))
        self.all_sessions = range_of(self._key("session"))
        self.all_singles = range_of(self._key("single"))
        self.all_tokens = range_of(self._key("token"))
        self.all_totals = range_of(self._key("total"))
        self.all_unparks = range_of(self._key("thaw"))
        self.all_waiting = range_of(self._key("waiting"))
        #: The marks of all imports.
        self.every_imported = range_of(self._key("imported"))

    def _key(self, tag: str, *rest: str | bytes | int) -> bytes:
        return self.prefix + pack(tag, *rest)

    def _cached(self, tag: str) -> Callable[[str], bytes]:
        return lru_cache(4096)(partial(self._key, tag))

    # -- messages ------------------------------------------------------------------------------------------------

    def at(self, queue: str, place: Place) -> bytes:
        """The key of a ready message."""
        suffix = place.removeprefix(NO_KEY)
        return (self.keyed(queue) if suffix.startswith(TEXT_CODE) else self.ready(queue)) + suffix

    def delayed_prefix(self, queue: str, due_ms: int, rank: Rank) -> bytes:
        """The prefix of a new delayed message, with the stamp's code; append a stamp."""
        return self.delayed(queue) + pack_int(due_ms) + rank + STAMP_CODE

    def delayed_until(self, queue: str, now_ms: int) -> Range:
        """The messages due at or before ``now_ms``."""
        prefix = self.delayed(queue)
        return prefix, prefix + pack_int(now_ms + 1)

    def split_delayed(self, queue: str, key: bytes) -> tuple[int, Rank]:
        """``due_ms`` and the rank of a delayed key."""
        due_ms, rank, _stamp = unpack_as(key[len(self.delayed(queue)) :], int, int, bytes)
        return due_ms, _rank_of(rank, key)

    def lease(self, session: SessionId, number: int) -> bytes:
        return self.leases(session) + pack_int(number)

    @lru_cache(64)  # noqa: B019 - keyspaces live as long as the process
    def leases(self, session: SessionId) -> bytes:
        """Prefix of all leases of a session."""
        return self._key("lease", session)

    def task(self, task_id: str) -> bytes:
        """Prefix of a task's messages; append a stamp."""
        return self._tasks + pack_fresh(task_id)

    def dedup(self, exchange: str, routing_key: str, dedup_id: str) -> bytes:
        return self._key("dedup", exchange, routing_key, dedup_id)

    def dedup_end(self, end_ms: int, exchange: str, routing_key: str, dedup_id: str) -> bytes:
        return self._key("dedup_end", end_ms, exchange, routing_key, dedup_id)

    def dedup_ended(self, now_ms: int) -> Range:
        """The windows whose end is at or before ``now_ms``."""
        prefix = self._key("dedup_end")
        return prefix, prefix + pack_int(now_ms + 1)

    def dedup_of(self, end: bytes) -> bytes:
        """The entry whose end this key is."""
        _end_ms, *entry = self.split(end, int, str, str, str)
        return self._key("dedup", *entry)

    def import_(self, import_id: bytes) -> bytes:
        return self._key("import", import_id)

    def imported(self, import_id: bytes, mark: bytes) -> bytes:
        return self._key("imported", import_id, mark)

    def all_imported(self, import_id: bytes) -> Range:
        return range_of(self._key("imported", import_id))

    def body(self, message_id: bytes, chunk: int) -> bytes:
        return self._key("body", message_id, chunk)

    def bodies(self, message_id: bytes) -> Range:
        """All chunks of a message."""
        return range_of(self._key("body", message_id))

    def chunk_of(self, body: bytes) -> int:
        """The number of a chunk."""
        number = self.unpack(body)[-1]
        assert isinstance(number, int)
        return number

    def copy(self, message_id: bytes, target: str) -> bytes:
        return self._key("copy", message_id, target)

    # -- queues ---------------------------------------------------------------------------------------------------

    def counts(self, queue: str) -> Range:
        return range_of(self._key("count", queue))

    def total(self, queue: str, event: str) -> bytes:
        return self._key("total", queue, event)

    def totals(self, queue: str) -> Range:
        return range_of(self._key("total", queue))

    def key_total(self, queue: str, key: str, event: str) -> bytes:
        return self._key("key_total", queue, key, event)

    def key_totals_of(self, queue: str, key: str) -> Range:
        return range_of(self._key("key_total", queue, key))

    def key_totals(self, queue: str) -> Range:
        return range_of(self._key("key_total", queue))

    def sample(self, step_s: int, slot: int) -> bytes:
        return self._key("sample", step_s, slot)

    def samples(self, step_s: int, first: int, end: int) -> Range:
        """The samples of the slots from ``first`` to before ``end``."""
        return self.sample(step_s, first), self.sample(step_s, end)

    # -- fairness -------------------------------------------------------------------------------------------------

    def _items(self, queue: str, key: str, rank: Rank) -> bytes:
        """Prefix of a key's messages of one rank; those of the key "" are in the ready range. Append a stamp."""
        return (self.keyed(queue) + pack_text(key) if key else self.ready(queue)) + rank

    def all_items(self, queue: str, key: str) -> Range:
        """A key's messages of all ranks."""
        return range_of(self.items(queue, key, EVERY_RANK))

    def todo(self, queue: str) -> Range:
        """Arrivals, bells and ring: empty if a claim would find nothing."""
        return range_of(self._key("todo", queue))

    def arrivals(self, queue: str) -> Range:
        return range_of(self._key("todo", queue, "door"))

    def arrivals_from(self, queue: str, bucket: int) -> bytes:
        """The first key of a bucket's arrivals."""
        return self._key("todo", queue, "door", bucket)

    def arrival(self, queue: str, key: str, rank: Rank) -> bytes:
        bucket = crc32(key.encode()) % BUCKETS
        return self._of_queue("todo", queue, "door") + pack_int(bucket) + pack_text(key) + rank

    def all_freed(self, queue: str) -> Range:
        return range_of(self._key("todo", queue, "freed"))

    def freed(self, queue: str, key: str) -> bytes:
        return self._of_queue("todo", queue, "freed") + pack_text(key)

    def active(self, queue: str, key: str, rank: Rank) -> bytes:
        return self._of_queue("active", queue) + pack_text(key) + rank

    def active_ranks(self, queue: str, key: str) -> Range:
        return range_of(self._of_queue("active", queue) + pack_text(key))

    def ring(self, queue: str) -> bytes:
        """Prefix; append rank, round, stamp, key."""
        return self._of_queue("todo", queue, "ring")

    def ring_entry(self, queue: str, rank: Rank, round_: int, stamp: Stamp, key: str) -> bytes:
        """``stamp``: 12 bytes, of the key's first message."""
        return self.ring(queue) + self.ring_suffix(rank, round_, stamp, key)

    @staticmethod
    def ring_suffix(rank: Rank, round_: int, stamp: Stamp, key: str) -> bytes:
        """The part of a ring entry's key after the ring's prefix."""
        return rank + pack_int(round_) + pack_stamp(stamp) + pack_text(key)

    def split_ring(self, queue: str, entry: bytes) -> tuple[Rank, int, Stamp, str]:
        """Packed rank, round, 12-byte stamp, key."""
        rank, round_, stamp, key = unpack_as(entry[len(self.ring(queue)) :], int, int, bytes, str)
        if round_ > MOST_ROUNDS or len(stamp) != STAMP_BYTES:
            raise FormatError("unreadable turn of a key", queue=queue, entry=entry[:200])
        return _rank_of(rank, entry), round_, Stamp(stamp), key

    def split_arrival(self, arrival: bytes) -> tuple[str, Rank]:
        """Key and packed rank."""
        _queue, _arrival, _bucket, key, rank = self.split(arrival, str, str, int, str, int)
        return key, _rank_of(rank, arrival)

    def split_freed(self, freed: bytes) -> str:
        """The key."""
        return str(self.split(freed, str, str, str)[2])

    def fairness(self, queue: str) -> list[Range]:
        """All rows of a queue's keys except messages and their counters; only older stores have "pace"."""
        tags = ("todo", "active", "round", "turns", "pace", "limits", "bucket")
        return [range_of(self._key(tag, queue)) for tag in tags]

    def all_active(self, queue: str) -> Range:
        return range_of(self._of_queue("active", queue))

    def active_rank(self, queue: str, key: str, mark: bytes) -> Rank:
        """Packed rank of a mark."""
        return Rank(mark[len(self._of_queue("active", queue) + pack_text(key)) :])

    def place_rank(self, queue: str, ready: bytes) -> Rank:
        """Packed rank of a message in the ready range."""
        return split_place(Place(ready[len(self.ready(queue)) :]))[1]

    def place(self, queue: str, key: bytes) -> Place:
        """The place of a ready message's key."""
        keyed = self.keyed(queue)
        return Place(key[len(keyed) :] if key.startswith(keyed) else key[len(self.ready(queue)) :])

    def key_at(self, queue: str, key: bytes) -> str:
        """The fairness key of a message, by the key of its row; "" for none, or if that can't be read."""
        if not key.startswith(self.keyed(queue)):
            return ""
        return read_or(("",), split_place, self.place(queue, key))[0]

    def queue_of(self, key: bytes) -> str:
        """The queue in which a message with this key is ready or delayed. Raises ``FormatError`` for any other key."""
        tag, queue, *_ = (*unpack(key[len(self.prefix) :]), "", "")
        if not key.startswith(self.prefix) or tag not in _OF_MESSAGES or not isinstance(queue, str):
            raise FormatError("not a message's key", key=key[:200])
        if tag == "delayed":
            self.split_delayed(queue, key)
        else:
            split_place(self.place(queue, key))
        return queue

    def rounds(self, queue: str) -> Range:
        return range_of(self._key("round", queue))

    def round_rank(self, queue: str, key: bytes) -> Rank:
        """Packed rank of a round's key."""
        return Rank(key[len(self._key("round", queue)) :])

    def round(self, queue: str, rank: Rank) -> bytes:
        return self._of_queue("round", queue) + rank

    def turns(self, queue: str, rank: Rank, tenant: str) -> bytes:
        return self._of_queue("turns", queue) + rank + pack(tenant)

    def flight(self, queue: str, key: str) -> bytes:
        return self._of_queue("flight", queue) + pack_text(key)

    def backlog(self, queue: str, key: str) -> bytes:
        return self._of_queue("backlog", queue) + pack_text(key)

    def backlogs(self, queue: str) -> Range:
        return range_of(self._key("backlog", queue))

    def flights(self, queue: str) -> Range:
        return range_of(self._key("flight", queue))

    def limits(self, queue: str, key: str) -> bytes:
        return self._of_queue("limits", queue) + pack_text(key)

    def all_limits(self, queue: str) -> Range:
        return range_of(self._key("limits", queue))

    def bucket(self, queue: str, key: str) -> bytes:
        return self._of_queue("bucket", queue) + pack_text(key)

    def unpark(self, due_ms: int, queue: str, key: str) -> bytes:
        return self._key("thaw", due_ms, queue, key)

    def relimit(self, queue: str) -> bytes:
        return self._key("relimit", queue)

    # -- sessions -------------------------------------------------------------------------------------------------

    @lru_cache(64)  # noqa: B019
    def session(self, session: SessionId) -> bytes:
        return self._key("session", session)

    def beat(self, session: SessionId) -> bytes:
        return self._key("beat", session)

    def role(self, role: str) -> bytes:
        return self._key("role", role)

    # -- wait queues -----------------------------------------------------------------------------------------------

    @lru_cache(64)  # noqa: B019
    def wait_queue(self, name: bytes) -> bytes:
        """Prefix of a wait queue's demands; append a stamp. Includes the stamp's code."""
        return self._key("line", name) + STAMP_CODE

    def demand(self, session: SessionId, first: int) -> bytes:
        return self._key("demand", session, first)

    def demands(self, session: SessionId) -> Range:
        return range_of(self._key("demand", session))

    def served(self, name: bytes) -> bytes:
        return self._key("served", name)

    # -- routing --------------------------------------------------------------------------------------------------

    def exchange(self, name: str) -> bytes:
        return self._key("exchange", name)

    def binding(self, exchange: str, queue: str, routing_key: str) -> bytes:
        return self._key("binding", exchange, queue, routing_key)

    def bindings(self, exchange: str) -> Range:
        return range_of(self._key("binding", exchange))

    def bound(self, queue: str, exchange: str, routing_key: str) -> bytes:
        return self._key("bound", queue, exchange, routing_key)

    def bindings_of(self, queue: str) -> Range:
        return range_of(self._key("bound", queue))

    def queue(self, name: str) -> bytes:
        return self._key("queue", name)

    def expiring(self, queue: str) -> bytes:
        return self._key("expiring", queue)

    def deleting(self, queue: str) -> bytes:
        return self._key("deleting", queue)

    def consumer(self, queue: str, session: SessionId, tag: str) -> bytes:
        return self._key("consumer", queue, session, tag)

    def consumers(self, queue: str) -> Range:
        return range_of(self._key("consumer", queue))

    def single(self, queue: str) -> bytes:
        return self._key("single", queue)

    # -- the rest -------------------------------------------------------------------------------------------------

    def token(self, client: bytes, slot: int) -> bytes:
        return self._key("token", client, slot)

    def aside(self, duty: str, subject: str) -> bytes:
        return self._key("aside", duty, subject)

    def newer(self, kind: str, version: int, queue: str, place: Place) -> bytes:
        """Where a record or lease of that version is kept until a process can read it. ``place``: its message's."""
        return self._key("newer", kind, version, queue) + place

    def newer_until(self, kind: str, version: int) -> Range:
        """All kept rows of that kind that a process of ``version`` can read."""
        prefix = self._key("newer", kind)
        return prefix, prefix + pack_int(version + 1)

    def split_newer(self, kept: bytes) -> tuple[str, Place]:
        """Queue and place of a kept message. Raises ``FormatError``."""
        _newer, kind, version, queue, *_place = (*self.unpack(kept), "", 0, "")
        if not isinstance(kind, str) or not isinstance(version, int) or not isinstance(queue, str):
            raise FormatError("not a kept message's key", key=kept[:200])
        place = Place(kept[len(self._key("newer", kind, version, queue)) :])
        split_place(place)
        return queue, place

    def unpack(self, key: bytes) -> tuple[str | bytes | int, ...]:
        """The elements after the namespace, the tag first."""
        return unpack(key[len(self.prefix) :])

    def split(self, key: bytes, *types: type) -> tuple[Any, ...]:
        """The elements after the tag, which must be of these types. Raises ``FormatError``."""
        return unpack_as(key[len(self.prefix) :], str, *types)[1:]

    def read(self, rows: Iterable[tuple[bytes, bytes]], *types: type) -> Iterator[tuple[tuple[Any, ...], bytes]]:
        """The elements after each row's tag, and its value; rows with other types are skipped."""
        return readable(rows, lambda key: self.split(key, *types))


def readable(rows: Iterable[tuple[bytes, bytes]], split: Callable[[bytes], T]) -> Iterator[tuple[T, bytes]]:
    """The result of ``split`` for each row's key, and its value. Rows whose keys can't be read are skipped."""
    for key, value in rows:
        try:
            found = split(key)
        except FormatError:
            continue
        yield found, value


def read_or(otherwise: D, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | D:
    """The result of ``read``; ``otherwise`` if it raises ``FormatError``."""
    try:
        return read(*args, **kwargs)
    except FormatError:
        return otherwise


def has_key(place: Place) -> bool:
    """Whether the message is counted among those of a key, which may be ""."""
    return place.startswith(TEXT_CODE)


def counted(place: Place) -> Place:
    """The place, marked so that the message is counted among those of its key, which may be ""."""
    return place if has_key(place) else Place(NO_KEY + place)


def split_place(place: Place) -> tuple[str, Rank]:
    """Key ("" for none) and packed rank of a place. Raises ``FormatError``."""
    packed = place[: -STAMP_BYTES - 1]
    if place[-STAMP_BYTES - 1 : -STAMP_BYTES] != STAMP_CODE:
        raise FormatError("unreadable place", place=place[:200])
    return _subqueue_of(packed)


@lru_cache(4096)
def _subqueue_of(packed: bytes) -> tuple[str, Rank]:
    """The sub-queue of a place without its stamp. Cached, as each step of a message asks for it."""
    alone = _PACKED_RANKS.get(packed)
    if alone is not None:
        return "", alone
    key, rank = unpack_as(packed, str, int)
    return key, _rank_of(rank, packed)


def _rank_of(rank: int, key: bytes) -> Rank:
    if not 0 <= rank <= URGENT:
        raise FormatError("unreadable rank", rank=rank, key=key[:200])
    return _RANKS[URGENT - rank]


def priority_of(place: bytes) -> int:
    """The priority of a place, or of a key that ends in one; the lowest for "".

    The rank precedes the stamp: one packed digit, whose last byte is the digit itself unless it is 0.
    """
    rank = place[-RANK_FROM_END : 1 - RANK_FROM_END]
    return URGENT if rank == _RANKS[URGENT] else max(URGENT - ord(rank), NO_PRIORITY) if rank else NO_PRIORITY
