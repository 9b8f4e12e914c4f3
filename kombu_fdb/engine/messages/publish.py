"""Publish: store messages in each queue they reach, all or none; and only once, even after an unknown outcome.

A publish routes each message and stores a copy in each queue it reaches. To the default exchange it reads nothing and
never conflicts: the position is the versionstamp of the commit, so queue order is commit order. (Reading the last index
and adding a random suffix would cost a read and lose the order.) A named exchange costs one read, of its epoch, as a
conflict; see ``routing/tables.py``.

Dedup: a message is stored once, however often it is published within a window. Guarantee: ONCE-PUBLISHED.

A publication with a ``dedup_id`` reads ``("dedup", exchange, routing_key, dedup_id)``, serializably: of two concurrent
publishers, one runs again, and then sees the other's entry. An entry with an open window makes the publication a
duplicate: nothing is stored, and its publisher gets the same answer as the first one. So a publisher that does not know
whether its commit succeeded may simply publish again, and two schedulers may publish the same tick. A publication that
reaches no queue leaves no entry.

The window counts from the first publication. It begins by the wall clock of the first publisher and ends by that of the
later one, so their difference lengthens or shortens it. A duplicate does not extend it, and it outlives the message
(acked, cancelled, dead), as with SQS
(https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/using-messagededuplicationid-property.html).

A publication may have two ids. Its ``once_id`` distinguishes it from all others: an outbox publishes a row again if it
does not know whether it has done so. Its ``dedup_id`` marks publications that their caller considers the same. A
message is new only if both ids are. If its ``once_id`` shows a repetition, its ``dedup_id`` is left alone: that window
counts from the first time.

An id counts for one exchange and routing key. The duties of consumers clear the entries. Their clocks do not matter as
long as they are less than :data:`KEPT_MS` ahead of the publishers'.

A block: what one thread or greenlet publishes in it, through one engine, is checked and only *gathered*. When the block
ends, the engine stores all of it in one transaction with the caller's verb, or nothing after an exception. A nested
block gathers its own messages.

Publishing again: Celery and kombu, by default, repeat a publish after a lost connection, although it may be stored. A
publish whose outcome is unknown (``store/retry.py``) leaves its messages here, each with the doubt about its
transaction. When the same message is published again in this process, the doubt is settled first. A message that has
been stored counts as published by the earlier call. One that has not is stored now; the earlier transaction is fenced
first, so that it never commits. So the message is stored once, whichever thread repeats it. As long as no commit is in
doubt, that writes nothing.

Two messages are the same if they have the same exchange, routing key, payload (which contains the task's id), key,
priority and times; the moments computed from these times may differ. Each doubtful message accounts for one repetition:
if two equal messages are in doubt, each call settles one of them. A message may be repeated in any batch.

Bounds: a doubt is forgotten after :data:`~kombu_fdb.store.retry.LONGEST_DOUBT_S`, and so are the oldest beyond
:data:`MOST_MESSAGES` messages. Publishing such a message again may store it twice, and so may publishing it again in
another process.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import chain, count
from typing import Any, TypeVar

from kombu_fdb.engine.messages import overflow
from kombu_fdb.engine.messages.bury import bury
from kombu_fdb.engine.messages.message import from_outside, put_delayed, put_ready
from kombu_fdb.engine.scheduling import key_limits
from kombu_fdb.engine.transactions import Transactions
from kombu_fdb.engine.work import Effects, Work
from kombu_fdb.errors import CommitUnknown, KombuFDBError, LimitExceeded, StoreError
from kombu_fdb.keyspace.codec import INLINE_BYTES, Message, Record, end_of_life
from kombu_fdb.keyspace.layout import Keyspace, readable
from kombu_fdb.model import LONGEST_KEY, LONGEST_NAME, LONGEST_TASK_ID, NO_PRIORITY, URGENT, Death, Publication
from kombu_fdb.primitives.clock import Clock, IdSource
from kombu_fdb.primitives.interruption import Lock
from kombu_fdb.primitives.ranges import LATEST_MS, LONGEST_MS, PRIORITY, Kind, check_fields, check_text, moment
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.store.protocol import Transaction
from kombu_fdb.store.retry import Doubt

# -- one publish -------------------------------------------------------------------------------------------------------


#: What callers put into one transaction; FoundationDB's limit is 10,000,000 B with keys and conflict ranges.
BATCH_BYTES = 4_000_000
#: A stamp's user version has 2 bytes; far fewer keep a transaction short.
BATCH_MESSAGES = 2_000
#: How many copies of messages one transaction may have.
MOST_STAMPED = 65_000


#: The queues each message reached, and the queues in which the oldest must give way, with their new loads.
Reached = tuple[list[list[str]], Mapping[str, overflow.Load]]


def publish(work: Work, publications: Sequence[Publication], *, beforehand: bool = False) -> Reached:
    """Store all publications in order. Raises ``CapacityExceeded``, and ``LimitExceeded`` for too many copies.

    It raises these before it writes anything: a caller's own transaction may continue without the messages.
    ``beforehand``: a refused message that is too large for several queues may be copied in advance; then
    ``CopiesMissing`` is raised. Each publication in chunks needs an id, by which a retry finds the chunks that were
    copied. Pass the same publications, and the same time, in each retry.
    """
    now_ms = work.now_ms
    reached, declared = route(work, publications)
    fresh: Sequence[Publication | None] = publications
    entries: Mapping[bytes, bytes] = {}
    for each in publications:
        if each.once_id or each.dedup_id:
            fresh, entries = without_duplicates(work, publications, reached)
            break
    fills = has_maximum = False
    for queue in declared.values():
        fills = fills or not queue.empties_itself
        has_maximum = has_maximum or queue.max_load != overflow.NO_LIMIT
    if fills:  # the disk, unless all queues empty themselves
        work.tr.fill()
    # Queues without a maximum need no load.
    refusing, overfull = _judge(work, declared, fresh, reached) if has_maximum else ({}, {})
    keys: dict[str, dict[str, int]] = {}
    plans: list[tuple[list[tuple[str, Publication]], list[tuple[str, Publication]]]] = []
    for publication, queues in zip(fresh, reached, strict=True):
        if publication is None:
            continue
        copies = _copies(publication, queues) if len(queues) > 1 else (publication,)
        stored: list[tuple[str, Publication]] = []
        refused: list[tuple[str, Publication]] = []
        for name, one in zip(queues, copies, strict=False):
            if one.due_ms > now_ms or name not in refusing or overflow.fits(work, name, refusing, len(one.payload)):
                stored.append((name, one))
                if one.key and one.due_ms <= now_ms:
                    coming = keys.setdefault(name, {})
                    coming[one.key] = coming.get(one.key, 0) + 1
            else:
                refused.append((name, one if one.message_id else one._replace(message_id=work.environment.ids())))
        plans.append((stored, refused))
    if keys:
        key_limits.check_capacity(work, keys)
    for key, value in entries.items():
        work.tr.set(key, value)
    for stored, refused in plans:
        for name, one in stored:
            work.effects.note(name, "published", one.key)
            _store(work, declared[name], one)
        for name, one in refused:  # as in RabbitMQ, its dead letter follows its other copies
            work.effects.note(name, "published", one.key)
            bury(work, dead_of(work, name, one), "maxlen", payload=one.payload if beforehand else b"")
    return reached, overfull


def route(work: Work, publications: Sequence[Publication]) -> tuple[list[list[str]], Mapping[str, QueueDeclaration]]:
    """The queues that each publication reaches, and their declarations.

    The default exchange leads to the queue that the routing key names. Nothing is read while its declaration is cached.
    """
    now, known = work.routing.clock.monotonic(), work.routing.declarations
    reached: list[list[str]] = []
    declared: dict[str, QueueDeclaration] = {}
    for each in publications:
        believed = None if each.exchange else known.get(each.routing_key)
        if believed is None or now >= believed[0]:
            reached = work.routing.routes(work.tr, [each[:2] for each in publications])
            declared = work.routing.queues(work.tr, dict.fromkeys(chain.from_iterable(reached)))
            break
        reached.append([each.routing_key])
        declared[each.routing_key] = believed[1]
    messages = work.effects.stamped + sum(map(len, reached))
    if messages > MOST_STAMPED:
        raise LimitExceeded(
            "too many messages in one transaction", messages=messages, most=MOST_STAMPED, fix="Publish fewer at once."
        )
    return reached, declared


def _judge(
    work: Work,
    declared: Mapping[str, QueueDeclaration],
    fresh: Sequence[Publication | None],
    reached: Sequence[Sequence[str]],
) -> tuple[dict[str, overflow.Load], Mapping[str, overflow.Load]]:
    """Decide about the messages that are ready now; see :func:`.overflow.judge`."""
    coming: dict[str, overflow.Load] = {}
    for publication, queues in zip(fresh, reached, strict=True):
        if publication is not None and publication.due_ms <= work.now_ms:
            for queue in queues:
                if declared[queue].max_load != overflow.NO_LIMIT:
                    coming[queue] = coming.get(queue, overflow.NOTHING).grown(len(publication.payload), publication.key)
    return overflow.judge(work, coming)


def _copies(publication: Publication, queues: Sequence[str]) -> Sequence[Publication]:
    """One copy for each queue. If it has an id, so has each copy, the same in each run; the first has the original."""
    if not publication.message_id:
        return [publication] * len(queues)
    further = [blake2b(publication.message_id + queue.encode(), digest_size=16).digest() for queue in queues[1:]]
    return [publication, *(publication._replace(message_id=each) for each in further)]


def _store(work: Work, queue: QueueDeclaration, publication: Publication) -> None:
    """Store one copy."""
    _, _, payload, priority, due_ms, ttl_ms, expires_ms, key, ttr_ms, task_id, _, _, _, _, message_id = publication
    if queue.message_ttl_ms is not None:
        ttl_ms = queue.message_ttl_ms if ttl_ms is None else min(ttl_ms, queue.message_ttl_ms)
    is_delayed = due_ms > work.now_ms
    if ttl_ms is not None or expires_ms:
        expires_ms = expires_at(due_ms if is_delayed else work.now_ms, ttl_ms, expires_ms)
    rank, kept_priority = priority, NO_PRIORITY
    if priority > queue.max_priority:
        rank, kept_priority = queue.max_priority, priority  # kept for a queue that allows it
    record = Record(
        message_id or work.environment.ids(),
        work.now_ms,
        expires_ms,
        0,
        0,
        len(payload),
        payload,
        (),
        key,
        ttr_ms,
        task_id,
        kept_priority,
    )
    if is_delayed:
        put_delayed(work, queue.name, work.keys.rank(rank), due_ms, record)
    else:
        put_ready(work, queue.name, key, work.keys.rank(rank), record)


def dead_of(work: Work, queue: str, publication: Publication, deaths: Sequence[Death] = ()) -> Message[bytes]:
    """An unstored message, with a message id, to be buried as if it had died in ``queue``. ``deaths``: its history."""
    record = Record(
        message_id=publication.message_id,
        published_ms=work.now_ms,
        expires_ms=0,
        redeliveries=0,
        chunks=0,
        size=len(publication.payload),
        payload=publication.payload,
        deaths=tuple(deaths),
        key=publication.key,
        ttr_ms=publication.ttr_ms,
        task_id=publication.task_id,
        priority=publication.priority,
    )
    return from_outside(work, queue, record)


def expires_at(start_ms: int, ttl_ms: int | None, expires_ms: int) -> int:
    """The earlier of the two ends; 0 for never."""
    ends = [end for end in (expires_ms, end_of_life(start_ms, ttl_ms)) if end]
    return min(ends, default=0)


# -- dedup -------------------------------------------------------------------------------------------------------------


ENTRIES_PER_TRANSACTION = 500
END_BYTES = 8
#: How long an entry is kept beyond its window.
KEPT_MS = 15 * 60 * 1000


def without_duplicates(
    work: Work, publications: Sequence[Publication], reached: Sequence[Sequence[str]]
) -> tuple[Sequence[Publication | None], Mapping[bytes, bytes]]:
    """The publications in order; None for one that is stored already, or is earlier in this list.

    Also returns the entries to set for the others. ``reached``: the queues of each.
    """
    entries = [_entry(work.keys, each, name) for each in publications for name, _ in _ids(each)]
    seen = {
        key
        for key, value in zip(entries, work.tr.get_many(entries), strict=True)
        if value and decode_end(value) > work.now_ms
    }
    new: dict[bytes, bytes] = {}
    fresh = [
        None if queues and _is_duplicate(work, each, seen, new) else each
        for each, queues in zip(publications, reached, strict=True)
    ]
    return fresh, new


def _is_duplicate(work: Work, publication: Publication, seen: set[bytes], new: dict[bytes, bytes]) -> bool:
    for name, window_ms in _ids(publication):
        entry = _entry(work.keys, publication, name)
        if entry in seen:
            return True
        seen.add(entry)
        end_ms = work.now_ms + window_ms
        new[entry] = end_ms.to_bytes(END_BYTES, "big")
        new[work.keys.dedup_end(end_ms, publication.exchange, publication.routing_key, name)] = b""
    return False


def _ids(publication: Publication) -> list[tuple[str, int]]:
    """Each id with its window, in the order in which they are looked up."""
    once = publication.once_id, publication.once_window_ms
    return [each for each in (once, (publication.dedup_id, publication.dedup_window_ms)) if each[0]]


def clear_ended(work: Work, limit: int, end_ms: int) -> int:
    """Clear up to ``limit`` entries whose window had ended at ``end_ms``. Returns how many rows it read.

    An id that has been published again has an entry with a later end, which stays.
    """
    rows = work.tr.get_range(*work.keys.dedup_ended(end_ms), limit=limit, snapshot=True)
    entries = [entry for entry, _ in readable(rows, work.keys.dedup_of)]
    ended = (
        [value is not None and decode_end(value) <= end_ms for value in work.tr.get_many(entries)] if entries else []
    )
    for key in [*(key for key, _ in rows), *(entry for entry, is_over in zip(entries, ended, strict=True) if is_over)]:
        work.tr.clear(key)
    return len(rows)


def restore(work: Work, entries_: Sequence[tuple[str, str, str, int]]) -> None:
    """Open these windows, dumped from another store, in this one."""
    for exchange, routing_key, dedup_id, end_ms in entries_:
        work.tr.set(work.keys.dedup(exchange, routing_key, dedup_id), end_ms.to_bytes(END_BYTES, "big"))
        work.tr.set(work.keys.dedup_end(end_ms, exchange, routing_key, dedup_id), b"")


def _entry(keys: Keyspace, publication: Publication, name: str) -> bytes:
    return keys.dedup(publication.exchange, publication.routing_key, name)


def decode_end(value: bytes) -> int:
    """When a window is over, in ms; 0 if the value can't be read."""
    return int.from_bytes(value, "big") if len(value) == END_BYTES else 0


