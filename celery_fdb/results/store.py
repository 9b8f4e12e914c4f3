"""The only way to the stored results: opens transactions, runs the verbs in them, and sweeps the expired.

Every verb may happen twice: it looks at what stands in the store, and finds there what an earlier run of unknown
outcome has done. So no commit tokens are written (``Retry.repeat``); after ``CommitUnknown`` the caller calls again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from celery.states import READY_STATES, RETRY, SUCCESS

from celery_fdb import brokers
from celery_fdb.results import chords, records
from kombu_fdb.keyspace.layout import range_of, readable
from kombu_fdb.model import SessionFacts
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.store.protocol import Database, Transaction, Watch
from kombu_fdb.store.retry import Retry
from kombu_fdb.transport.errors import operational_errors

# -- the store ---------------------------------------------------------------------------------------------------------


#: Deleted in one transaction.
SWEEP_ROWS = 200


def sweep_part(tr: Transaction, keys: records.ResultKeys, now_ms: int) -> int:
    """Delete up to :data:`SWEEP_ROWS` of what has expired. Returns how many."""
    rows = tr.get_range(*keys.expired_until(now_ms), limit=SWEEP_ROWS)
    for key, _ in rows:
        tr.clear(key)
    for (_expires_ms, kind, id_), _ in readable(rows, keys.split_expiry):
        if kind == "chord":
            chords.expire(tr, keys, id_)
        else:
            records.clear(tr, keys.record(kind, id_))
    return len(rows)


T = TypeVar("T")

#: For how many seconds the time by the workers' clocks is believed.
ASK_S = 60.0


#: A result as it stands, and a watch on it unless it is ready.
Sighting = tuple[records.StoredResult | None, Watch | None]


class ResultStore:
    """Results, groups and chords of one namespace. Thread-safe.

    ``timeout_s``: deadline of each call. Every method raises kombu's ``OperationalError`` when it passes, in the commit
    or before; ``LimitExceeded`` for what no transaction holds.
    """

    def __init__(
        self,
        database: Database,
        namespace: str,
        *,
        clock: Clock,
        timeout_s: float = 5.0,
        sessions: Callable[[], Sequence[SessionFacts]] = list,
    ) -> None:
        """``sessions`` lists the consumers of the same store, and raises a ``StoreError``."""
        self.keys = records.ResultKeys(namespace)
        self._sessions = sessions
        #: The time by most workers' clocks, and by this process's monotonic clock, when they were asked.
        self._asked: tuple[int, float] | None = None
        self._clock = clock
        self._timeout_s = timeout_s
        self._retry = Retry(database, clock, random.Random())

    # -- results -----------------------------------------------------------------------------------------------------

    def store(
        self, task_id: str, state: str, payload: bytes, expires_ms: int, part: chords.ChordPart | None = None
    ) -> bool:
        """Set a task's state, unless the stored one lasts, and add its part to a chord, in one transaction.

        ``expires_ms``: moment by the wall clock, 0 for never. Returns whether the part was added to its open chord.
        """

        def body(tr: Transaction) -> bool:
            self._replace(tr, "task", task_id, state, payload, expires_ms)
            return part is not None and chords.add(tr, self.keys, part, self._now())

        return self._write(body)

    def _replace(self, tr: Transaction, kind: str, id_: str, state: str, payload: bytes, expires_ms: int) -> None:
        tr.fill(moving=kind == "task")  # a task with a result has a message to acknowledge, which makes room
        key = self.keys.record(kind, id_)
        value = tr.get(key)
        old = None if value is None else records.readable(value)
        # A retry is published before its RETRY is stored, and may have ended by then.
        lasting = READY_STATES if state == RETRY else {SUCCESS}
        if old is not None and old.state in lasting and kind == "task":
            return
        if value is not None and (old is None or old.chunks):
            tr.clear_range(*range_of(key))
        records.move_expiry(tr, self.keys, kind, id_, old.expires_ms if old else 0, expires_ms)
        records.write(tr, key, state, payload, expires_ms=expires_ms, ring=kind == "task")

    def load(self, task_id: str) -> records.StoredResult | None:
        return self._read(lambda tr: records.read(tr, self.keys.task(task_id)))

    def exists(self, task_id: str) -> bool:
        return self._read(lambda tr: tr.get(self.keys.task(task_id), snapshot=True)) is not None

    @operational_errors
    def look(self, task_ids: Sequence[str], *, timeout_s: float) -> list[Sighting]:
        """Look at several results as they stand now. Later changes fire the watches."""

        def body(tr: Transaction) -> list[Sighting]:
            values = tr.get_many([self.keys.task(task_id) for task_id in task_ids], snapshot=True)
            return [self._sight(tr, task_id, value) for task_id, value in zip(task_ids, values, strict=True)]

        return self._retry.read(body, timeout_s=timeout_s)

    def _sight(self, tr: Transaction, task_id: str, value: bytes | None) -> Sighting:
        key = self.keys.task(task_id)
        record = None if value is None else records.decode(value)
        if record is not None and record.chunks:
            record = records.join(record, tr.get_range(*range_of(key), limit=record.chunks, snapshot=True))
        ready = record is not None and record.state in READY_STATES
        return record, None if ready else tr.watch(key)

    def forget(self, task_id: str) -> None:
        self._write(lambda tr: self._delete(tr, "task", task_id))

    def _delete(self, tr: Transaction, kind: str, id_: str) -> None:
        records.delete_record(tr, self.keys, kind, id_, tr.get(self.keys.record(kind, id_)))

    # -- groups ------------------------------------------------------------------------------------------------------

    def save_group(self, group_id: str, payload: bytes, expires_ms: int) -> None:
        self._write(lambda tr: self._replace(tr, "group", group_id, "", payload, expires_ms))

    def load_group(self, group_id: str) -> records.StoredResult | None:
        return self._read(lambda tr: records.read(tr, self.keys.group(group_id)))

    def delete_group(self, group_id: str) -> None:
        self._write(lambda tr: self._delete(tr, "group", group_id))

    # -- chords ------------------------------------------------------------------------------------------------------

    def open_chord(self, group_id: str, body: bytes | None, expires_ms: int) -> None:
        """``body``: the signature, for the process that has to publish it if the worker of the last part can't."""
        now_ms = self._now()
        self._write(lambda tr: chords.open_(tr, self.keys, group_id, body, expires_ms=expires_ms, now_ms=now_ms))

    def enlarge_chord(self, group_id: str, *, size: int | None = None, joined: str | None = None) -> None:
        """``size``: how many header tasks there are; ``joined``: the id of one more."""
        self._write(lambda tr: chords.enlarge(tr, self.keys, group_id, size=size, joined=joined))

    def add_part(self, part: chords.ChordPart) -> bool:
        """Add a part without storing a result. False if the chord is over."""
        return self._write(lambda tr: chords.add(tr, self.keys, part, self._now()))

    def claim_chord(self, part: chords.ChordPart) -> chords.ChordStep:
        """Claim the chord for the worker of a part. Returns what that worker is to do now."""
        return self._write(lambda tr: chords.claim(tr, self.keys, part, self._now()))

    def renew_claim(self, group_id: str) -> None:
        """Keep the claim while the chord's error callbacks run."""
        self._write(lambda tr: chords.renew(tr, self.keys, group_id, self._now()))

    def parts(self, group_id: str) -> list[chords.ChordPart]:
        """What the header tasks returned, in the order of the header. Raises ``ChordOver``."""
        found: list[chords.ChordPart] = []
        begin: bytes | None = b""
        while begin is not None:
            more, begin = self._read(partial(chords.parts, keys=self.keys, group_id=group_id, begin=begin))
            found += more
        return found

    def chord_body(self, group_id: str) -> bytes | None:
        record = self._read(lambda tr: records.read(tr, self.keys.body(group_id)))
        return None if record is None else record.payload

    def finishing(self, group_id: str) -> Callable[[Transaction], None]:
        """The verb that deletes the chord in the transaction that publishes its body. It raises ``ChordOver``."""
        return lambda tr: chords.finish(tr, self.keys, group_id)

    def abandoned_chords(self) -> list[str]:
        """Complete chords whose body was not published in time; the caller has to do it now."""
        # Looked at first, without a write transaction: nearly always there are none.
        rows = self._read(lambda tr: tr.get_range(*self.keys.looks_until(self._now()), limit=1, snapshot=True))
        return self._write(lambda tr: chords.abandoned(tr, self.keys, self._now())) if rows else []

    # -- expiry ------------------------------------------------------------------------------------------------------

    def sweep(self, *, parts: int | None = None) -> int:
        """Delete what has expired, in at most so many transactions. Returns how many results, groups and chords."""
        total = done = 0
        now_ms = self._now()
        if not self._has_expired(now_ms):  # nearly always
            return 0
        now_ms = min(now_ms, self._by_most())
        while (parts is None or done < parts) and self._has_expired(now_ms):
            total += self._write(lambda tr: sweep_part(tr, self.keys, now_ms))
            done += 1
        return total

    def _by_most(self) -> int:
        """The time by most workers' clocks, asked now and then; without workers, by this process's own clock."""
        now_s = self._clock.monotonic()
        if self._asked is None or now_s - self._asked[1] >= ASK_S:
            self._asked = brokers.common_ms(self._sessions(), self._now()), now_s
        common, asked_s = self._asked
        return common + int(1000 * (now_s - asked_s))

    def _has_expired(self, now_ms: int) -> bool:
        return bool(self._read(lambda tr: tr.get_range(*self.keys.expired_until(now_ms), limit=1, snapshot=True)))

    # -- how ---------------------------------------------------------------------------------------------------------

    def _now(self) -> int:
        return self._clock.wall_ms()

    @operational_errors
    def _read(self, verb: Callable[[Transaction], T]) -> T:
        return self._retry.read(verb, timeout_s=self._timeout_s)

    @operational_errors
    def _write(self, verb: Callable[[Transaction], T]) -> T:
        return self._retry.repeat(verb, timeout_s=self._timeout_s)
