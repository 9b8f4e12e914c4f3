"""Transfer: a queue's messages out of one store, and into another.

Dump: all messages of a queue, in an order in which they can be stored again elsewhere. Ready messages come by rank,
oldest first. Those with a key come sub-queue after sub-queue, each oldest first, and the sub-queues in the order of
their first messages: so the keys get their first turns in the same order again. Then the delayed ones, by due time.
Leased messages, if asked for, come before all others, as ready messages with one more delivery: they were at the head
of the queue.

The dump takes many short transactions, so it may miss a message that moves, or dump it twice: dump a queue that is at
rest. What can't be read is dumped as raw bytes. A queue with messages of a newer version can't be dumped, as such a
message may have rows that this version does not know.

Restore: messages of another store are stored here, each once, however often the restore is tried. An *import* has an
id, and each of its messages a *mark* of its own. The transaction that stores a message first reads ``("imported", id,
mark)`` serializably as absent, and then sets it. So whichever process is killed at whatever moment, the next attempt
stores exactly what is missing; two concurrent attempts share the work. A message that has since been consumed keeps its
mark and is not stored again. When everything is stored, ``("import", id)`` says so, and the marks are cleared in parts,
if necessary by the duties: then the import is over, and a later attempt changes nothing. The marks of an unfinished
import stay: it may continue a year later.

Messages keep their ids, so that an id that a program has noted is still found; a message whose chunks would overwrite
another's gets a new id. The queues' limits are not checked, as no message may be lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from kombu_fdb.engine import topology
from kombu_fdb.engine.messages import message, publish
from kombu_fdb.engine.messages.message import put_delayed, put_ready, rank_in
from kombu_fdb.engine.transactions import Transactions, Verbs, read, write
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import (
    UPGRADE,
    Message,
    Record,
    decode_count,
    decode_json,
    encode_json,
)
from kombu_fdb.keyspace.layout import STAMP_BYTES, Keyspace, range_of, read_or, split_place
from kombu_fdb.model import NO_PRIORITY, Place, Rank, Stamp, StoredMessage
from kombu_fdb.primitives.ranges import LATEST_MS
from kombu_fdb.store.protocol import KeyValue

# -- dump --------------------------------------------------------------------------------------------------------------


#: Exchange, routing key, dedup id and end (wall clock, ms) of a window.
DedupEntry = tuple[str, str, str, int]

ROWS = 500
#: How many sub-queues are read side by side, and how many messages of each at a time.
SUBQUEUES, ROWS_OF_EACH = 50, 20
#: How many payloads are read in one transaction.
PAYLOAD_BYTES = 4_000_000


def _open_all(found: list[StoredMessage], work: Work) -> list[StoredMessage]:
    records = message.read_all(work, [each.payload for each in found])
    return [_open(*each) for each in zip(found, records, strict=True)]


def _open(found: StoredMessage, record: Record | FormatError) -> StoredMessage:
    if isinstance(record, FormatError):
        if Record.is_newer(found.payload):
            raise _newer(found.queue)
        return found
    return dataclasses.replace(
        found,
        payload=record.payload,
        key=record.key,
        message_id=record.message_id,
        published_ms=record.published_ms,
        expires_ms=record.expires_ms,
        redeliveries=record.redeliveries,
        ttr_ms=record.ttr_ms,
        task_id=record.task_id,
        deaths=record.deaths,
        priority_before=record.priority,
        unreadable=False,
        way=record.delivery_info,
        seen=record.seen,
    )


def _newer(queue: str) -> FormatError:
    return FormatError("the queue has messages of a newer celery-fdb", queue=queue, fix=UPGRADE)


def _parts(found: Iterable[StoredMessage]) -> Iterator[list[StoredMessage]]:
    """Parts that can each be opened in one transaction."""
    part: list[StoredMessage] = []
    size = 0
    for each in found:
        part.append(each)
        record = read_or(None, Record.decode, each.payload)
        size += len(each.payload) if record is None else record.size
        if len(part) >= ROWS or size >= PAYLOAD_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


# -- rows in their order -----------------------------------------------------------------------------------------------


def _closed(run: Transactions, queue: str, *, leased: bool) -> Iterator[StoredMessage]:
    """The messages in the order of their rows, undecoded: each payload is the bytes of the record."""
    if leased:
        yield from _leased(run, queue)
    for name, value in run.scan(range_of(run.keys.ready(queue)), ROWS):
        yield _of_row(queue, value, Keyspace.priority(_rank(run.keys.place(queue, name))))
    subqueues, misplaced = _subqueues(run, queue)
    for start in range(0, len(subqueues), SUBQUEUES):
        yield from _side_by_side(run, queue, subqueues[start : start + SUBQUEUES])
    yield from [_of_row(queue, value, NO_PRIORITY) for value in misplaced]
    for name, value in run.scan(range_of(run.keys.delayed(queue)), ROWS):
        due_ms, rank = _due(run.keys, queue, name)
        yield dataclasses.replace(_of_row(queue, value, Keyspace.priority(rank)), state="delayed", due_ms=due_ms)


def _of_row(queue: str, value: bytes, priority: int, key: str = "") -> StoredMessage:
    return StoredMessage(queue, "ready", value, priority, key=key, keyed=bool(key), unreadable=True)


def _rank(place: Place) -> Rank:
    """The rank; the last one for a place that can't be read."""
    return read_or(("", Keyspace.rank(NO_PRIORITY)), split_place, place)[1]