# -- a block that publishes at its end ---------------------------------------------------------------------------------


T = TypeVar("T")

#: The room a message needs in a transaction besides its payload: keys, record head, conflict ranges.
OVERHEAD_BYTES = 300

#: The engine whose block this thread is in, and what it has published there.
_current: ContextVar[tuple[object, list[Publication]] | None] = ContextVar("kombu_fdb_gathering", default=None)


def weight(publication: Publication) -> tuple[int, int]:
    """What a publication adds to a transaction: messages and bytes."""
    return 1, len(publication.payload) + OVERHEAD_BYTES


def split_batch(
    items: Iterable[T], weigh: Callable[[T], tuple[int, int]], most: tuple[int, int] = (BATCH_MESSAGES, BATCH_BYTES)
) -> Iterator[list[T]]:
    """Consecutive parts that each fit into one transaction. ``weigh``, ``most``: messages and bytes."""
    part: list[T] = []
    messages = size = 0
    for item in items:
        number, added = weigh(item)
        if part and (messages + number > most[0] or size + added > most[1]):
            yield part
            part, messages, size = [], 0, 0
        part.append(item)
        messages, size = messages + number, size + added
    if part:
        yield part


# -- publishing again --------------------------------------------------------------------------------------------------


MOST_MESSAGES = 10_000


