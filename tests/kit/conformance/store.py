"""What every store must do, as a pytest class: derive from :class:`StoreConformance` and give it a ``database``.

Where stores differ by nature they say so through a :class:`Capability` with a reason, and the test then checks what
takes its place; nothing is skipped. Every test works below a random prefix that is cleared at its end, so a store that
others use can be tested too.
"""

from __future__ import annotations

import os
import random
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import pytest

from kit.frames import keeps_frames
from kombu_fdb.errors import Conflict, LimitExceeded, StoreError, StoreUnavailable, TransactionTooOld
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.store.protocol import KEY_BYTES, TRANSACTION_BYTES, VALUE_BYTES, Database, Transaction, Watch
from kombu_fdb.store.retry import Retry

T = TypeVar("T")

#: For everything here; passes take milliseconds.
TIMEOUT_S = 20.0
#: Long enough to be refused, short enough to wait for.
REFUSAL_S = 0.05


@dataclass(frozen=True, slots=True)
class Capability:
    """Whether a store does something, and if not, why."""

    present: bool = True
    reason: str = ""

    def __bool__(self) -> bool:
        return self.present


def lacks(reason: str) -> Capability:
    return Capability(present=False, reason=reason)


class Keys:
    """Keys below one prefix."""

    def __init__(self, prefix: bytes) -> None:
        self.prefix = prefix

    def __call__(self, name: bytes) -> bytes:
        return self.prefix + name

    def range(self, begin: bytes = b"", end: bytes = b"\xff") -> tuple[bytes, bytes]:
        return self.prefix + begin, self.prefix + end

    def strip(self, rows: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        return [(key.removeprefix(self.prefix), value) for key, value in rows]


def retry_on(database: Database, prefix: bytes) -> Retry:
    return Retry(
        database,
        Clock(),
        random.Random(0),
        token_key=lambda number: prefix + b"token/" + struct.pack(">I", number),
    )


def commit(database: Database, body: Callable[[Transaction], T]) -> T:
    """Run ``body`` in one transaction, once."""
    tr = database.begin(timeout_s=TIMEOUT_S)
    try:
        result = body(tr)
        tr.commit()
    finally:
        tr.cancel()
    return result


def read(database: Database, key: bytes) -> bytes | None:
    return commit(database, lambda tr: tr.get(key))


def arm(database: Database, key: bytes) -> tuple[Watch, threading.Event]:
    tr = database.begin(timeout_s=TIMEOUT_S, read_only=True)
    watch = tr.watch(key)
    tr.commit()
    fired = threading.Event()
    watch.on_fire(fired.set)
    return watch, fired


def number(value: bytes | None) -> int:
    return 0 if value is None else int.from_bytes(value, "little", signed=True)


class StoreConformance:
    """Fixtures to give: ``database``; ``second_handle`` if the store can be opened twice."""

    #: Transactions run side by side, and the one that read stale data fails.
    optimistic: ClassVar[Capability] = Capability()
    #: What depends on the own versionstamp can't be read before the commit.
    hides_stamps: ClassVar[Capability] = Capability()
    #: Transactions die of age; see :meth:`aged`.
    ages: ClassVar[Capability] = Capability()

    @pytest.fixture
    def second_handle(self, database: Database) -> Database:
        return database

    @pytest.fixture
    def key(self, database: Database) -> Iterator[Keys]:
        keys = Keys(b"conformance/" + os.urandom(8) + b"/")
        yield keys
        tr = database.begin(timeout_s=TIMEOUT_S)
        tr.clear_range(*keys.range())
        tr.commit()

    def aged(self, database: Database, key: bytes) -> Transaction:
        """A transaction that read ``key`` more than five seconds ago."""
        raise NotImplementedError

    # Reads and own writes

    def test_a_key_that_was_never_set_is_absent(self, database: Database, key: Keys) -> None:
        assert read(database, key(b"a")) is None

    def test_what_was_committed_is_read(self, database: Database, second_handle: Database, key: Keys) -> None:
        commit(database, lambda tr: tr.set(key(b"a"), b"1"))
        assert read(second_handle, key(b"a")) == b"1"

    def test_an_empty_value_is_not_absence(self, database: Database, key: Keys) -> None:
        commit(database, lambda tr: tr.set(key(b"a"), b""))
        assert read(database, key(b"a")) == b""

    def test_a_transaction_sees_its_own_writes(self, database: Database, key: Keys) -> None:
        def body(tr: Transaction) -> None:
            tr.set(key(b"a"), b"1")
            assert tr.get(key(b"a")) == b"1"
            tr.clear(key(b"a"))
            assert tr.get(key(b"a"), snapshot=True) is None
            tr.add(key(b"n"), 5)
            tr.add(key(b"n"), -7)
            assert number(tr.get(key(b"n"))) == -2

        commit(database, body)

    def test_nothing_is_seen_before_the_commit(self, database: Database, second_handle: Database, key: Keys) -> None:
        tr = database.begin(timeout_s=TIMEOUT_S)
        tr.set(key(b"a"), b"1")
        other = second_handle.begin(timeout_s=TIMEOUT_S, read_only=True)
        assert other.get(key(b"a")) is None
        other.cancel()
        tr.commit()
        assert read(second_handle, key(b"a")) == b"1"

    def test_a_cancelled_transaction_leaves_nothing(self, database: Database, key: Keys) -> None:
        tr = database.begin(timeout_s=TIMEOUT_S)
        tr.set(key(b"a"), b"1")
        tr.cancel()
        tr.cancel()
        assert read(database, key(b"a")) is None

    def test_an_ended_transaction_refuses_work(self, database: Database, key: Keys) -> None:
        tr = database.begin(timeout_s=TIMEOUT_S)
        tr.set(key(b"a"), b"1")
        tr.commit()
        tr.cancel()
        with pytest.raises(StoreError):
            tr.get(key(b"a"))
        cancelled = database.begin(timeout_s=TIMEOUT_S)
        cancelled.cancel()
        with pytest.raises(StoreError):
            cancelled.commit()

    def test_read_only_until_the_first_mutation(self, database: Database, key: Keys) -> None:
        tr = database.begin(timeout_s=TIMEOUT_S)
        tr.get(key(b"a"))
        tr.add_read_conflict_key(key(b"a"))
        assert tr.read_only
        tr.clear(key(b"a"))
        assert not tr.read_only
        tr.cancel()

    def test_a_promise_to_be_read_only_is_kept(self, database: Database, key: Keys) -> None:
        tr = database.begin(timeout_s=TIMEOUT_S, read_only=True)
        with pytest.raises(StoreError):
            tr.set(key(b"a"), b"1")
        tr.cancel()
        assert read(database, key(b"a")) is None

    def test_one_transaction_reads_one_version(self, database: Database, second_handle: Database, key: Keys) -> None:
        tr = database.begin(timeout_s=TIMEOUT_S, read_only=True)
        assert tr.get(key(b"a")) is None
        commit(second_handle, lambda tr: (tr.set(key(b"a"), b"1"), tr.set(key(b"b"), b"1")))
        assert tr.get_many([key(b"a"), key(b"b")]) == [None, None]
        assert tr.get_range(*key.range()) == []
        tr.cancel()

    def test_get_many_answers_in_the_order_asked(self, database: Database, key: Keys) -> None:
        commit(database, lambda tr: [tr.set(key(b"%d" % i), b"v%d" % i) for i in range(0, 20, 2)])
        asked = [key(b"%d" % i) for i in (8, 3, 0, 8, 18)]
        expected = [b"v8", None, b"v0", b"v8", b"v18"]
        assert commit(database, lambda tr: tr.get_many(asked)) == expected
        assert commit(database, lambda tr: tr.get_many(asked, snapshot=True)) == expected
        assert commit(database, lambda tr: tr.get_many([])) == []

    def test_keys_and_ranges_together(self, database: Database, key: Keys) -> None:
        commit(database, lambda tr: [tr.set(key(b"%d" % i), b"v%d" % i) for i in range(5)])
        begin, end = key.range()
        asked = ([key(b"3"), key(b"9")], [(begin, end, 2), (key(b"3"), end, 0), (end, begin, 0)])
        first, rest = [b"v0", b"v1"], [b"v3", b"v4"]
        for snapshot in (False, True):
            values, found = commit(database, lambda tr, how=snapshot: tr.get_together(*asked, snapshot=how))
            assert values == [b"v3", None]
            assert [[value for _, value in rows] for rows in found] == [first, rest, []]
        assert commit(database, lambda tr: tr.get_together([], [])) == ([], [])

    def test_get_many_takes_a_thousand_keys(self, database: Database, key: Keys) -> None:
        names = [b"%04d" % i for i in range(1001)]
        commit(database, lambda tr: [tr.set(key(name), name) for name in names])
        assert commit(database, lambda tr: tr.get_many([key(name) for name in names])) == names

    # Ranges

    @pytest.mark.parametrize("snapshot", [False, True])
    def test_ranges_are_half_open_limited_and_reversible(self, database: Database, key: Keys, snapshot: bool) -> None:
        commit(database, lambda tr: [tr.set(key(b"%d" % i), b"%d" % i) for i in range(5)])

        def names(begin: bytes, end: bytes, limit: int = 0, *, reverse: bool = False) -> bytes:
            rows = commit(
                database,
                lambda tr: tr.get_range(*key.range(begin, end), limit=limit, reverse=reverse, snapshot=snapshot),
            )
            return b"".join(value for _, value in rows)

        assert names(b"0", b"5") == b"01234"
        assert names(b"1", b"3") == b"12"
        assert names(b"1", b"3\0") == b"123"
        assert names(b"0", b"5", 2) == b"01"
        assert names(b"0", b"5", 2, reverse=True) == b"43"
        assert names(b"0", b"5", 9) == b"01234"
        assert names(b"3", b"3") == b""
        assert names(b"7", b"9") == b""

    def test_a_range_contains_own_writes(self, database: Database, key: Keys) -> None:
        commit(database, lambda tr: [tr.set(key(b"%d" % i), b"old") for i in range(6)])

        def body(tr: Transaction) -> None:
            tr.clear(key(b"1"))
            tr.clear_range(*key.range(b"3", b"5"))
            tr.set(key(b"4"), b"new")
            tr.set(key(b"45"), b"new")
            tr.add(key(b"9"), 1)
            rows = key.strip(tr.get_range(*key.range()))
            assert [name for name, _ in rows] == [b"0", b"2", b"4", b"45", b"5", b"9"]
            assert dict(rows)[b"4"] == b"new"
            assert key.strip(tr.get_range(*key.range(), limit=2, reverse=True))[1] == (b"5", b"old")
            assert key.strip(tr.get_range(*key.range(), limit=3))[2] == (b"4", b"new")

        commit(database, body)

    def test_a_range_of_many_rows_comes_whole(self, database: Database, key: Keys) -> None:
        for first in range(0, 3000, 1000):
            commit(
                database,
                lambda tr: [tr.set(key(b"%05d" % i), bytes(500)) for i in range(first, first + 1000)],  # noqa: B023
            )
        rows = commit(database, lambda tr: tr.get_range(*key.range()))
        assert [name for name, _ in key.strip(rows)] == [b"%05d" % i for i in range(3000)]
        backwards = commit(database, lambda tr: tr.get_range(*key.range(), reverse=True, limit=2500))
        assert backwards == rows[:499:-1]

    def test_clear_range_clears_just_that(self, database: Database, key: Keys) -> None:
        commit(database, lambda tr: [tr.set(key(b"%d" % i), b"") for i in range(5)])
        commit(database, lambda tr: tr.clear_range(*key.range(b"1", b"3")))
        commit(database, lambda tr: tr.clear_range(*key.range(b"4", b"4")))
        rows = commit(database, lambda tr: tr.get_range(*key.range()))
        assert [name for name, _ in key.strip(rows)] == [b"0", b"3", b"4"]

    def test_clear_run_clears_what_was_noted_of_its_keys(self, database: Database, key: Keys) -> None:
        names = [b"a", b"b", b"c"]
        commit(database, lambda tr: [tr.set(key(name), bytes(8)) for name in (*names, b"d")])

        def body(tr: Transaction) -> None:
            tr.get_range(*key.range())
            tr.set(key(b"a"), b"1")
            tr.add(key(b"b"), 1)
            tr.set_versionstamped_value(key(b"c"))
            tr.clear_run([key(name) for name in names])

        commit(database, body)
        rows = commit(database, lambda tr: tr.get_range(*key.range()))
        assert [name for name, _ in key.strip(rows)] == [b"d"]

    def test_keys_are_ordered_as_bytes(self, database: Database, key: Keys) -> None:
        names = [b"", b"\0", b"\0\0", b"\0\xff", b"\x01", b"A", b"a", b"\x7f", b"\x80", b"\xfe", b"\xfe\xff"]
        commit(database, lambda tr: [tr.set(key(name), name) for name in reversed(names)])
        rows = commit(database, lambda tr: tr.get_range(*key.range()))
        assert [value for _, value in rows] == names

    @pytest.mark.parametrize("seed", range(8))
    def test_random_work_equals_a_dictionary(self, database: Database, key: Keys, seed: int) -> None:
        rng = random.Random(seed)
        model: dict[bytes, bytes] = {}
        for _ in range(12):
            draft = dict(model)
            tr = database.begin(timeout_s=TIMEOUT_S)
            for _ in range(rng.randrange(25)):
                _random_step(rng, tr, key, draft)
            if rng.random() < 0.8:
                tr.commit()
                model = draft
            tr.cancel()
            rows = commit(database, lambda tr: tr.get_range(*key.range()))
            assert key.strip(rows) == sorted(model.items())

    # Atomics

    @pytest.mark.parametrize(
        ("deltas", "total"),
        [((5,), 5), ((-5,), -5), ((3, -4), -1), ((2**62, 2**62 - 1), 2**63 - 1), ((-(2**63),), -(2**63))],
    )
    def test_add_in_one_and_in_many_transactions(
        self, database: Database, key: Keys, deltas: tuple[int, ...], total: int
    ) -> None:
        commit(database, lambda tr: [tr.add(key(b"together"), delta) for delta in deltas])
        for delta in deltas:
            commit(database, lambda tr: tr.add(key(b"apart"), delta))  # noqa: B023
        expected = struct.pack("<q", total)
        assert read(database, key(b"together")) == expected
        assert read(database, key(b"apart")) == expected

    def test_a_wide_add_carries_over_all_its_bytes(self, database: Database, key: Keys) -> None:
        """Two counters in one key: the upper one is moved by 2**64 times its change."""
        for upper, lower in ((5, 3), (-1, -3), (2**40, 7)):
            commit(database, lambda tr: tr.add(key(b"n"), (upper << 64) + lower, width=16))  # noqa: B023
        assert read(database, key(b"n")) == struct.pack("<qq", 7, 4 + 2**40)
        commit(database, lambda tr: tr.add(key(b"n"), -((4 + 2**40) << 64) - 7, width=16))
        assert read(database, key(b"n")) is None

    def test_a_sum_of_zero_clears_the_key(self, database: Database, key: Keys) -> None:
        commit(database, lambda tr: tr.add(key(b"n"), 7))
        commit(database, lambda tr: tr.add(key(b"n"), -7))
        assert commit(database, lambda tr: tr.get_range(*key.range())) == []

        def body(tr: Transaction) -> None:
            tr.add(key(b"n"), 7)
            tr.add(key(b"n"), -7)
            assert tr.get(key(b"n")) is None
            assert tr.get_range(*key.range()) == []

        commit(database, body)
        assert commit(database, lambda tr: tr.get_range(*key.range())) == []

    def test_add_after_set_and_clear(self, database: Database, key: Keys) -> None:
        def body(tr: Transaction) -> None:
            tr.set(key(b"n"), struct.pack("<q", 40))
            tr.add(key(b"n"), 2)
            tr.set(key(b"gone"), struct.pack("<q", 40))
            tr.clear_range(*key.range(b"gone", b"gonf"))
            tr.add(key(b"gone"), 1)

        commit(database, body)
        assert number(read(database, key(b"n"))) == 42
        assert number(read(database, key(b"gone"))) == 1

    def test_adds_of_a_thousand_keys(self, database: Database, key: Keys) -> None:
        for total in (1, 2):
            commit(database, lambda tr: [tr.add(key(b"%04d" % i), 1) for i in range(1001)])
            rows = commit(database, lambda tr: tr.get_range(*key.range()))
            assert [number(value) for _, value in rows] == [total] * 1001

    def test_the_last_write_of_a_key_counts(self, database: Database, key: Keys) -> None:
        commit(database, lambda tr: [tr.set(key(name), struct.pack("<q", 40)) for name in (b"a", b"b", b"d", b"g")])

        def body(tr: Transaction) -> None:
            tr.add(key(b"a"), 5)
            tr.set(key(b"a"), b"set")
            tr.add(key(b"b"), 5)
            tr.clear(key(b"b"))
            tr.set_versionstamped_value(key(b"c"))
            tr.set(key(b"c"), b"set")
            tr.set_versionstamped_value(key(b"d"))
            tr.clear(key(b"d"))
            tr.set(key(b"e"), b"set")
            tr.set_versionstamped_value(key(b"e"), b"<")
            tr.add(key(b"f"), 5)
            tr.set_versionstamped_value(key(b"f"), b"<")
            tr.clear(key(b"g"))
            tr.add(key(b"g"), 1)

        commit(database, body)
        found = dict(key.strip(commit(database, lambda tr: tr.get_range(*key.range()))))
        assert {name: found.pop(name) for name in (b"a", b"c", b"g")} == {
            b"a": b"set",
            b"c": b"set",
            b"g": struct.pack("<q", 1),
        }
        assert sorted(found) == [b"e", b"f"]
        assert found[b"e"] == found[b"f"]
        assert found[b"e"].startswith(b"<")

    def test_byte_max_compares_bytes(self, database: Database, key: Keys) -> None:
        for value, kept in ((b"b", b"b"), (b"a", b"b"), (b"ba", b"ba"), (b"\xff", b"\xff"), (b"", b"\xff")):
            commit(database, lambda tr: tr.byte_max(key(b"m"), value))  # noqa: B023
            assert read(database, key(b"m")) == kept

    def test_atomics_of_blind_writers_add_up(self, database: Database, second_handle: Database, key: Keys) -> None:
        handles = [database, second_handle] * 2

        def work(handle: Database) -> None:
            for _ in range(25):
                commit(handle, lambda tr: tr.add(key(b"n"), 1))

        in_threads([lambda handle=handle: work(handle) for handle in handles])
        assert number(read(database, key(b"n"))) == 100

    # Versionstamps

    def test_stamped_keys_sort_in_commit_order(self, database: Database, second_handle: Database, key: Keys) -> None:
        for i in range(20):
            handle = (database, second_handle)[i % 2]
            commit(handle, lambda tr: tr.set_versionstamped_key(key(b"q/"), b"", b"%02d" % i))  # noqa: B023
        rows = commit(database, lambda tr: tr.get_range(*key.range(b"q/", b"q0")))
        assert [value for _, value in rows] == [b"%02d" % i for i in range(20)]
        assert all(len(name) == len(b"q/") + 10 for name, _ in key.strip(rows))

    def test_a_user_version_orders_keys_of_one_transaction(self, database: Database, key: Keys) -> None:
        def body(tr: Transaction) -> None:
            for i in range(10):
                tr.set_versionstamped_key(key(b"q/"), struct.pack(">H", i) + b"tail", b"%d" % i)

        commit(database, body)
        rows = commit(database, lambda tr: tr.get_range(*key.range(b"q/", b"q0")))
        assert [value for _, value in rows] == [b"%d" % i for i in range(10)]
        assert len({name[2:12] for name, _ in key.strip(rows)}) == 1

    def test_a_stamped_value_carries_the_stamp_of_the_key(self, database: Database, key: Keys) -> None:
        def body(tr: Transaction) -> None:
            tr.set_versionstamped_key(key(b"q/"), b"", b"")
            tr.set_versionstamped_value(key(b"bell"), b"<", b">")

        commit(database, body)
        (name, _), *_ = key.strip(commit(database, lambda tr: tr.get_range(*key.range(b"q/", b"q0"))))
        assert read(database, key(b"bell")) == b"<" + name[2:] + b">"

    def test_stamped_values_grow(self, database: Database, second_handle: Database, key: Keys) -> None:
        stamps = []
        for handle in (database, second_handle) * 3:
            commit(handle, lambda tr: tr.set_versionstamped_value(key(b"v")))
            stamps.append(read(database, key(b"v")) or b"")
        assert stamps == sorted(set(stamps))
        assert all(len(stamp) == 10 for stamp in stamps)

    def test_a_stamp_never_comes_twice_from_many_writers(
        self, database: Database, second_handle: Database, key: Keys
    ) -> None:
        def work(handle: Database, who: bytes) -> None:
            for i in range(20):
                commit(handle, lambda tr: tr.set_versionstamped_key(key(b"q/"), b"", who + b"%02d" % i))  # noqa: B023

        handles = (database, second_handle, database)
        in_threads([lambda h=h, w=b"%d" % w: work(h, w) for w, h in enumerate(handles)])
        rows = commit(database, lambda tr: tr.get_range(*key.range(b"q/", b"q0")))
        assert len(rows) == 60
        for who in (b"0", b"1", b"2"):
            own = [value for _, value in rows if value.startswith(who)]
            assert own == [who + b"%02d" % i for i in range(20)]

    def test_an_own_stamp_can_not_be_read(self, database: Database, key: Keys) -> None:
        tr = database.begin(timeout_s=TIMEOUT_S)
        tr.set(key(b"a"), b"")
        tr.set_versionstamped_key(key(b"q/"), b"", b"")
        if self.hides_stamps:
            with pytest.raises(StoreError):
                tr.get_range(*key.range(b"q/", b"q0"))
        else:
            assert len(tr.get_range(*key.range(b"q/", b"q0"))) == 1, self.hides_stamps.reason
        tr.cancel()

    # Conflicts: who aborts whom

    def race(
        self,
        database: Database,
        key: Keys,
        first: Callable[[Transaction], object],
        between: Callable[[Transaction], object],
        *,
        conflict: bool,
        blind: bool = False,
    ) -> None:
        """``first`` runs, ``between`` commits if the store lets it, then the first one commits.

        ``blind``: the first one reads nothing of the store.
        """
        tr = database.begin(timeout_s=TIMEOUT_S)
        first(tr)
        tr.set_versionstamped_value(key(b"stamp/first"))
        if not self.optimistic and not blind:
            self.excludes(database, key, between)
            tr.commit()
            self.interfere(database, key, between)
            assert (read(database, key(b"stamp/first")) or b"") < (read(database, key(b"stamp/between")) or b"")
            return
        self.interfere(database, key, between)
        if conflict:
            with pytest.raises(Conflict):
                tr.commit()
        else:
            tr.commit()
            assert (read(database, key(b"stamp/between")) or b"") < (read(database, key(b"stamp/first")) or b"")
        tr.cancel()

    def excludes(self, database: Database, key: Keys, between: Callable[[Transaction], object]) -> None:
        """A store without conflicts must not let a writer in between a read and what comes of it."""
        with ThreadPoolExecutor(1) as another, pytest.raises(StoreUnavailable):  # its own thread is refused at once
            another.submit(self.interfere, database, key, between, timeout_s=REFUSAL_S).result()
        assert self.optimistic.reason

    @staticmethod
    def interfere(
        database: Database, key: Keys, between: Callable[[Transaction], object], timeout_s: float = TIMEOUT_S
    ) -> None:
        tr = database.begin(timeout_s=timeout_s)
        try:
            between(tr)
            tr.set_versionstamped_value(key(b"stamp/between"))
            tr.commit()
        finally:
            tr.cancel()

    @pytest.mark.parametrize(
        ("case", "conflict"),
        [
            ("read, set", True),
            ("read absent, set", True),
            ("read, clear", True),
            ("read, clear range over it", True),
            ("read, add", True),
            ("read, byte_max", True),
            ("read, stamped value", True),
            ("read, same value set", True),
            ("read, other key set", False),
            ("snapshot read, set", False),
            ("read many, set one", True),
            ("snapshot read many, set one", False),
            ("nothing read, set", False),
            ("nothing read, add", False),
            ("own write read, set", False),
            ("own add read, add", True),
            ("range read, set inside", True),
            ("range read, set just outside", False),
            ("range read, clear inside", True),
            ("range read, clear range across", True),
            ("range read, stamped key inside", True),
            ("empty range read, set inside", True),
            ("empty range read, gap cleared", True),
            ("read absent, absent key cleared by range", True),
            ("snapshot range read, set inside", False),
            ("limited range, set behind the last row", False),
            ("limited range, set between rows", True),
            ("limited range, last row set", True),
            ("limited range reversed, set before the last row", False),
            ("limited range reversed, set between rows", True),
            ("conflict key, set", True),
            ("conflict key, other key set", False),
            ("conflict range, set inside", True),
            ("conflict range, set at its end", False),
            ("own write in range read, set that key", False),
            ("watch, set", True),
        ],
    )
    def test_conflict(self, database: Database, key: Keys, case: str, conflict: bool) -> None:
        commit(database, lambda tr: [tr.set(key(b"r/%d" % i), b"") for i in range(0, 10, 2)])
        commit(database, lambda tr: tr.set(key(b"a"), struct.pack("<q", 1)))
        first, between = case.split(", ")
        steps, blind = (_FIRST[first], _BETWEEN[between]), first in _BLIND
        self.race(
            database, key, lambda tr: steps[0](tr, key), lambda tr: steps[1](tr, key), conflict=conflict, blind=blind
        )

    def test_an_earlier_commit_is_no_conflict(self, database: Database, key: Keys) -> None:
        commit(database, lambda tr: tr.set(key(b"a"), b"1"))
        commit(database, lambda tr: (tr.get(key(b"a")), tr.set(key(b"b"), b"1")))

    def test_a_reader_never_conflicts(self, database: Database, second_handle: Database, key: Keys) -> None:
        tr = database.begin(timeout_s=TIMEOUT_S, read_only=True)
        tr.get(key(b"a"))
        tr.add_read_conflict_range(*key.range())
        commit(second_handle, lambda other: other.set(key(b"a"), b"1"))
        tr.commit()

    def test_no_update_is_lost(self, database: Database, second_handle: Database, key: Keys) -> None:
        def increment(tr: Transaction) -> None:
            tr.set(key(b"n"), struct.pack("<q", number(tr.get(key(b"n"))) + 1))

        def work(handle: Database) -> None:
            retry = retry_on(handle, key(b"%d/" % threading.get_ident()))
            for _ in range(15):
                retry(increment, timeout_s=TIMEOUT_S)

        in_threads([lambda handle=handle: work(handle) for handle in (database, second_handle, database)])
        assert number(read(database, key(b"n"))) == 45

    # Watches

    def test_a_watch_fires_when_another_handle_changes_the_key(
        self, database: Database, second_handle: Database, key: Keys
    ) -> None:
        commit(database, lambda tr: tr.set_versionstamped_value(key(b"bell")))
        _, fired = arm(database, key(b"bell"))
        commit(second_handle, lambda tr: tr.set_versionstamped_value(key(b"bell")))
        assert fired.wait(TIMEOUT_S)

    def test_a_watch_fires_for_a_key_that_was_absent(self, database: Database, key: Keys) -> None:
        _, fired = arm(database, key(b"bell"))
        commit(database, lambda tr: tr.set_versionstamped_value(key(b"bell")))
        assert fired.wait(TIMEOUT_S)

    def test_no_change_is_lost_between_reading_and_arming(
        self, database: Database, second_handle: Database, key: Keys
    ) -> None:
        tr = database.begin(timeout_s=TIMEOUT_S, read_only=True)
        assert tr.get(key(b"bell")) is None
        watch = tr.watch(key(b"bell"))
        commit(second_handle, lambda other: other.set_versionstamped_value(key(b"bell")))
        tr.commit()
        fired = threading.Event()
        watch.on_fire(fired.set)
        assert fired.wait(TIMEOUT_S)

    def test_no_change_is_lost_while_arming_again_and_again(
        self, database: Database, second_handle: Database, key: Keys
    ) -> None:
        """A ringer that never waits against a listener that looks, arms and waits: every ring is seen in the end."""
        rings = 60

        def ring() -> None:
            for _ in range(rings):
                retry(lambda tr: (tr.add(key(b"n"), 1), tr.set_versionstamped_value(key(b"bell"))), timeout_s=TIMEOUT_S)

        retry = retry_on(second_handle, key(b"r/"))
        ringer = threading.Thread(target=ring)
        ringer.start()
        while True:
            tr = database.begin(timeout_s=TIMEOUT_S, read_only=True)
            seen = number(tr.get(key(b"n")))
            watch = tr.watch(key(b"bell"))
            tr.commit()
            if seen == rings:
                break
            fired = threading.Event()
            watch.on_fire(fired.set)
            assert fired.wait(TIMEOUT_S), f"slept through a ring after {seen}"
        watch.cancel()
        ringer.join()

    def test_a_callback_that_comes_late_is_called_at_once(self, database: Database, key: Keys) -> None:
        watch, fired = arm(database, key(b"bell"))
        commit(database, lambda tr: tr.set_versionstamped_value(key(b"bell")))
        assert fired.wait(TIMEOUT_S)
        late = threading.Event()
        watch.on_fire(late.set)
        assert late.is_set()

    def test_a_cancelled_watch_stays_silent(self, database: Database, key: Keys) -> None:
        cancelled, silent = arm(database, key(b"bell"))
        _, fired = arm(database, key(b"bell"))
        cancelled.cancel()
        cancelled.cancel()
        commit(database, lambda tr: tr.set_versionstamped_value(key(b"bell")))
        assert fired.wait(TIMEOUT_S)
        assert not silent.is_set()

    def test_many_watches_fire(self, database: Database, second_handle: Database, key: Keys) -> None:
        bells = [key(b"bell/%d" % i) for i in range(300)]
        fired = [arm(database, bell)[1] for bell in bells]
        commit(second_handle, lambda tr: [tr.set_versionstamped_value(bell) for bell in bells])
        assert all(event.wait(TIMEOUT_S) for event in fired)

    def test_several_watches_of_one_key_all_fire(self, database: Database, key: Keys) -> None:
        fired = [arm(database, key(b"bell"))[1] for _ in range(3)]
        commit(database, lambda tr: tr.set_versionstamped_value(key(b"bell")))
        assert all(event.wait(TIMEOUT_S) for event in fired)

    def test_a_watch_is_armed_by_a_writing_transaction_too(self, database: Database, key: Keys) -> None:
        tr = database.begin(timeout_s=TIMEOUT_S)
        tr.set(key(b"a"), b"1")
        watch = tr.watch(key(b"bell"))
        tr.commit()
        fired = threading.Event()
        watch.on_fire(fired.set)
        commit(database, lambda tr: tr.set_versionstamped_value(key(b"bell")))
        assert fired.wait(TIMEOUT_S)

    # Limits and ends

    def test_the_largest_key_and_value_fit(self, database: Database, key: Keys) -> None:
        large = key(b"k").ljust(KEY_BYTES, b"k")
        commit(database, lambda tr: tr.set(large, bytes(VALUE_BYTES)))
        assert read(database, large) == bytes(VALUE_BYTES)

    @pytest.mark.parametrize("what", ["key", "value", "stamped key", "stamped value", "cleared key"])
    def test_larger_ones_are_refused(self, database: Database, key: Keys, what: str) -> None:
        large = key(b"k").ljust(KEY_BYTES + 1, b"k")
        steps: dict[str, Callable[[Transaction], object]] = {
            "key": lambda tr: tr.set(large, b""),
            "value": lambda tr: tr.set(key(b"a"), bytes(VALUE_BYTES + 1)),
            "stamped key": lambda tr: tr.set_versionstamped_key(large[:-10], b"", b""),
            "stamped value": lambda tr: tr.set_versionstamped_value(key(b"a"), bytes(VALUE_BYTES - 9)),
            "cleared key": lambda tr: tr.clear(large),
        }
        with pytest.raises(LimitExceeded):
            commit(database, steps[what])
        assert commit(database, lambda tr: tr.get_range(*key.range())) == []

    def test_a_transaction_that_is_too_large_stores_nothing(self, database: Database, key: Keys) -> None:
        rows = TRANSACTION_BYTES // VALUE_BYTES + 1
        with pytest.raises(LimitExceeded):
            commit(database, lambda tr: [tr.set(key(b"%03d" % i), bytes(VALUE_BYTES)) for i in range(rows)])
        assert commit(database, lambda tr: tr.get_range(*key.range())) == []
        commit(database, lambda tr: tr.set(key(b"a"), b"1"))

    def test_an_old_transaction(self, database: Database, key: Keys) -> None:
        tr = self.aged(database, key(b"a"))
        if self.ages:
            with pytest.raises(TransactionTooOld):
                tr.get(key(b"a"))
        else:
            assert tr.get(key(b"a")) is None, self.ages.reason
        tr.cancel()

    @pytest.mark.parametrize("what", ["get", "get_many", "get_range", "get_ranges", "get_together"])
    def test_a_failed_read_lets_its_callers_go(self, database: Database, key: Keys, what: str) -> None:
        one, span = key(b"a"), key.range()
        reads: dict[str, Callable[[], object]] = {
            "get": lambda: tr.get(one),
            "get_many": lambda: tr.get_many([one]),
            "get_range": lambda: tr.get_range(*span),
            "get_ranges": lambda: tr.get_ranges([(*span, 0)]),
            "get_together": lambda: tr.get_together([one], [(*span, 0)]),
        }
        tr = self.aged(database, one)
        if not self.ages:
            tr.cancel()
        assert not keeps_frames(reads[what])
        tr.cancel()

    def test_a_failed_loop_lets_its_callers_go(self, database: Database, key: Keys) -> None:
        retry = retry_on(database, key(b"t/"))
        assert not keeps_frames(lambda: retry.read(lambda tr: tr.set(key(b"a"), b""), timeout_s=TIMEOUT_S))

    def test_the_loop_returns_what_the_body_returned(self, database: Database, key: Keys) -> None:
        retry = retry_on(database, key(b"t/"))
        assert retry(lambda tr: (tr.add(key(b"n"), 1), "result")[1], timeout_s=TIMEOUT_S) == "result"
        assert number(retry.read(lambda tr: tr.get(key(b"n")), timeout_s=TIMEOUT_S)) == 1

    def test_a_bodys_own_error_undoes_its_writes(self, database: Database, key: Keys) -> None:
        def body(tr: Transaction) -> None:
            tr.set(key(b"a"), b"1")
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            retry_on(database, key(b"t/"))(body, timeout_s=TIMEOUT_S)
        assert read(database, key(b"a")) is None
        commit(database, lambda tr: tr.set(key(b"a"), b"1"))


def in_threads(jobs: list[Callable[[], object]]) -> None:
    """Run all at once; what one of them raised is raised here."""
    errors: list[BaseException] = []

    def run(job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


Step = Callable[[Transaction, Keys], object]

_FIRST: dict[str, Step] = {
    "read": lambda tr, key: tr.get(key(b"a")),
    "read absent": lambda tr, key: tr.get(key(b"a0")),
    "snapshot read": lambda tr, key: tr.get(key(b"a"), snapshot=True),
    "read together": lambda tr, key: tr.get_together([key(b"x"), key(b"a")], [(key(b"y"), key(b"z"), 0)]),
    "snapshot read together": lambda tr, key: tr.get_together([key(b"a")], [(key(b"y"), key(b"z"), 0)], snapshot=True),
    "read many": lambda tr, key: tr.get_many([key(b"x"), key(b"a"), key(b"y")]),
    "snapshot read many": lambda tr, key: tr.get_many([key(b"x"), key(b"a")], snapshot=True),
    "nothing read": lambda tr, key: tr.set(key(b"a"), b"mine"),
    "own write read": lambda tr, key: (tr.set(key(b"a"), b"mine"), tr.get(key(b"a"))),
    "own add read": lambda tr, key: (tr.add(key(b"a"), 1), tr.get(key(b"a"))),
    "range read": lambda tr, key: tr.get_range(*key.range(b"r/0", b"r/9")),
    "empty range read": lambda tr, key: tr.get_range(*key.range(b"r/4\0", b"r/6")),
    "snapshot range read": lambda tr, key: tr.get_range(*key.range(b"r/0", b"r/9"), snapshot=True),
    "limited range": lambda tr, key: tr.get_range(*key.range(b"r/2", b"r/9"), limit=2),
    "limited range reversed": lambda tr, key: tr.get_range(*key.range(b"r/2", b"r/9"), limit=2, reverse=True),
    "conflict key": lambda tr, key: (tr.get(key(b"a"), snapshot=True), tr.add_read_conflict_key(key(b"a"))),
    "conflict range": lambda tr, key: (
        tr.get(key(b"a"), snapshot=True),
        tr.add_read_conflict_range(*key.range(b"r/0", b"r/9")),
    ),
    "watch": lambda tr, key: (tr.get(key(b"x")), tr.watch(key(b"a"))),
    "own write in range read": lambda tr, key: (
        tr.set(key(b"r/4"), b"mine"),
        tr.get_range(*key.range(b"r/0", b"r/9")),
    ),
}

#: Those that read nothing of the store.
_BLIND = {"nothing read", "own write read"}

_BETWEEN: dict[str, Step] = {
    "set": lambda tr, key: (tr.set(key(b"a"), b"x"), tr.set(key(b"a0"), b"x")),
    "clear": lambda tr, key: tr.clear(key(b"a")),
    "clear range over it": lambda tr, key: tr.clear_range(*key.range(b"A", b"b")),
    "add": lambda tr, key: tr.add(key(b"a"), 1),
    "byte_max": lambda tr, key: tr.byte_max(key(b"a"), b"\xff"),
    "stamped value": lambda tr, key: tr.set_versionstamped_value(key(b"a")),
    "same value set": lambda tr, key: tr.set(key(b"a"), struct.pack("<q", 1)),
    "other key set": lambda tr, key: tr.set(key(b"a\0"), b""),
    "set one": lambda tr, key: tr.set(key(b"a"), b"x"),
    "set inside": lambda tr, key: tr.set(key(b"r/5"), b""),
    "set just outside": lambda tr, key: (tr.set(key(b"r/9"), b""), tr.set(key(b"r/"), b"")),
    "clear inside": lambda tr, key: tr.clear(key(b"r/4")),
    "gap cleared": lambda tr, key: tr.clear_range(*key.range(b"r/4\0", b"r/5")),
    "absent key cleared by range": lambda tr, key: tr.clear_range(*key.range(b"a0", b"a1")),
    "clear range across": lambda tr, key: tr.clear_range(*key.range(b"r/8", b"s")),
    "stamped key inside": lambda tr, key: tr.set_versionstamped_key(key(b"r/0"), b"", b""),
    "set behind the last row": lambda tr, key: tr.set(key(b"r/4\0"), b""),
    "set between rows": lambda tr, key: (tr.set(key(b"r/3"), b""), tr.set(key(b"r/7"), b"")),
    "last row set": lambda tr, key: tr.set(key(b"r/4"), b"x"),
    "set before the last row": lambda tr, key: tr.set(key(b"r/5"), b""),
    "set at its end": lambda tr, key: tr.set(key(b"r/9"), b""),
    "set that key": lambda tr, key: tr.set(key(b"r/4"), b"theirs"),
}


def _random_step(rng: random.Random, tr: Transaction, key: Keys, model: dict[bytes, bytes]) -> None:
    """One random operation on the transaction and on the model; reads must agree."""
    name, other = (b"%d" % rng.randrange(30) for _ in range(2))
    begin, end = sorted((name, other))
    match rng.randrange(7):
        case 0 | 1:
            model[name] = value = rng.randbytes(3)
            tr.set(key(name), value)
        case 2:
            model.pop(name, None)
            tr.clear(key(name))
        case 3:
            for gone in [k for k in model if begin <= k < end]:
                del model[gone]
            tr.clear_range(key(begin), key(end))
        case 4:
            value = rng.randbytes(3)
            model[name] = max(model.get(name, b""), value)
            tr.byte_max(key(name), value)
        case 5:
            assert tr.get(key(name), snapshot=rng.random() < 0.5) == model.get(name)
        case _:
            reverse, limit = rng.random() < 0.5, rng.randrange(5)
            rows = tr.get_range(key(begin), key(end), limit=limit, reverse=reverse, snapshot=rng.random() < 0.5)
            expected = sorted(((k, v) for k, v in model.items() if begin <= k < end), reverse=reverse)
            assert key.strip(rows) == expected[: limit or None]
