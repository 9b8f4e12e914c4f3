"""What beats tell of their schedules, in the broker's store: one row an entry.

===================  ==========================================  ==============================
key                  value                                       written by
===================  ==========================================  ==============================
``("entry", name)``  JSON: the fields of :class:`.entry.Told`    a beat; cleared by a later one
===================  ==========================================  ==============================

All keys are behind ``("celery-fdb", namespace, "schedule")``. Several beats with the same entries overwrite each
other's rows, and the last one to speak is right. An entry that a beat had and has no more is cleared by that beat; one
that is gone since beat was started anew stays, is told of by no beat, and is cleared by a beat after :data:`KEPT_S`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import partial

from celery_fdb.schedules.entry import Told, pack, unpack
from kombu_fdb import Broker
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.tuples import pack as pack_key
from kombu_fdb.keyspace.tuples import range_of, unpack_as
from kombu_fdb.primitives.clock import Clock, SystemClock
from kombu_fdb.store.protocol import Database, KeyValue, Transaction
from kombu_fdb.store.retry import Retry
from kombu_fdb.store.tokens import CommitTokens

#: That are read, and that one beat tells of.
MOST_ENTRIES = 1_000
#: Seconds for which an entry is kept that no beat tells of.
KEPT_S = 7 * 86_400.0


class ScheduleStore:
    """Of one namespace. Thread-safe. ``timeout_s``: deadline of each call, which then raises ``StoreUnavailable``."""

    def __init__(self, database: Database, namespace: str, *, clock: Clock, timeout_s: float) -> None:
        self._prefix = pack_key("celery-fdb", namespace, "schedule", "entry")
        self._timeout_s = timeout_s
        self._retry = Retry(database, clock, CommitTokens(_no_token), random.Random())

    def tell(self, entries: Iterable[Told], gone: Iterable[str] = ()) -> None:
        """Write these, and clear the others. Twice is as good as once."""

        def body(tr: Transaction) -> None:
            for name in gone:
                tr.clear(self._key(name))
            for each in entries:
                tr.fill()
                tr.set(self._key(each.name), pack(each))

        self._retry.repeat(body, timeout_s=self._timeout_s)

    def told(self) -> list[Told]:
        """All there are, by name. What can't be read is left out."""
        rows = self._page(*range_of(self._prefix))
        return [told for key, value in rows if (told := self._readable(key, value)) is not None]

    def forget_old(self, now_ms: int) -> Sequence[str]:
        """Clear entries that no beat has told of for :data:`KEPT_S`, in parts. Returns their names.

        Each part looks again as it clears: a beat may have told of an entry since it was read.
        """
        begin, end = range_of(self._prefix)
        forgotten: list[str] = []
        while rows := self._page(begin, end):
            old = list(self._old(rows, now_ms))
            if old:
                forgotten += self._retry.repeat(partial(self._clear_old, old, now_ms), timeout_s=self._timeout_s)
            begin = rows[-1][0] + b"\0"
        return forgotten

    def _clear_old(self, keys: Sequence[bytes], now_ms: int, tr: Transaction) -> list[str]:
        values = zip(keys, tr.get_many(keys), strict=True)
        old = self._old([(key, value) for key, value in values if value is not None], now_ms)
        for key in old:
            tr.clear(key)
        return list(old.values())

    def _old(self, rows: Iterable[KeyValue], now_ms: int) -> dict[bytes, str]:
        """The names of those that are, by key."""
        told = ((key, self._readable(key, value)) for key, value in rows)
        return {key: each.name for key, each in told if each is not None and now_ms - each.told_ms > KEPT_S * 1000}

    def _page(self, begin: bytes, end: bytes) -> list[KeyValue]:
        return self._retry.read(
            lambda tr: tr.get_range(begin, end, limit=MOST_ENTRIES, snapshot=True), timeout_s=self._timeout_s
        )

    def _key(self, name: str) -> bytes:
        return self._prefix + pack_key(name)

    def _readable(self, key: bytes, value: bytes) -> Told | None:
        try:
            return unpack(str(unpack_as(key[len(self._prefix) :], str)[0]), value)
        except FormatError:
            return None


def _no_token(slot: int) -> bytes:
    raise AssertionError(slot)


def schedule_of(broker: Broker, *, timeout_s: float | None = None) -> ScheduleStore:
    """What beats have told a broker."""
    timeout_s = broker.options.operation_timeout if timeout_s is None else timeout_s
    return ScheduleStore(broker.database, broker.location.namespace, clock=SystemClock(), timeout_s=timeout_s)