#: A message that may be stored: the doubt about its transaction, and its number there.
Doubted = tuple[Doubt[Reached], int]


@dataclass(slots=True)
class Burial:
    """A message from outside, to be buried once, however many attempts it takes (``Publisher.bury_copy``).

    It is made before the first attempt, and passed to each. If the outcome of an attempt is unknown, the next attempt
    determines it, or fences it. If the doubt is too old for that, the message is buried again under another id: two
    dead letters are better than none, and they share no chunks.
    """

    publication: Publication
    doubt: Doubt[None] = field(default_factory=Doubt)

    def begin(self, clock: Clock, ids: IdSource) -> bool:
        """Begin another attempt. False if an earlier one has buried the message."""
        is_lost = self.doubt.is_open and self.doubt.is_too_old(clock)
        if is_lost:
            self.doubt = Doubt()
        if is_lost or not self.publication.message_id:
            self.publication = self.publication._replace(message_id=ids())
        return self.doubt.landed is None


class Doubts:
    """Messages in doubt, by identity. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = Lock()
        #: Empty when there are none.
        self.found: OrderedDict[bytes, deque[Doubted]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, list(self.found.values())))

    def note(self, publications: Sequence[Publication], doubt: Doubt[Reached]) -> None:
        """Note that these may be stored, or may still be."""
        for number, publication in enumerate(publications):
            self.keep(publication, (doubt, number))

    def keep(self, publication: Publication, doubted: Doubted) -> None:
        """Add a message in doubt, or one that was taken and is still in doubt."""
        identity = _identity(publication)
        with self._lock.reentrant:
            self.found.setdefault(identity, deque()).append(doubted)
            while len(self) > MOST_MESSAGES:
                self.found.popitem(last=False)

    def take(self, publication: Publication) -> Doubted | None:
        """The doubtful message that may be this one; no other caller gets it. Raises what a ``Lock`` raises."""
        identity = _identity(publication)
        with self._lock:
            same, doubted = self.found.pop(identity, deque()), None
            while same and doubted is None:
                doubt, number = same.popleft()
                doubted = None if doubt.is_too_old(self._clock) else (doubt, number)
            if same:  # before any that a signal handler has just noted
                same += self.found.get(identity, ())
                self.found[identity] = same
        return doubted


def _identity(publication: Publication) -> bytes:
    """The fields that make two publications the same. Of times, which each call computes again, only the presence."""
    said = publication._replace(message_id=b"", due_ms=publication.due_ms > 0, expires_ms=0, payload=b"")
    return blake2b(repr(said).encode() + publication.payload, digest_size=16).digest()


# -- what is accepted --------------------------------------------------------------------------------------------------


#: Every text may have this many characters.
_SHORT = min(LONGEST_NAME, LONGEST_KEY, LONGEST_TASK_ID)
_DURATION = Kind.whole("in range", 0, LONGEST_MS, fix=f"Use 0 to {LONGEST_MS:,}, which is 100 years.")
#: The fields of a publication, and what they accept.
_TEXTS = {
    "exchange": ("exchange", LONGEST_NAME),
    "routing_key": ("routing key", LONGEST_NAME),
    "key": ("fairness key", LONGEST_KEY),
    "task_id": ("task id", LONGEST_TASK_ID),
    "dedup_id": ("dedup id", LONGEST_KEY),
    "once_id": ("once id", LONGEST_KEY),
}
_NUMBERS = {
    "ttl_ms": _DURATION.or_none(),
    "ttr_ms": _DURATION,
    "dedup_window_ms": _DURATION,
    "once_window_ms": _DURATION,
    "priority": PRIORITY,
}


def check_publication(publication: Publication) -> None:
    """Check all but the payload's size. Raises ``InvalidArgument`` and ``QueueError``, which name the field."""
    # One check suffices if all fields are good, as they nearly always are; otherwise each is checked.
    exchange, routing_key, _, priority, due_ms, ttl_ms, expires_ms, key, ttr_ms, task_id = publication[:10]
    dedup_id, dedup_ms, once_id, once_ms, _ = publication[10:]
    try:
        texts = exchange + routing_key + key + task_id + dedup_id + once_id
    except TypeError:
        texts = None
    if not (
        type(texts) is str
        and type(priority) is type(due_ms) is type(expires_ms) is type(ttr_ms) is type(dedup_ms) is type(once_ms) is int
        and texts.isascii()
        and len(texts) <= _SHORT
        and NO_PRIORITY <= priority <= URGENT
        and 0 <= due_ms <= LATEST_MS
        and 0 <= expires_ms <= LATEST_MS
        and ttl_ms is None
        and 0 <= ttr_ms <= LONGEST_MS
        and 0 <= dedup_ms <= LONGEST_MS
        and 0 <= once_ms <= LONGEST_MS
    ):
        _check_each_field(publication)


