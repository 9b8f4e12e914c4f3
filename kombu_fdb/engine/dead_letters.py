"""Dead letters: found in parts, replayed or discarded, and trimmed.

A walk looks through a queue of dead letters for those that match. Such a queue is ``<queue>.dead``, or any queue to
which a dead-letter exchange leads; ``messages/bury.py`` says how a message gets there. The walk runs from the first key
to the last in transactions of bounded size, and the caller has the cursor. A caller that is killed between two parts
loses only the cursor, and the next call begins at the front.

A walk ends at the stamp of the last message that was there when it began. A message that dies during the walk has a
later stamp, and the walk does not see it. So a walk ends even if the queue grows as fast as it is read; and it replays
no letter twice, even one that dies again.

Replay moves dead letters to the queue they died in; discard deletes them. A replayed message moves to the end of its
key's messages in the queue of its last death (or in another target queue), in one transaction (ONE-PLACE). It keeps its
id, payload, key, priority and history of deaths; its redelivery count restarts at zero. The replay of a single letter
may replace its payload (:func:`replay_row`). A dead letter keeps no time to live: from its replay on, it has the
queue's ``x-message-ttl``, if there is one.

States of a letter: *dead*, then *replayed* or *discarded*. Each part of a replay or a discard is one transaction, so a
letter is never in two places, or in none, and the counts are exact. What happens at each failure:

* the caller dies between two parts: the parts that committed stay; the next call begins at the front.
* the commit's answer is lost: the retry finds that it committed, or runs the part again (``store/retry.py``).
* another consumer or operator claims, replays or discards the same letter: one of the two gets it, the other retries
  its part.
* the queue to which a letter should return has been deleted: ``QueueNotFound``, and the part moves nothing.

Trim deletes, in parts, expired letters of ``<queue>.dead`` and the oldest beyond its length. The duties trim
periodically. A burial does not trim, so it never conflicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kombu_fdb.engine import parts
from kombu_fdb.engine.inspection import browse, inspect
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX, drop_expired
from kombu_fdb.engine.messages.message import delete, forget, put_ready, rank_in, take_out, with_payload
from kombu_fdb.engine.transactions import Verbs, read, write
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import QueueError, QueueNotFound
from kombu_fdb.keyspace.codec import ATTEMPTS, Message, Record, decode_amount, end_of_life, headers_of
from kombu_fdb.keyspace.layout import priority_of, range_of, read_or
from kombu_fdb.model import NO_PRIORITY, Death, DeliveryInfo, Peeked
from kombu_fdb.store.protocol import KeyValue

# -- walk --------------------------------------------------------------------------------------------------------------


LETTERS_PER_TRANSACTION = 200
#: Limits for records, and for payloads that are read: FoundationDB's transactions hold 10,000,000 B, and last 5 s.
BYTES_PER_TRANSACTION = 2_000_000


@dataclass(frozen=True, slots=True)
class LetterWalk:
    """A walk through the letters that were in the queue ``dead`` at the version ``last`` and meet all conditions.

    Without conditions, all letters match. Conditions on a death apply to the last one. ``error``: the class of the
    exception, with or without its module. ``task``: a Celery task's name. ``key``: the fairness key, "" for none.
    ``died_after_ms``, ``died_before_ms``: wall clock. ``where``: any condition on a letter.
    """

    dead: str
    last: bytes
    message_id: bytes = b""
    reason: str | None = None
    queue: str | None = None
    key: str | None = None
    task: str | None = None
    error: str | None = None
    died_after_ms: int | None = None
    died_before_ms: int | None = None
    where: Callable[[Peeked], bool] | None = None

    def mark(self, cursor: bytes) -> bytes | None:
        """Where the next part continues (:meth:`after`); None at the end."""
        return parts.mark(self.last, cursor) or None

    def after(self, mark: bytes) -> tuple[LetterWalk, bytes]:
        """The walk with the end that the mark names, and the cursor; for b"", this walk from its beginning."""
        last, cursor = parts.split_mark(mark)
        return (replace(self, last=last) if mark else self), cursor

    @property
    def looks_into_payloads(self) -> bool:
        return self.where is not None or self.task is not None

    @property
    def has_conditions(self) -> bool:
        return self != LetterWalk(self.dead, self.last)

    def matches(self, record: Record | Peeked | None) -> bool:
        """Whether it meets the conditions on a record. An unreadable one does if there are no conditions at all."""
        if record is None:
            return not self.has_conditions
        return (
            self.message_id in (b"", record.message_id)
            and self.key in (None, record.key)
            and self._died_so(record.deaths[0] if record.deaths else None)
        )

    def _died_so(self, death: Death | None) -> bool:
        if death is None:
            asked = (self.reason, self.queue, self.error, self.died_after_ms, self.died_before_ms)
            return all(each is None for each in asked)
        return (
            self.reason in (None, death.reason)
            and self.queue in (None, death.queue)
            and (self.error is None or is_class(death.details.get("error_class"), self.error))
            and (self.died_after_ms is None or death.time_ms >= self.died_after_ms)
            and (self.died_before_ms is None or death.time_ms < self.died_before_ms)
        )

    def matches_payload(self, letter: Peeked) -> bool:
        """Whether the payload meets the conditions on it."""
        is_of_task = self.task is None or self.task in task_names_of(letter)
        return is_of_task and (self.where is None or self.where(letter))


def is_class(found: object, wanted: str) -> bool:
    """Whether the class of an exception is the wanted one, which may omit its module."""
    return isinstance(found, str) and (found == wanted or (wanted != "" and found.endswith(f".{wanted}")))


def task_of(letter: Peeked) -> str:
    """The name of the letter's Celery task, as Celery's log gives it; "" if it has none."""
    return task_names_of(letter)[0]


def task_names_of(letter: Peeked) -> tuple[str, str]:
    """The name in Celery's log, which a publisher may choose (``shadow``), and the task's own name."""
    headers = headers_of(letter.payload)
    task = str(headers.get("task") or "")
    return str(headers.get("shadow") or task) if task else "", task


def error_of(message: Peeked) -> str:
    """The exception class of its last death or, if it waits for its next retry, of its last attempt.

    "" if there was none.
    """
    if message.deaths:
        error = message.deaths[0].details.get("error_class")
    else:
        attempts = headers_of(message.payload).get(ATTEMPTS)
        last = attempts[-1] if isinstance(attempts, list) and attempts else None
        told = last.get("error") if isinstance(last, dict) else None
        error = told.partition(": ")[0] if isinstance(told, str) else None
    return error if isinstance(error, str) else ""


#: A dead letter in its place, and its record: None if it can't be read; then it can only be shown or discarded.
Letter = tuple[Message[bytes], Record | None]


def look(work: Work, walk: LetterWalk, cursor: bytes, limit: int) -> tuple[list[Peeked], bytes]:
    """Up to ``limit`` dead letters, unchanged, and the next cursor; b"" begins and ends a walk."""
    letters, following = look_through(work, walk, cursor, limit)
    return browse.look_all(work, [(walk.dead, (message.place, message.value)) for message, _ in letters]), following


def look_through(work: Work, walk: LetterWalk, cursor: bytes, limit: int) -> tuple[list[Letter], bytes]:
    """Up to ``limit`` letters of one part of the walk, and the next cursor; b"" begins and ends a walk.

    Snapshot reads, and all of them before the caller's first write. What ``where`` raises is passed on.
    """
    most = LETTERS_PER_TRANSACTION if walk.has_conditions else min(limit + 1, LETTERS_PER_TRANSACTION)
    rows, following = _rows(work, walk.dead, cursor, most)
    found, read = list[Letter](), list[Letter]()
    size = 0
    for key, value in rows:
        if size > BYTES_PER_TRANSACTION or len(found) + len(read) == limit:
            found, read = found + _matching(work, walk, read), []
            if size > BYTES_PER_TRANSACTION or len(found) == limit:
                return found, key
        size += len(value)
        record = read_or(None, Record.decode, value)
        if parts.came_by(walk.last, key) and walk.matches(record):
            size += record.size if record is not None and walk.looks_into_payloads else 0
            read.append((Message(walk.dead, key, value), record))
    return found + _matching(work, walk, read), following


def _matching(work: Work, walk: LetterWalk, letters: Sequence[Letter]) -> list[Letter]:
    """The letters whose payloads match as well. All payloads are read in one round trip."""
    if not walk.looks_into_payloads:
        return list(letters)
    looked_at = browse.look_all(work, [(walk.dead, (message.place, message.value)) for message, _ in letters])
    return [letter for letter, each in zip(letters, looked_at, strict=True) if walk.matches_payload(each)]


def _rows(work: Work, dead: str, cursor: bytes, most: int) -> tuple[list[KeyValue], bytes]:
    """The next rows, and where to continue. Messages without a key come first; letters arrive without one.

    A cursor from a walk of another queue counts as the beginning.
    """
    ready, keyed = range_of(work.keys.ready(dead)), range_of(work.keys.keyed(dead))
    whole = [keyed] if keyed[0] <= cursor < keyed[1] else [ready, keyed]
    begin = cursor if whole[0][0] <= cursor < whole[0][1] else whole[0][0]
    ranges = [(begin, whole[0][1]), *whole[1:]]
    found = work.tr.get_ranges([(*each, most) for each in ranges], snapshot=True)
    rows = [row for part in found for row in part][:most]
    return rows, rows[-1][0] + b"\x00" if len(rows) == most else b""


# -- replay and discard ------------------------------------------------------------------------------------------------


def replay_part(work: Work, walk: LetterWalk, cursor: bytes, limit: int, *, to: str | None = None) -> tuple[int, bytes]:
    """Replay up to ``limit`` letters of one part of a walk. Returns how many, and the next cursor; b"" at the end.

    An expired letter is dropped, and not counted. Unreadable bytes, also a newer version's, stay where they are. So do
    messages that never died, unless the queue is ``<queue>.dead`` or ``to`` names a target. Raises ``QueueNotFound``.
    """
    letters, following = look_through(work, walk, cursor, limit)
    going = []
    for message, record in letters:
        destination = _destination(walk.dead, record, to)
        if record is not None and destination is not None:
            going.append((message, record, destination))
    for queue in {queue for _, _, queue in going}:
        _require(work, queue, walk.dead)
    _take(work, walk.dead, [message for message, _, _ in going])
    back = [_replay(work, *each) for each in going]
    return sum(back), following


def replay_row(work: Work, dead: str, row: KeyValue, *, payload: bytes | None = None) -> str:
    """Replay the letter in this row, as :func:`replay_part` does. Returns its queue.

    ``payload``: replaces the letter's own, in the same transaction. Raises ``QueueNotFound``, and ``QueueError`` for a
    message that is no dead letter or has expired.
    """
    message, record = Message(dead, *row), Record.decode(row[1])
    queue = _destination(dead, record, None)
    if queue is None:
        raise QueueError("not a dead letter", queue=dead, fix="Move it to the queue that it is meant for.")
    _require(work, queue, dead)
    _take(work, dead, [message])
    if not _replay(work, message, record, queue, payload):
        raise QueueError("the dead letter has expired", queue=dead, fix="Publish it again; this one is deleted soon.")
    return queue


def discard_part(work: Work, walk: LetterWalk, cursor: bytes, limit: int) -> tuple[int, bytes]:
    """Delete up to ``limit`` letters of one part of a walk. Returns what :func:`replay_part` returns."""
    letters, following = look_through(work, walk, cursor, limit)
    _take(work, walk.dead, [message for message, _ in letters])
    for message, _ in letters:
        delete(work, message)
    return len(letters), following


def _destination(dead: str, record: Record | None, to: str | None) -> str | None:
    """The queue to which a letter is replayed; None if it stays."""
    if record is None or to is not None:
        return to
    if record.deaths:
        return record.deaths[0].queue
    return dead.removesuffix(DEAD_SUFFIX) if dead.endswith(DEAD_SUFFIX) else None


def _require(work: Work, queue: str, dead: str) -> None:
    if not inspect.exists(work, queue):
        raise QueueNotFound(
            "the queue to replay to does not exist",
            queue=queue,
            dead_queue=dead,
            fix="Declare it, or replay to another queue with to=. The dead letters stay where they are.",
        )


def _take(work: Work, dead: str, messages: Sequence[Message[bytes]]) -> None:
    take_out(work, dead, [(message.place, message.value) for message in messages])


def _replay(work: Work, message: Message[bytes], record: Record, queue: str, payload: bytes | None = None) -> bool:
    if record.has_expired(work.now_ms):
        drop_expired(work, message, record)
        return False
    forget(work, message)
    priority = record.priority or priority_of(message.place)
    rank = rank_in(work, queue, priority)
    ttl_ms = work.routing.queue(work.tr, queue).message_ttl_ms
    if payload is not None:
        record = with_payload(work, record, payload)
    kept = NO_PRIORITY if rank == work.keys.rank(priority) else priority
    alive = record._replace(
        expires_ms=end_of_life(work.now_ms, ttl_ms),
        redeliveries=0,
        seen=False,
        priority=kept,
        delivery_info=DeliveryInfo("", queue),
    )
    put_ready(work, queue, alive.key, rank, alive)
    return True


# -- trim --------------------------------------------------------------------------------------------------------------


TRIMMED_PER_TRANSACTION = 200


def trim(work: Work, limit: int, queue: str) -> int:
    """Drop expired and excess letters, those without a key first. Returns how many."""
    stored = work.tr.get(work.keys.count(queue, "ready"), snapshot=True)
    excess = decode_amount(stored)[0] - work.environment.dead_length
    ranges = [(*range_of(prefix), limit) for prefix in (work.keys.ready(queue), work.keys.keyed(queue))]
    unkeyed, keyed = work.tr.get_ranges(ranges, snapshot=True)
    dropped: list[KeyValue] = []
    for row in (unkeyed + keyed)[:limit]:
        if len(dropped) < excess or Record.known(row[1]).has_expired(work.now_ms):
            dropped.append(row)
    take_out(work, queue, dropped)
    for key, value in dropped:
        delete(work, Message(queue, key, value))
    return len(dropped)


# -- the verbs ---------------------------------------------------------------------------------------------------------


class DeadLetters(Verbs):
    """The verbs on dead letters."""

    look = read(look)
    replay_part = write(replay_part)
    discard_part = write(discard_part)
    _queues = read(inspect.queues)

    def walk(self, dead: str, **conditions: Any) -> LetterWalk:
        """A walk through a queue of dead letters as it is now: later arrivals lie beyond its end.

        ``conditions``: fields of :class:`LetterWalk`; raises ``TypeError`` for others.
        """
        walk = LetterWalk(dead, parts.NO_LAST, **conditions)  # first: a wrong condition fails without the store
        last = self._run.read(lambda work: work.tr.get(self._run.keys.bell(dead), snapshot=True))
        return walk if last is None else replace(walk, last=last)

    def replay_at(self, dead: str, position: bytes, message_id: bytes, *, payload: bytes | None = None) -> str | None:
        """Replay a dead letter at a page's position to the queue it died in; None if it has moved.

        Returns that queue. ``payload``: replaces its own. Raises ``QueueError`` for a message that is no dead letter,
        or has expired, and ``MessageTooLarge``.
        """
        self._run.check_size(payload or b"")

        def body(work: Work) -> str | None:
            row = browse.row_at(work, dead, "ready", position, message_id)
            return None if row is None else replay_row(work, dead, row, payload=payload)

        return self._run.write(body)

    def queues(self) -> list[str]:
        """The queues ``<queue>.dead``."""
        return [queue for queue in self._queues() if queue.endswith(DEAD_SUFFIX)]

    def trim_part(self, queue: str) -> int:
        """Drop some letters that a queue ``<queue>.dead`` no longer keeps. Returns how many."""
        return self._run.part(trim, TRIMMED_PER_TRANSACTION, queue)