def _due(keys: Keyspace, queue: str, name: bytes) -> tuple[int, Rank]:
    """Due time and rank. An unreadable due time counts as the latest: too early is worse than never."""
    due_ms, rank = read_or((LATEST_MS, Keyspace.rank(NO_PRIORITY)), keys.split_delayed, queue, name)
    return min(due_ms, LATEST_MS), rank


def _leased(run: Transactions, queue: str) -> Iterator[StoredMessage]:
    found = []
    for _, value in run.scan(run.keys.all_leases, ROWS):
        try:
            name, place, record = Message.of_lease(value)
        except FormatError:  # its queue is unknown
            if read_or((None,), Message.of_lease, value, newer=True)[0] == queue:
                raise _newer(queue) from None
            continue
        if name == queue:
            found.append((place[-STAMP_BYTES:], place, record))
    for _, place, record in sorted(found):
        key, rank = split_place(place)
        yield _of_row(queue, Record.redelivered(record), Keyspace.priority(rank), key)


def _subqueues(run: Transactions, queue: str) -> tuple[list[tuple[str, Rank]], list[bytes]]:
    """Key and rank of each sub-queue, in the order of their first messages; and the messages in no sub-queue."""
    heads: dict[tuple[str, Rank], Stamp] = {}
    misplaced = []
    for name, value in run.scan(range_of(run.keys.keyed(queue)), ROWS):
        try:
            subqueue = split_place(run.keys.place(queue, name))
        except FormatError:
            misplaced.append(value)
            continue
        heads.setdefault(subqueue, Stamp(name[-STAMP_BYTES:]))
    return sorted(heads, key=lambda each: heads[each]), misplaced


def _side_by_side(run: Transactions, queue: str, group: list[tuple[str, Rank]]) -> Iterator[StoredMessage]:
    left = {each: range_of(run.keys.items(queue, *each)) for each in group}
    while left:
        ranges = [(*whole, ROWS_OF_EACH) for whole in left.values()]
        parts = run.read(partial(_read_ranges, ranges))
        for (key, rank), rows in zip(list(left), parts, strict=True):
            yield from [_of_row(queue, value, Keyspace.priority(rank), key) for _, value in rows]
            if len(rows) < ROWS_OF_EACH:
                del left[key, rank]
            else:
                left[key, rank] = rows[-1][0] + b"\x00", left[key, rank][1]


def _read_ranges(ranges: list[tuple[bytes, bytes, int]], work: Work) -> list[list[KeyValue]]:
    return work.tr.get_ranges(ranges, snapshot=True)


# -- restore -----------------------------------------------------------------------------------------------------------


MESSAGES_PER_TRANSACTION = 500
MARKS_PER_TRANSACTION = 5_000


def state(work: Work, import_id: bytes) -> dict[str, Any] | None:
    """What :func:`finish` noted of an import; None if it is new or under way. Raises ``FormatError``."""
    value = work.tr.get(work.keys.import_(import_id))
    facts = None if value is None else decode_json(value)
    if facts is not None and not isinstance(facts, dict):
        raise FormatError("unreadable import record", value=str(facts)[:80])
    return facts


