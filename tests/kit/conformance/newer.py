"""What an older process does with the messages of a newer version, over any store: a suite to be run once per driver.

The newer version's records are those of this one with another number: the process that knows that number is the same
code, told so (:func:`upgraded`). After each test every counter equals a full scan, and every message is in one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kit.conformance.invariants import leftovers
from kit.conformance.queue import Bench, OnBench
from kit.costs import CountingDatabase
from kit.duties import promote_all, replay, trim_all
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace import codec
from kombu_fdb.keyspace.codec import AMOUNT_BYTES, INLINE_BYTES, encode_amount
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import KeyLimits, QueueCounts, View
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.store.protocol import Database, Transaction

NEWER = codec.RECORD_VERSION + 1
LARGE = b"x" * (INLINE_BYTES + 1)
DLX = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "grave"}
#: Of the rows that are messages.
TAGS = ("ready", "keyed", "delayed", "lease")


@contextmanager
def upgraded(*, leases: bool = True) -> Iterator[None]:
    """This process knows the newer version of records, and of ``leases``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "RECORD_VERSION", NEWER)
        if leases:
            patch.setattr(codec, "LEASE_VERSION", NEWER)
        yield


def make_newer(bench: Bench, *, leases: bool = False) -> None:
    """All messages are of the newer version, and with ``leases`` so are their leases."""

    def body(tr: Transaction) -> None:
        for tag in TAGS:
            for key, value in tr.get_range(*range_of(bench.engine.keys._key(tag)), snapshot=True):
                start = 0 if tag != "lease" or leases else value.index(codec.Message.of_lease(value).value)
                tr.set(key, value[:start] + bytes([NEWER]) + value[start + 1 :])

    bench.write(body)


