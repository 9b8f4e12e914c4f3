"""Scan: look through a queue of dead letters, in parts, for those that are wanted.

A queue of dead letters is ``<queue>.dead``, or whatever queue a dead-letter exchange leads to. It is walked from its
first key to its last, in transactions of bounded size, by a cursor in the hands of the caller: a caller that is killed
between two parts has lost a cursor and nothing else, and begins again at the front.

A walk is bounded by the stamp of the last message that had come when it began. What dies meanwhile has a later stamp
and is not met: a walk over a queue that grows as fast as it is walked comes to its end, and a letter that is replayed
and dies again is not replayed again by the same walk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kombu_fdb.engine.inspection import browse
from kombu_fdb.engine.stored.whereabouts import STAMP_BYTES
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import Record, decode_record
from kombu_fdb.keyspace.tuples import range_of
from kombu_fdb.model import Peeked
from kombu_fdb.primitives.headers import ATTEMPTS, headers_of
from kombu_fdb.store.protocol import KeyValue

LETTERS_PER_TRANSACTION = 200
#: Of records and of payloads looked into; FoundationDB's transactions hold 10,000,000 B, and last 5 s.
BYTES_PER_TRANSACTION = 2_000_000
#: The first bytes of a stamp: the version of the commit.
VERSION_BYTES = 10
#: The bound of a walk through a queue that is not there: no bound.
NO_LAST = b"\xff" * VERSION_BYTES


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which dead letters; by default all. All conditions must hold; those on a death are on the last one.

    ``error``: the class of the exception, with or without its module. ``task``: a Celery task's name. ``key``: the
    fairness key, "" for none. ``died_after_ms``, ``died_before_ms``: wall clock. ``where``: any condition on a letter.
    """

    message_id: bytes = b""
    reason: str | None = None
    queue: str | None = None
    key: str | None = None
    task: str | None = None
    error: str | None = None
    died_after_ms: int | None = None
    died_before_ms: int | None = None
    where: Callable[[Peeked], bool] | None = None

    @property
    def looks_into_payloads(self) -> bool:
        return self.where is not None or self.task is not None

    def matches(self, record: Record | None) -> bool:
        """As far as the record tells. One that can't be read is wanted if all are."""
        if record is None:
            return self == Wanted()
        return (
            self.message_id in (b"", record.message_id)
            and self.key in (None, record.key)
            and (not self._asks_for_a_death() or self._died_so(record))
        )

    def _asks_for_a_death(self) -> bool:
        asked = (self.reason, self.queue, self.error, self.died_after_ms, self.died_before_ms)
        return any(each is not None for each in asked)

    def _died_so(self, record: Record) -> bool:
        if not record.deaths:
            return False
        death = record.deaths[0]
        return (
            self.reason in (None, death.reason)
            and self.queue in (None, death.queue)
            and (self.error is None or _is_class(death.details.get("error_class"), self.error))
            and (self.died_after_ms is None or death.time_ms >= self.died_after_ms)
            and (self.died_before_ms is None or death.time_ms < self.died_before_ms)
        )

    def matches_payload(self, letter: Peeked) -> bool:
        """The rest."""
        return (self.task is None or task_of(letter) == self.task) and (self.where is None or self.where(letter))


def _is_class(found: object, wanted: str) -> bool:
    return isinstance(found, str) and (found == wanted or found.endswith("." + wanted))


def task_of(letter: Peeked) -> str:
    """The name of the Celery task the letter is of; "" if it is of none."""
    return str(headers_of(letter.payload).get("task") or "")


def error_of(message: Peeked) -> str:
    """The class of the exception it died of last; of one that never died and waits to be retried, of its last attempt.

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


class Walk(NamedTuple):
    """Through which queue, for which letters, and the version of the last one that had come when it began."""

    dead: str
    wanted: Wanted
    last: bytes


class Letter(NamedTuple):
    """A dead letter where it stands. ``record``: None if it can't be read; then it is only looked at, or discarded."""

    key: bytes
    value: bytes
    record: Record | None


class Part(NamedTuple):
    """What one transaction found, and the cursor to go on with; b"" at the end."""

    letters: list[Letter]
    cursor: bytes


def look_through(work: Work, walk: Walk, cursor: bytes, limit: int) -> Part:
    """One part of the walk, up to ``limit`` letters. Snapshot reads, and all of them before the caller's first write.

    ``cursor``: b"" to begin with. Whatever ``where`` raises comes out of here.
    """
    most = LETTERS_PER_TRANSACTION if walk.wanted != Wanted() else min(limit + 1, LETTERS_PER_TRANSACTION)
    rows, following = _rows(work, walk.dead, cursor, most)
    found: list[Letter] = []
    size = 0
    for key, value in rows:
        if size > BYTES_PER_TRANSACTION or len(found) == limit:
            return Part(found, key)
        size += len(value)
        letter = Letter(key, value, _readable(value))
        if key[-STAMP_BYTES:][:VERSION_BYTES] <= walk.last and walk.wanted.matches(letter.record):
            if walk.wanted.looks_into_payloads:
                size += letter.record.size if letter.record is not None else 0
                if not walk.wanted.matches_payload(browse.look(work, walk.dead, (key, value))):
                    continue
            found.append(letter)
    return Part(found, following)


def _rows(work: Work, dead: str, cursor: bytes, most: int) -> tuple[list[KeyValue], bytes]:
    """The next rows, first of the messages without a key (as which all letters come), and where to go on.

    A cursor of another queue, which a walk of this one never gave out, is its beginning.
    """
    ready, keyed = range_of(work.keys.ready(dead)), range_of(work.keys.keyed(dead))
    whole = [keyed] if keyed[0] <= cursor < keyed[1] else [ready, keyed]
    begin = cursor if whole[0][0] <= cursor < whole[0][1] else whole[0][0]
    ranges = [(begin, whole[0][1]), *whole[1:]]
    found = work.tr.get_ranges([(*each, most) for each in ranges], snapshot=True)
    rows = [row for part in found for row in part][:most]
    return rows, rows[-1][0] + b"\x00" if len(rows) == most else b""


def _readable(value: bytes) -> Record | None:
    try:
        return decode_record(value)
    except FormatError:
        return None