def _check_each_field(publication: Publication) -> None:
    for name, (about, longest) in _TEXTS.items():
        check_text(about, getattr(publication, name), longest)
    for name in ("due_ms", "expires_ms"):
        moment(name, getattr(publication, name))
    check_fields(_NUMBERS, publication)


# -- the verbs ---------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

#: How long a publisher tries to shed the oldest messages of a full queue, in seconds.
SHED_TIMEOUT_S = 1.0


class Publisher:
    """The verbs of publishers."""

    def __init__(self, run: Transactions) -> None:
        self._run = run
        #: Publications that may be stored. Its owner may let it outlive the engine.
        self.doubts = Doubts(run.clock)

    def publish(
        self, publications: Sequence[Publication], *, timeout_s: float | None = None, now_ms: int | None = None
    ) -> list[list[str]]:
        """Route and store all of them in one transaction, in this order; all or none.

        ``now_ms``: the time from which the caller has computed their times; None: now.

        Returns the queues that each one reached; an unroutable message has none, and is dropped. Raises
        ``MessageTooLarge`` (nothing stored), ``ExchangeNotFound``, ``LimitExceeded`` if together they do not fit into
        one transaction (see :data:`~kombu_fdb.engine.messages.publish.BATCH_BYTES`), ``CapacityExceeded`` (nothing
        stored), and ``CommitUnknown``: if this process publishes them again, they are stored once. Guarantee: DURABLE.
        """
        for publication in publications:
            self.check(publication)
        block = _current.get()
        if block is not None and block[0] is self:
            reached = self._run.read(lambda work: route(work, publications))[0]
            block[1].extend(publications)  # after the read: if that fails, the caller may publish again
            return reached
        if self.doubts.found:
            return self._publish_again(publications, timeout_s, now_ms)
        return self._publish(publications, timeout_s, now_ms)

    def _publish_again(
        self, publications: Sequence[Publication], timeout_s: float | None = None, now_ms: int | None = None
    ) -> list[list[str]]:
        """Publish those that no earlier call has stored; the others count as published."""
        timeout_s = self._run.environment.publish_s if timeout_s is None else timeout_s
        deadline = self._run.clock.monotonic() + timeout_s
        taken = [self.doubts.take(each) for each in publications]
        stored: list[list[str] | None] | None = None
        try:
            stored = self._resolve(taken, timeout_s)
            left = [each for each, reached in zip(publications, stored, strict=True) if reached is None]
            left_s = max(deadline - self._run.clock.monotonic(), 0.001)
            now = iter(self._publish(left, left_s, now_ms) if left else [])
            return [next(now) if reached is None else reached for reached in stored]
        except BaseException:
            for number, (publication, doubted) in enumerate(zip(publications, taken, strict=True)):
                # A fenced message that is published now has a new doubt, if it needs one.
                if doubted is not None and (stored is None or stored[number] is not None):
                    self.doubts.keep(publication, doubted)
            raise

    def _resolve(self, taken: Sequence[Doubted | None], timeout_s: float) -> list[list[str] | None]:
        """For each, its queues if an earlier call has stored it. Raises ``CommitUnknown`` if that remains unknown."""
        deadline = self._run.clock.monotonic() + timeout_s
        found: list[list[str] | None] = [None] * len(taken)
        try:
            for at, doubted in enumerate(taken):
                if doubted is not None:
                    doubt, number = doubted
                    left_s = deadline - self._run.clock.monotonic()
                    if self._run.retry.resolve(doubt, timeout_s=left_s):
                        found[at] = [] if doubt.result is None else doubt.result[0][number]
            return found
        except StoreError as error:
            if isinstance(error, CommitUnknown):
                raise
            raise CommitUnknown("it may be stored since an earlier call, and the store failed since") from error

    @contextmanager
    def atomically(self, verb: Callable[[Transaction], None]) -> Iterator[None]:
        """Store what this thread publishes inside the block at its end, in one transaction with ``verb``.

        Nothing is stored if the block ends with an exception, or ``verb`` raises one. ``verb`` may run several times,
        and runs before anything is written. Messages that do not fit into the transaction are published before it.
        Raises what ``publish`` raises.
        """
        gathered: list[Publication] = []
        token = _current.set((self, gathered))
        try:
            yield
        finally:
            _current.reset(token)
        *first, last = [*split_batch(gathered, weight)] or [[]]
        for part in first:
            self._publish_again(part)
        self._publish(last, together=partial(_with, verb))

    def _publish(
        self,
        publications: Sequence[Publication],
        timeout_s: float | None = None,
        now_ms: int | None = None,
        together: Callable[..., Reached] | None = None,
    ) -> list[list[str]]:
        """``together``: called instead of :func:`publish`, which it calls, to do more in the same transaction."""
        run = self._run
        timeout_s = run.environment.publish_s if timeout_s is None else timeout_s
        deadline = run.clock.monotonic() + timeout_s
        stored = [*publications]
        for number, each in enumerate(publications):
            if each.exchange:
                run.routing.prepare(each.exchange, each.routing_key)
            if len(each.payload) > INLINE_BYTES and not each.message_id:
                stored[number] = each._replace(message_id=run.ids())
        doubt: Doubt[Reached] | None = Doubt() if run.may_be_unknown else None
        body = partial(together or publish, publications=stored, beforehand=True)
        try:
            now_ms = run.now() if now_ms is None else now_ms
            reached, overfull = run.write(body, timeout_s, doubt=doubt, now_ms=now_ms)
            if overfull:
                for queue, own in overfull.items():
                    self._shed(queue, own, deadline - run.clock.monotonic())
            return reached
        except BaseException:  # also from outside: a signal handler's, gevent's timeout
            if doubt is not None and doubt.may_have_happened and together is None:
                self.doubts.note(publications, doubt)
            raise

    def _shed(self, queue: str, own: overflow.Load, timeout_s: float) -> None:
        """Let the oldest give way. If that fails, this publish still succeeds: the next one, or a duty, does it."""
        attempts = count()

        def body(work: Work) -> None:
            if next(attempts) < overflow.ATTEMPTS:
                overflow.shed(work, queue, own)

        try:
            self._run.write(body, min(timeout_s, SHED_TIMEOUT_S))
        except KombuFDBError as error:
            logger.debug("the queue %r is over its maximum: %s", queue, error)

    def publish_in(
        self, tr: Transaction, publications: Sequence[Publication], *, stamped: int = 0
    ) -> tuple[list[list[str]], int]:
        """:meth:`publish` in the caller's transaction, which the caller commits, and may run again.

        ``stamped``: how many messages this transaction has from earlier calls. Returns the queues reached, and the new
        number. Raises what ``publish`` raises before a commit, and ``LimitExceeded`` past
        :data:`~kombu_fdb.engine.messages.publish.MOST_STAMPED` messages. If these messages overfill a queue with
        ``drop-head``, the next publish or a duty sheds the excess. A message that a queue refuses goes into all its
        dead-letter queues in this transaction, which must have room for the copies.
        """
        for publication in publications:
            self.check(publication)
        effects = Effects(stamped)
        reached, overfull = publish(self._run.work(tr, effects), publications)
        effects.write(tr, self._run.keys)
        self._run.totals.write(tr, effects.events)  # not noted for later, as the caller may not commit
        for queue, own in overfull.items():  # only the present excess: these messages count after the commit
            self._shed(queue, overflow.Load(key=own.key), self._run.environment.call_s)
        return reached, effects.stamped

    def check(self, publication: Publication) -> None:
        """Raises ``MessageTooLarge``, and ``InvalidArgument`` or ``QueueError`` for what no store can hold."""
        check_publication(publication)
        if len(publication.payload) > self._run.environment.max_message_size:
            self._run.check_size(publication.payload)

    def bury_copy(
        self,
        queue: str,
        copy: Publication | Burial,
        deaths: Sequence[Death] = (),
        details: dict[str, Any] | None = None,
    ) -> None:
        """Store a dead letter of a message that is no longer in the store, as if it had died in ``queue`` now.

        ``deaths``: its history. A message of any size is buried in all the queues that
        :mod:`~kombu_fdb.engine.messages.bury` names, or in none. Raises what :meth:`publish` raises. Repeated calls
        with the same ``Burial`` bury once.
        """
        burial = copy if isinstance(copy, Burial) else Burial(copy)
        self.check(burial.publication)
        if not burial.begin(self._run.clock, self._run.ids):
            return
        dead = burial.publication

        def body(work: Work) -> None:
            bury(work, dead_of(work, queue, dead, deaths), "rejected", details, payload=dead.payload)

        self._run.write(body, self._run.environment.publish_s, doubt=burial.doubt, now_ms=self._run.now())


def _with(verb: Callable[[Transaction], None], work: Work, **publishing: Any) -> Reached:
    verb(work.tr)
    return publish(work, **publishing)