def restore(work: Work, import_id: bytes, messages: Sequence[tuple[bytes, StoredMessage]]) -> int:
    """Store the messages whose marks are not set yet, in this order. Returns how many."""
    work.tr.fill()
    marks = [work.keys.imported(import_id, mark) for mark, _ in messages]
    firsts = [work.keys.body(message.message_id, 0) for _, message in messages]
    over, *found = work.tr.get_many([work.keys.import_(import_id), *marks, *firsts])
    if over is not None:  # another process has finished it: its marks are cleared, or about to be
        return 0
    known, taken = found[: len(marks)], found[len(marks) :]
    stored = 0
    for key, (_, stray), mark, body in zip(marks, messages, known, taken, strict=True):
        if mark is None:
            work.tr.set(key, b"")
            message_id = work.environment.ids() if body is not None or not stray.message_id else stray.message_id
            _store(work, stray, message_id)
            stored += 1
    return stored


def _store(work: Work, message: StoredMessage, message_id: bytes) -> None:
    stored = message.payload if message.unreadable else Record.of_stored(message, message_id)
    rank = rank_in(work, message.queue, message.priority)
    if message.state == "delayed":
        put_delayed(work, message.queue, rank, message.due_ms, stored)
    else:
        put_ready(work, message.queue, message.key if message.keyed else "", rank, stored)


def finish(work: Work, import_id: bytes, facts: dict[str, Any]) -> None:
    """Note that the import is over."""
    work.tr.set(work.keys.import_(import_id), encode_json(facts))


def clear_marks(work: Work, cursor: bytes = b"") -> bytes:
    """Clear some marks of the next import after the cursor, if it is over. Returns the next cursor, b"" at the end."""
    begin, end = work.keys.every_imported
    first = work.tr.get_range(max(begin, cursor), end, limit=1, snapshot=True)
    if not first:
        return b""
    for (import_id, _mark), _ in work.keys.read(first, bytes, bytes):
        behind = work.keys.all_imported(import_id)[1]
        if work.tr.get(work.keys.import_(import_id), snapshot=True) is None:
            return behind
        rows = work.tr.get_range(first[0][0], behind, limit=MARKS_PER_TRANSACTION, snapshot=True)
        work.tr.clear_range(first[0][0], rows[-1][0] + b"\x00")
        return rows[-1][0] + b"\x00"
    return first[0][0] + b"\x00"


# -- the verbs ---------------------------------------------------------------------------------------------------------


#: The limits for one :meth:`Transfer.restore`: messages, and their bytes.
MOST_RESTORED = MESSAGES_PER_TRANSACTION, publish.BATCH_BYTES


class Transfer(Verbs):
    """The verbs on one store as source or target. Each may be called again after any failure."""

    restore_dedups = write(publish.restore)
    bind = write(topology.bind)
    finished = read(state)
    forget_marks_part = write(clear_marks)

    def dump(self, queue: str, *, leased: bool = False) -> Iterator[StoredMessage]:
        """Every message of a queue at rest, in the order in which to store them again.

        ``leased``: includes leased ones, as ready ones. Raises ``FormatError`` if there are messages of a newer
        version.
        """
        run = self._run
        if decode_count(run.read(lambda work: work.tr.get(run.keys.count(queue, "newer"), snapshot=True))):
            raise _newer(queue)
        for part in _parts(_closed(run, queue, leased=leased)):
            yield from run.read(partial(_open_all, part))

    def dedups(self) -> Iterator[DedupEntry]:
        """Exchange, routing key, dedup id and end (wall clock, ms) of each window that may still be open."""
        rows = self._run.scan(self._run.keys.all_dedups, ROWS)
        for (exchange, routing_key, dedup_id), value in self._run.keys.read(rows, str, str, str):
            yield exchange, routing_key, dedup_id, publish.decode_end(value)

    def restore(self, import_id: bytes, messages: Sequence[tuple[bytes, StoredMessage]]) -> int:
        """Store those messages of another store, each with its mark, that are not here yet, in one transaction.

        Returns how many were stored. Up to :data:`MOST_RESTORED` together.
        """
        return self._run.write(lambda work: restore(work, import_id, messages), self._run.environment.publish_s)

    def finish(self, import_id: bytes, facts: dict[str, Any]) -> None:
        """Note that everything is here, and clear the marks; if this is killed, the duties clear them. Idempotent."""
        self._run.write(lambda work: finish(work, import_id, facts))
        cursor, end = self._run.keys.all_imported(import_id)
        while b"" < cursor < end:
            cursor = self.forget_marks_part(cursor)