class NewerConformance(OnBench):
    """Run over every store."""

    task_ids = True

    # -- an old process never loses it, a new one delivers it once ----------------------------------------------------

    @pytest.mark.parametrize("payload", [b"new", LARGE], ids=["inline", "chunks"])
    @pytest.mark.parametrize("key", ["", "k"])
    def test_a_claim_keeps_it(self, bench: Bench, key: str, payload: bytes) -> None:
        bench.put(payload, key=key)
        make_newer(bench)
        bench.put(b"old", key=key)
        assert bench.payloads() == [b"old"]
        assert bench.engine.inspect.counts("q") == QueueCounts(leased=1, newer=1)
        assert bench.engine.inspect.counts("q.dead") == QueueCounts()
        bench.check()
        assert bench.engine.upkeep.regain_part() == 0, "still an old process"
        with upgraded():
            bench.duties().run_once()
            assert delivered_once(bench) == [payload]

    def test_it_comes_back_to_its_place(self, bench: Bench) -> None:
        bench.put(b"first")
        bench.put(b"urgent", priority=5)
        make_newer(bench)
        bench.put(b"last")
        (last,) = bench.take()
        bench.engine.messages.release([last.lease])
        with upgraded():
            assert bench.engine.upkeep.regain_part() == 2
            make_newer(bench)
            assert delivered_once(bench) == [b"urgent", b"first", b"last"]

    def test_who_waits_is_woken_when_it_is_back(self, bench: Bench) -> None:
        bench.put(b"new", key="k")
        make_newer(bench)
        while (watches := bench.engine.messages.arm(["q"])) is None:
            assert bench.payloads() == []
        for watch in watches:
            watch.cancel()
        with upgraded():
            bench.engine.upkeep.regain_part()
            assert bench.engine.messages.arm(["q"]) is None

    @pytest.mark.parametrize("key", ["", "k"])
    def test_an_old_promoter_makes_it_ready(self, bench: Bench, key: str) -> None:
        bench.put(b"new", key=key, due_ms=bench.clock.wall_ms() + 1000)
        make_newer(bench)
        bench.later(1)
        assert promote_all(bench.engine)[0] == 1
        assert bench.counts() == (1, 0, 0)
        bench.check()
        assert [each.state for each in bench.engine.inspect.find_task(b"new".hex())] == ["ready"]
        assert bench.payloads() == []
        with upgraded():
            bench.engine.upkeep.regain_part()
            (delivery,) = bench.take()
            assert (delivery.payload, delivery.key) == (b"new", key)
            bench.engine.messages.ack([delivery.lease])

    @pytest.mark.parametrize("leases", [False, True], ids=["records", "leases"])
    @pytest.mark.parametrize("key", ["", "k"])
    def test_an_old_sweep_brings_it_back_or_keeps_it(self, bench: Bench, key: str, *, leases: bool) -> None:
        """Of a new worker that has died; the attempt counts."""
        bench.engine.queues.limit("q", "k", KeyLimits(max_in_flight=1))
        bench.put(b"new", key=key)
        dead = bench.engine.sessions.open({})
        bench.take(session=dead)
        make_newer(bench, leases=leases)
        bench.engine.sessions.fence(dead, bench.beats()[dead])
        assert bench.engine.sessions.release(dead) == 1
        assert dead not in bench.beats(), "nothing of it is left to be swept"
        assert bench.engine.inspect.counts("unreadable.dead") == bench.engine.inspect.counts("q.dead") == QueueCounts()
        assert (
            bench.engine.inspect.counts("q") == QueueCounts(newer=1) if leases else QueueCounts(ready=1, ready_bytes=3)
        )
        bench.check()
        assert bench.payloads() == []
        with upgraded():
            bench.engine.upkeep.regain_part()
            (delivery,) = bench.take()
            assert (delivery.payload, delivery.redeliveries) == (b"new", 1)
            bench.engine.messages.ack([delivery.lease])

    def test_poison_ends_although_old_processes_sweep(self, bench: Bench) -> None:
        """What is over its limit is kept, and buried by who can."""
        bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-delivery-limit": 2}))
        bench.put(b"poison")
        make_newer(bench)
        for _ in range(3):
            dead = bench.engine.sessions.open({})
            with upgraded(leases=False):
                assert len(bench.take(session=dead)) == 1
            bench.engine.sessions.fence(dead, bench.beats()[dead])
            bench.engine.sessions.release(dead)
        assert bench.engine.inspect.counts("q") == QueueCounts(newer=1)
        with upgraded():
            bench.engine.upkeep.regain_part()
            (letter,) = bench.take(1, "q.dead")
            assert (letter.payload, letter.deaths[0].reason) == (b"poison", "delivery_limit")
            bench.engine.messages.ack([letter.lease])

    def test_what_has_come_back_as_often_as_it_may_is_delivered_once_more(self, bench: Bench) -> None:
        """That an old process kept it counts for nothing."""
        bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-delivery-limit": 2}))
        bench.put(b"new")
        for _ in range(2):
            bench.engine.messages.release([each.lease for each in bench.take()])
        make_newer(bench)
        assert bench.payloads() == []
        with upgraded():
            bench.engine.upkeep.regain_part()
            (delivery,) = bench.take()
            assert (delivery.payload, delivery.redeliveries) == (b"new", 2)
            bench.engine.messages.ack([delivery.lease])

    def test_a_lease_that_was_kept_and_can_not_be_read_is_dead_lettered(self, bench: Bench) -> None:
        bench.put(b"new")
        dead = bench.engine.sessions.open({})
        bench.take(session=dead)
        make_newer(bench, leases=True)
        bench.engine.sessions.fence(dead, bench.beats()[dead])
        bench.engine.sessions.release(dead)
        ((kept, value),) = bench.engine.upkeep.rows(bench.engine.keys.all_newer)
        bench.write(lambda tr: tr.set(kept, value[:3]))
        with upgraded():
            assert bench.engine.upkeep.regain_part() == 1
            (letter,) = bench.engine.inspect.peek("q.dead", 1)
        assert bench.engine.inspect.counts("q") == QueueCounts()
        assert (letter.deaths[0].queue, letter.deaths[0].reason) == ("q", "malformed")
        assert "unreadable lease" in letter.deaths[0].details["error"]
        bench.write(lambda tr: tr.clear_range(*range_of(bench.engine.keys._key("task"))))

    def test_an_old_publisher_does_not_bury_what_gives_way(self, bench: Bench) -> None:
        bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-max-length": 1, **DLX}))
        bench.put(b"new")
        make_newer(bench)
        bench.put(b"old")
        assert bench.engine.inspect.counts("q") == QueueCounts(1, ready_bytes=3, newer=1)
        with upgraded():
            bench.engine.upkeep.regain_part()
            assert bench.engine.upkeep.trim_full_part("q") == 1
            (letter,) = bench.take(1, "grave")
            assert (letter.payload, letter.deaths[0].reason) == (b"new", "maxlen")
            bench.engine.messages.ack([letter.lease])

    def test_an_old_replay_leaves_it_where_it_is(self, bench: Bench) -> None:
        bench.put(b"new")
        bench.engine.messages.reject([each.lease for each in bench.take()])
        make_newer(bench)
        assert len(bench.engine.dead_letters.look(bench.engine.dead_letters.walk("q.dead"), b"", 10)[0]) == 1
        assert replay(bench.engine, "q", 10) == 0
        assert trim_all(bench.engine) == 0
        (listed,) = bench.engine.inspect.page("q.dead", View("ready"), 10).messages
        with pytest.raises(FormatError, match="Upgrade celery-fdb"):
            bench.engine.dead_letters.replay_at("q.dead", listed.position, listed.message.message_id)
        with upgraded():
            assert replay(bench.engine, "q", 10) == 1
            assert delivered_once(bench) == [b"new"]

    def test_a_move_takes_it_along(self, bench: Bench) -> None:
        bench.put(LARGE, key="k")
        make_newer(bench)
        assert bench.engine.messages.move("q", "r") == 1
        with upgraded():
            assert delivered_once(bench, "r") == [LARGE]

    # -- what else an old process does -------------------------------------------------------------------------------

    def test_what_an_old_process_deletes_leaves_nothing(self, bench: Bench) -> None:
        bench.put(LARGE + b"z")
        bench.engine.messages.reject([each.lease for each in bench.take()])
        bench.put(LARGE, queue="purged")
        bench.put(LARGE, b"y" * len(LARGE), queue="cancelled")
        make_newer(bench)
        assert bench.engine.dead_letters.discard_part(bench.engine.dead_letters.walk("q.dead"), b"", 10)[0] == 1
        assert bench.engine.queues.purge("purged") == 1
        assert len(bench.engine.messages.cancel(LARGE[:100].hex())) == 1
        with upgraded():
            (left,) = bench.engine.inspect.page("cancelled", View("ready"), 10).messages
        assert bench.engine.messages.delete("cancelled", left.message.message_id)
        assert leftovers(bench.engine) == []

    def test_what_is_kept_stays_when_its_queue_is_purged(self, bench: Bench) -> None:
        """As what is under a lease; so it is no loss to have met an old process."""
        bench.put(b"new")
        make_newer(bench)
        bench.take()
        assert bench.engine.queues.purge("q") == 0
        assert bench.engine.inspect.queues()["q"].newer == 1
        with upgraded():
            bench.engine.upkeep.regain_part()
            assert delivered_once(bench) == [b"new"]

    def test_an_export_does_not_leave_it_out_in_silence(self, bench: Bench) -> None:
        bench.put(b"new")
        make_newer(bench)
        for _ in ("in its place", "kept"):
            with pytest.raises(FormatError, match=r"queue: q\)\. Upgrade celery-fdb"):
                list(bench.engine.transfer.dump("q"))
            bench.take()
        with upgraded():
            bench.engine.upkeep.regain_part()
            assert [each.payload for each in bench.engine.transfer.dump("q")] == [b"new"]
            delivered_once(bench)

    def test_bytes_that_only_begin_like_a_newer_record_are_poison(self, bench: Bench) -> None:
        keys, value = bench.engine.keys, b"\x02garbage"
        place = keys.rank(9) + b"\x33" + bytes(12)

        def poison(tr: Transaction) -> None:
            tr.set(keys.ready("q") + place, value)
            tr.add(keys.count("q", "ready"), encode_amount(1, len(value)), width=AMOUNT_BYTES)

        bench.write(poison)
        assert bench.payloads() == []
        assert bench.payloads(1, "q.dead") == [value]

    # -- who brings it back ------------------------------------------------------------------------------------------

    def test_who_knows_the_version_brings_it_back_though_an_old_process_is_the_promoter(self, bench: Bench) -> None:
        old = bench.duties()
        old.run_once()
        bench.put(b"new")
        make_newer(bench)
        bench.take()
        new = bench.duties(bench.engine.sessions.open({}))
        with upgraded():
            new.run_once()
            assert not new._role.hold()
            assert delivered_once(bench) == [b"new"]

    def test_what_an_old_process_keeps_costs_it_nothing_afterwards(self, database: Database) -> None:
        """However many there are: it reads no row of them."""
        counting = CountingDatabase(database)
        bench = Bench(counting)
        bench.put(*[b"new"] * 5)
        make_newer(bench)
        assert bench.payloads() == []
        counting.reset()
        assert bench.engine.upkeep.regain_part() == 0
        assert (counting.total().rows, counting.total().round_trips) == (0, 2)
        bench.check()
        bench.clean()

    def test_more_than_a_transaction_of_them(self, bench: Bench) -> None:
        for number in range(450):
            bench.put(b"%d" % number)
        make_newer(bench)
        while bench.engine.inspect.counts("q").ready:
            bench.take()
        with upgraded():
            bench.duties().run_once()
            make_newer(bench)
            assert delivered_once(bench) == [b"%d" % number for number in range(450)]


def delivered_once(bench: Bench, queue: str = "q") -> list[bytes]:
    """All that can be had, in its order; afterwards nothing is left."""
    found: list[bytes] = []
    while part := bench.take(100, queue):
        found += [each.payload for each in part]
        assert bench.engine.messages.ack([each.lease for each in part]) == [True] * len(part)
    assert bench.engine.inspect.counts(queue).newer == 0
    return found
