"""What the duties must get done, and what a claim must get through, over any store: a suite to be run once per driver.

As :class:`~kit.conformance.queue.QueueConformance`: a namespace per test, a manual clock, and after each
test every counter equals a full scan.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest

from kit.conformance.invariants import leftovers
from kit.conformance.queue import Bench, OnBench
from kit.duties import promote_all
from kit.records import record_of
from kombu_fdb.engine import topology
from kombu_fdb.engine.copies import CopiesMissing
from kombu_fdb.engine.messages import overflow, settle
from kombu_fdb.engine.messages.bury import MOST_LETTERS
from kombu_fdb.engine.messages.message import put_ready
from kombu_fdb.engine.upkeep import promotion
from kombu_fdb.errors import FormatError, LimitExceeded
from kombu_fdb.keyspace.codec import INLINE_BYTES, Record
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import Death, Delivery, Publication
from kombu_fdb.process.duties import ASIDE_PAUSE_S
from kombu_fdb.process.duty_cycle import TURN_TRANSACTIONS, DutyCycle
from kombu_fdb.routing.tables import Exchange, QueueDeclaration
from kombu_fdb.store.protocol import Database, Transaction

GRAVES = ("grave-1", "grave-2", "grave-3")
LARGE = 6_000_000


class DutiesConformance(OnBench):
    """Run over every store."""

    # -- moves of any size -----------------------------------------------------------------------------------------

    def test_a_large_message_dies_into_several_queues(self, bench: Bench) -> None:
        declare_graves(bench)
        bench.put(b"x" * LARGE)
        (delivery,) = bench.take()
        assert bench.engine.messages.reject([delivery.lease]) == [True]
        for queue in GRAVES:
            (letter,) = bench.take(1, queue)
            assert letter.payload == b"x" * LARGE
            assert bench.engine.messages.ack([letter.lease]) == [True]
        assert_nothing_left(bench)

    def test_an_abandoned_copy_is_cleared(self, bench: Bench) -> None:
        """Its copier died, and the message was acknowledged meanwhile."""
        declare_graves(bench)
        bench.put(b"x" * LARGE)
        (delivery,) = bench.take()
        message_id = delivery.message_id
        bench.engine.transactions.copy_part(
            CopiesMissing(message_id, GRAVES), "grave-1", b"c" * 16, bench.clock.monotonic() + 30, 3
        )
        bench.engine.messages.ack([delivery.lease])
        duties = bench.duties()
        for _ in range(6):
            duties.clear_leftovers()
            bench.later(200)
        assert_nothing_left(bench)

    def test_the_next_session_goes_on_with_a_copy(self, bench: Bench) -> None:
        declare_graves(bench)
        bench.put(b"x" * LARGE)
        (delivery,) = bench.take()
        for target in GRAVES[1:]:
            copy_some(bench, delivery.message_id, target, b"%16s" % target.encode())
        bench.another().messages.reject([delivery.lease])
        letters = [bench.take(1, queue)[0] for queue in GRAVES]
        assert {letter.payload for letter in letters} == {b"x" * LARGE}
        assert [letter.message_id for letter in letters[1:]] == [b"%16s" % target.encode() for target in GRAVES[1:]]
        bench.engine.messages.ack([letter.lease for letter in letters])
        assert_nothing_left(bench)

    def test_a_copy_that_was_cut_short_is_made_anew(self, bench: Bench) -> None:
        """Its number of chunks says that it is all, and its message has more."""
        declare_graves(bench)
        bench.put(b"x" * LARGE)
        (delivery,) = bench.take()
        keys = bench.engine.keys
        short = struct.pack(">16sIB", b"c" * 16, 2, True)
        bench.write(lambda tr: tr.set(keys.copy(delivery.message_id, GRAVES[1]), short))
        assert bench.engine.messages.reject([delivery.lease]) == [True]
        letters = take_letters(bench)
        assert [letter.payload for letter in letters] == [b"x" * LARGE] * 3
        bench.engine.messages.ack([letter.lease for letter in letters])
        assert_nothing_left(bench)

    def test_of_a_message_that_has_lost_its_end_the_rest_is_copied(self, bench: Bench) -> None:
        """It can't be read any more, wherever it goes; its burial ends all the same."""
        declare_graves(bench)
        bench.put(b"x" * LARGE)
        (delivery,) = bench.take()
        _begin, end = bench.engine.keys.bodies(delivery.message_id)
        bench.write(lambda tr: tr.clear_range(bench.engine.keys.body(delivery.message_id, 20), end))
        assert bench.engine.messages.reject([delivery.lease]) == [True]
        assert [bench.counts(queue) for queue in GRAVES] == [(1, 0, 0)] * 3
        for queue in GRAVES:
            bench.engine.queues.purge(queue)
        assert_nothing_left(bench)

    def test_a_large_message_from_outside_dies_into_several_queues(self, bench: Bench) -> None:
        """As a failed task that was acknowledged before it ran."""
        declare_graves(bench)
        bench.engine.publisher.bury_copy("q", Publication("", "q", b"x" * LARGE, task_id="t"), details={"error": "e"})
        letters = take_letters(bench)
        assert [each.payload for each in letters] == [b"x" * LARGE] * 3
        assert [each.deaths[0].details for each in letters] == [{"error": "e"}] * 3
        bench.engine.messages.ack([each.lease for each in letters])
        assert_nothing_left(bench)

    def test_a_large_message_is_refused_into_several_queues(self, bench: Bench) -> None:
        """Beside another of the same batch, which stays."""
        declare_graves(bench, **{"x-max-length": 0, "x-overflow": "reject-publish-dlx"})
        large = Publication("", "q", b"x" * LARGE, dedup_id="d", dedup_window_ms=60_000)
        assert bench.engine.publisher.publish([Publication("", "other", b"a"), large]) == [["other"], ["q"]]
        assert bench.engine.publisher.publish([large]) == [["q"]], "stored once"
        letters = take_letters(bench)
        assert [(each.payload, each.deaths[0].reason) for each in letters] == [(b"x" * LARGE, "maxlen")] * 3
        bench.engine.messages.ack([each.lease for each in letters + bench.take(1, "other")])
        assert_nothing_left(bench)

    def test_a_large_message_is_refused_by_two_queues_into_the_same(self, bench: Bench) -> None:
        arguments: dict[str, object] = {"x-max-length": 0, "x-overflow": "reject-publish-dlx"}
        declare_graves(bench, **arguments)
        bench.engine.queues.declare(QueueDeclaration("r", arguments={"x-dead-letter-exchange": "graves", **arguments}))
        bench.engine.queues.declare_exchange(Exchange("both", "fanout"))
        for queue in "qr":
            bench.engine.queues.bind(queue, "both", "")
        bench.engine.publisher.publish([Publication("both", "", b"x" * (LARGE // 2))])
        letters = take_letters(bench) + take_letters(bench)
        assert sorted(each.deaths[0].queue for each in letters) == ["q"] * 3 + ["r"] * 3
        assert len({each.message_id for each in letters}) == 6
        assert {each.payload for each in letters} == {b"x" * (LARGE // 2)}
        bench.engine.messages.ack([each.lease for each in letters])
        assert_nothing_left(bench)

    @pytest.mark.parametrize("parts", [0, 1, 6])
    def test_a_burial_from_outside_that_dies_on_its_way_leaves_nothing(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, parts: int
    ) -> None:
        """No letter is there; the chunks are cleared by the duties, row by row."""
        declare_graves(bench)
        duties = bench.duties()
        duties.run_once()
        begin = message_rows(bench)
        die_after(monkeypatch, bench, parts)
        with pytest.raises(Died):
            bench.engine.publisher.bury_copy("q", Publication("", "q", b"x" * LARGE))
        assert [bench.counts(queue) for queue in GRAVES] == [(0, 0, 0)] * 3
        assert (message_rows(bench) > begin) == (parts > 0)
        for _ in range(6):
            duties.clear_leftovers()
            bench.later(200)
        assert message_rows(bench) == begin
        assert_nothing_left(bench)

    def test_a_dead_session_comes_back_however_large_what_it_held_is(self, bench: Bench) -> None:
        """BACK-SOON: one message that dies into several queues, and 200 with histories of 64 kB."""
        declare_graves(bench, **{"x-delivery-limit": 0})
        bench.put(b"x" * LARGE)
        store_with_histories(bench, "others", 200)
        dead = bench.engine.sessions.open({})
        held: list[Delivery] = []
        while part := bench.take(1000, "q", "others", session=dead):
            held += part
        assert len(held) == 201
        sweep_until(bench, lambda: bench.counts("others") == (200, 0, 0))
        assert [bench.counts(queue) for queue in GRAVES] == [(1, 0, 0)] * 3
        assert dead not in bench.beats()

    def test_windows_are_settled_however_large_they_are(self, bench: Bench) -> None:
        store_with_histories(bench, "q", 200)
        leases = [each.lease for each in take_all(bench)]
        assert bench.engine.messages.release(leases, due_ms=bench.clock.wall_ms() + 1000) == [True] * 200
        bench.later(1)
        promote_all(bench.engine)
        assert bench.counts() == (200, 0, 0)
        leases = [each.lease for each in take_all(bench)]
        assert bench.engine.messages.reject(leases) == [True] * 200
        assert bench.counts("q.dead") == (200, 0, 0)

    def test_a_history_never_outgrows_its_record(self, bench: Bench) -> None:
        deaths = tuple(
            Death(f"{number}-" + "n" * 240, "rejected", 1, 1, "e" * 200, ("k" * 200,)) for number in range(118)
        )
        store(bench, "q", b"a", deaths)
        (delivery,) = bench.take()
        assert bench.engine.messages.reject([delivery.lease], traceback="t" * 100_000) == [True]
        assert bench.counts("q.dead") == (1, 0, 0)

    @pytest.mark.parametrize("number", [150, MOST_LETTERS])
    def test_a_message_with_a_full_history_dies_into_many_queues(self, bench: Bench, number: int) -> None:
        """Each letter knows a part of it, the newest; however long the names are."""
        graves = [f"{each:04}-{'g' * 240}" for each in range(number)]
        declare_graves(bench)
        for queue in graves[len(GRAVES) :]:
            bench.engine.queues.bind(queue, "graves", "")
        deaths = tuple(Death(f"{each}-" + "n" * 240, "expired", 1, 1, "e", ("k",)) for each in range(250))
        store(bench, "q", b"x" * INLINE_BYTES, deaths)
        (delivery,) = bench.take()
        assert bench.engine.messages.reject([delivery.lease], error="e", traceback="t" * 100_000) == [True]
        letters = bench.take(2, GRAVES[0], graves[-1])
        assert len(letters) == 2
        for letter in letters:
            assert (letter.payload, letter.deaths[0].details["error"]) == (b"x" * INLINE_BYTES, "e")
            assert letter.deaths[1:] == deaths[: len(letter.deaths) - 1]
            assert len(letter.deaths) >= 5

    def test_an_exchange_that_reaches_more_queues_than_a_burial_can_counts_as_not_set(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kombu_fdb.engine.messages.bury.MOST_LETTERS", len(GRAVES) - 1)
        declare_graves(bench)
        bench.put(b"x")
        assert bench.engine.messages.reject([each.lease for each in bench.take()]) == [True]
        assert [bench.counts(queue)[0] for queue in (*GRAVES, "q.dead")] == [0] * len(GRAVES) + [1]

    # -- claims ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("key", ["", "k"])
    def test_large_messages_arrive_whatever_the_window(self, bench: Bench, key: str) -> None:
        for number in range(6):
            bench.put(b"%d" % number * 4_000_000, key=key)
        first = bench.take(64)
        assert 0 < len(first) < 6, "bounded by bytes"
        found = first + take_all(bench)
        assert [each.payload[:1] for each in found] == [b"%d" % number for number in range(6)]

    @pytest.mark.parametrize("key", ["", "k"])
    def test_a_window_of_many_messages_arrives(self, bench: Bench, key: str) -> None:
        for _ in range(5):
            bench.engine.publisher.publish([Publication("", "q", b"x" * 2_000, key=key)] * 1_000)
        assert len(take_all(bench, 4096)) == 5_000

    def test_messages_with_long_histories_arrive(self, bench: Bench) -> None:
        store_with_histories(bench, "q", 200)
        assert len(take_all(bench, 200)) == 200

    def test_the_largest_message_arrives_and_leaves(self, database: Database) -> None:
        bench = Bench(database, max_message_size=9_000_000)
        bench.put(b"x" * 9_000_000, b"small")
        assert [len(each.payload) for each in bench.take(64)] == [9_000_000]
        assert [len(each.payload) for each in bench.take(64)] == [5]
        bench.check()
        bench.clean()

    # -- each in its turn ------------------------------------------------------------------------------------------

    def test_one_message_that_fits_nowhere_keeps_back_no_other(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is skipped and stays; the session's others come back, and so do those of sessions behind it."""
        sessions = [bench.engine.sessions.open({}) for _ in range(2)]
        for session in sessions:
            bench.put(*[b"%d" % number for number in range(5)])
            bench.take(5, session=session)
        refuse(monkeypatch, settle, "release_message", lambda message: decoded(message.value).payload == b"2")
        sweep_until(bench, lambda: bench.counts() == (8, 0, 2))
        assert {(each.duty, each.error) for each in bench.engine.upkeep.asides()} == {
            ("sweep", "over a limit of the store")
        }
        monkeypatch.undo()
        sweep_until(bench, lambda: bench.counts() == (10, 0, 0))
        assert not set(sessions) & set(bench.beats())

    def test_a_queue_that_can_not_be_promoted_keeps_back_no_other(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        due_ms = bench.clock.wall_ms() + 1000
        for queue in ("a", "b", "c"):
            bench.put(b"x", queue=queue, due_ms=due_ms)
        bench.later(1)
        refuse(monkeypatch, promotion, "_promote_one", lambda queue: queue == "a")
        duties = bench.duties()
        assert duties.run_once() > 0, "no busy loop about what can't be done"
        assert [bench.counts(queue) for queue in ("a", "b", "c")] == [(0, 1, 0), (1, 0, 0), (1, 0, 0)]
        assert [(each.duty, each.subject, each.times) for each in bench.engine.upkeep.asides()] == [("promote", "a", 1)]
        monkeypatch.undo()
        bench.later(ASIDE_PAUSE_S)
        duties.run_once()
        assert bench.counts("a") == (1, 0, 0)
        assert bench.engine.upkeep.asides() == []

    @pytest.mark.parametrize("place", [b"\x00sorts first", b"\x15\x33odd", b"\x30sorts last"])
    def test_a_delayed_row_that_can_not_be_read_is_buried_and_the_next_is_promoted(
        self, bench: Bench, place: bytes
    ) -> None:
        bench.put(b"x", due_ms=bench.clock.wall_ms() + 1000)
        keys = bench.engine.keys
        bench.write(lambda tr: tr.set(keys.delayed("q") + place, b"junk"))
        bench.write(lambda tr: tr.add(keys.count("q", "delayed"), 1))
        bench.later(1)
        bench.duties().run_once()
        assert (bench.counts(), bench.counts("q.dead")) == ((1, 0, 0), (1, 0, 0))
        (letter,) = bench.engine.inspect.peek("q.dead", 1)
        assert letter.deaths[0].reason == "malformed"
        assert "unreadable" in letter.deaths[0].details["error"]

    def test_promotion_does_not_wait_for_dedup_ids_that_keep_ending(self, bench: Bench) -> None:
        keys = bench.engine.keys
        for first in range(0, 30_000, 1_000):
            ends = [keys.dedup_end(1, "", "q", f"{first + number}") for number in range(1_000)]
            bench.write(partial(set_all, ends))
        bench.put(b"x", due_ms=bench.clock.wall_ms() + 1000)
        bench.later(1)
        duties = bench.duties()
        assert duties.run_once() == 0, "there is more to do"
        assert bench.counts() == (1, 0, 0)
        assert bench.engine.upkeep.rows(keys.dedup_ended(2)), "it came to its turn before the others were done"
        duties.run_once()
        assert bench.engine.upkeep.rows(keys.dedup_ended(2)) == []

    # -- full queues -----------------------------------------------------------------------------------------------

    def test_more_queues_of_dead_letters_than_a_turn_has_transactions(self, bench: Bench) -> None:
        """Each has its turn, in two rounds, and then the duties rest."""
        queues = [f"q{number}" for number in range(TURN_TRANSACTIONS + 2)]
        for queue in queues:
            bench.put(b"x", queue=queue)
        bench.engine.messages.reject([delivery.lease for delivery in bench.take(len(queues), *queues)])
        duties = bench.duties()
        assert duties.run_once() == 0.0
        assert duties.run_once() > 0.0

    def test_a_full_queue_with_a_large_head_takes_small_messages(self, bench: Bench) -> None:
        declare_graves(bench, **{"x-max-length": 1})
        bench.put(b"x" * LARGE, b"small")
        assert bench.payloads() == [b"small"]
        assert [bench.counts(queue) for queue in GRAVES] == [(1, 0, 0)] * 3

    def test_a_head_that_can_not_give_way_refuses_no_put(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-max-length": 1}))
        bench.put(b"a")
        refuse(monkeypatch, overflow, "_give_way", lambda *_: True)
        bench.put(b"b")
        assert bench.counts() == (2, 0, 0)
        bench.duties().run_once()
        assert [(each.duty, each.subject) for each in bench.engine.upkeep.asides()] == [("trim full queues", "q")]
        monkeypatch.undo()
        assert bench.engine.upkeep.trim_full_part("q") == 1

    def test_messages_of_several_calls_in_a_callers_transaction(self, bench: Bench) -> None:
        """A full queue is not read in the transaction that holds new messages of it."""
        bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-max-length": 2}))
        bench.put(b"a", b"b")
        tr = bench.database.begin(timeout_s=5.0)
        stamped = 0
        for payload in (b"c", b"d", b"e"):
            _, stamped = bench.engine.publisher.publish_in(tr, [Publication("", "q", payload)], stamped=stamped)
        tr.commit()
        assert (stamped, bench.counts()) == (3, (5, 0, 0))
        bench.put(b"f")
        assert bench.payloads() == [b"e", b"f"]

    def test_too_many_copies_for_one_transaction(self, bench: Bench) -> None:
        bench.engine.queues.declare_exchange(Exchange("wide", "fanout"))
        for number in range(40):
            bench.engine.queues.bind(f"q{number}", "wide", "")
        with pytest.raises(LimitExceeded, match="Publish fewer at once"):
            bench.engine.publisher.publish([Publication("wide", "", b"a")] * 2_000)
        assert bench.counts("q0") == (0, 0, 0)

    # -- what is no longer needed ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("key", ["", "k"])
    def test_expired_messages_are_dropped_without_a_claim(self, bench: Bench, key: str) -> None:
        for number in range(300):
            bench.put(b"%d" % number, key=key, ttl_ms=1000 if number % 2 else None)
        bench.later(2)
        run(bench, bench.duties(), 5)
        assert bench.counts() == (150, 0, 0)
        assert len(take_all(bench)) == 150

    def test_one_off_queues_exchanges_and_processes_leave_no_rows(self, bench: Bench) -> None:
        begin = rows_in(bench)
        for number in range(20):
            process = bench.another()
            session = process.sessions.open({})
            process.queues.declare_exchange(Exchange(f"x{number}", "fanout"))
            process.queues.declare(QueueDeclaration(f"q{number}", auto_delete=True))
            process.queues.bind(f"q{number}", f"x{number}", "")
            process.queues.add_consumer(session, f"q{number}", "tag")
            process.publisher.publish(
                [Publication(f"x{number}", "", b"a", key="k"), Publication("", f"q{number}", b"b", key="k")]
            )
            held = process.messages.claim(session, [f"q{number}"], 1)
            process.queues.delete(f"q{number}")
            process.queues.delete_exchange(f"x{number}")
            process.messages.ack([each.lease for each in held])
            process.sessions.close(session)
        assert rows_in(bench) > begin + 20
        duties = bench.duties()
        run(bench, duties, 1_300, 10)
        assert rows_in(bench) <= begin + OWN_ROWS

    @pytest.mark.parametrize(("of_the_queue", "own"), [({"x-message-ttl": 5_000}, {}), ({}, {"ttl_ms": 5_000})])
    def test_a_time_to_live_and_a_dead_letter_exchange_make_a_delay(
        self, bench: Bench, of_the_queue: dict[str, int], own: dict[str, Any]
    ) -> None:
        """RabbitMQ's way to retry: the queue in which the messages wait has no consumer."""
        arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work", **of_the_queue}
        bench.engine.queues.declare(QueueDeclaration("wait", arguments=arguments))
        bench.engine.queues.declare(QueueDeclaration("work"))
        duties = bench.duties()
        run(bench, duties, 30, 0.5)
        for number in range(300):
            bench.put(b"%d" % number, queue="wait", key="a" if number == 7 else "", **own)
        run(bench, duties, 4.5, 0.5)
        assert bench.counts("work") == (0, 0, 0)
        run(bench, duties, 2, 0.5)
        assert bench.counts("work") == (300, 0, 0)

    def test_a_key_s_messages_expire_on_time_behind_those_of_other_keys(self, bench: Bench) -> None:
        """More than one transaction looks at, and none of them has expired."""
        arguments = {"x-message-ttl": 20_000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work"}
        bench.engine.queues.declare(QueueDeclaration("wait", arguments=arguments))
        bench.engine.queues.declare(QueueDeclaration("work"))
        duties = bench.duties()
        run(bench, duties, 30, 0.5)
        bench.put(b"first", b"second", queue="wait", key="zeta")
        run(bench, duties, 10, 0.5)
        bench.engine.publisher.publish([Publication("", "wait", b"later", key="acme")] * 300)
        run(bench, duties, 9.5, 0.5)
        assert bench.counts("work") == (0, 0, 0)
        run(bench, duties, 2, 0.5)
        assert bench.payloads(9, "work") == [b"first", b"second"]

    def test_services_of_a_line_whose_server_is_gone_leave_no_rows(self, bench: Bench) -> None:
        """That of a living one says how long the others are patient."""
        keys, begin = bench.engine.keys, rows_in(bench)
        bench.write(lambda tr: tr.set(keys.served(b"1" * 16), bytes(20)))
        bench.write(lambda tr: tr.set(keys.served(b"2" * 16), bench.session + bytes(4)))
        run(bench, bench.duties(), 1_300, 10)
        assert [key for key, _ in bench.engine.upkeep.rows(keys.all_served)] == [keys.served(b"2" * 16)]
        assert rows_in(bench) <= begin + OWN_ROWS

    def test_purge_leaves_what_comes_meanwhile(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        """So it comes to its end, however much that is."""
        bench.engine.publisher.publish([Publication("", "q", b"old")] * 1_200)
        bench.put(b"old", due_ms=bench.clock.wall_ms() + 1000)
        purge_part = topology.purge_part

        def meanwhile(*given: Any) -> tuple[int, bytes]:
            bench.another().publisher.publish([Publication("", "q", b"new")] * 600)
            return purge_part(*given)

        monkeypatch.setattr(topology, "purge_part", meanwhile)
        assert bench.engine.queues.purge("q") == 1_201
        assert {each.payload for each in take_all(bench, 4096)} == {b"new"}


#: What a process that goes on may have in the store besides: its role, its commit tokens.
OWN_ROWS = 12


def rows_in(bench: Bench) -> int:
    """All but the samples, which are as many as they are."""
    keys = bench.engine.keys
    rows = bench.engine.upkeep.rows(range_of(keys.prefix))
    return sum(keys.unpack(key)[0] != "sample" for key, _ in rows)


def run(bench: Bench, duties: DutyCycle, seconds: float, step_s: float = 1.0) -> None:
    """Let time pass for a process that lives."""
    for _ in range(int(seconds / step_s)):
        assert bench.engine.sessions.beat(bench.session)
        duties.run_once()
        bench.later(step_s)


def refuse(monkeypatch: pytest.MonkeyPatch, module: Any, verb: str, about: Callable[..., bool]) -> None:
    """Let a verb raise for what ``about`` is true of: one of its arguments."""
    original = getattr(module, verb)

    def refusing(*given: Any, **named: Any) -> Any:
        for each in given:
            subject = decoded(each) if isinstance(each, bytes) else each
            try:
                refused = about(subject)
            except AttributeError:
                continue
            if refused:
                raise LimitExceeded
        return original(*given, **named)

    monkeypatch.setattr(module, verb, refusing)


def set_all(keys: list[bytes], tr: Transaction) -> None:
    for key in keys:
        tr.set(key, b"")


def decoded(value: bytes) -> Any:
    try:
        return Record.decode(value)
    except FormatError:
        return value


def copy_some(bench: Bench, message_id: bytes, target: str, copy_id: bytes) -> None:
    """Its first chunks, as a burial does that dies then."""
    bench.engine.transactions.copy_part(
        CopiesMissing(message_id, [target]), target, copy_id, bench.clock.monotonic() + 30, 3
    )


class Died(Exception):
    """The process, at this point."""


def die_after(monkeypatch: pytest.MonkeyPatch, bench: Bench, parts: int) -> None:
    """The engine copies so many parts of a payload, and nothing more."""
    copy_part, done = bench.engine.transactions.copy_part, count(1)

    def copy_or_die(*given: Any) -> bool:
        if next(done) > parts:
            raise Died
        return copy_part(*given)

    monkeypatch.setattr(bench.engine.transactions, "copy_part", copy_or_die)


def take_letters(bench: Bench) -> list[Delivery]:
    """One of each grave."""
    return [bench.take(1, queue)[0] for queue in GRAVES]


def message_rows(bench: Bench) -> int:
    """Rows of messages, chunks and copies."""
    keys = bench.engine.keys
    tags = ("ready", "keyed", "delayed", "lease", "task", "body", "copy")
    return sum(len(bench.engine.upkeep.rows(range_of(keys._key(tag)))) for tag in tags)


def declare_graves(bench: Bench, **arguments: object) -> None:
    bench.engine.queues.declare_exchange(Exchange("graves", "fanout"))
    for queue in GRAVES:
        bench.engine.queues.bind(queue, "graves", "")
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-dead-letter-exchange": "graves", **arguments}))


def store_with_histories(bench: Bench, queue: str, number: int) -> None:
    """Messages with histories of about 64 kB each."""
    deaths = tuple(Death(f"dead-{each}", "rejected", 1, 1, details={"traceback": "t" * 15_000}) for each in range(4))
    for _ in range(number):
        store(bench, queue, b"a", deaths)


def store(bench: Bench, queue: str, payload: bytes, deaths: tuple[Death, ...]) -> None:
    record = record_of(bench.engine.transactions.ids(), payload, published_ms=1, expires_ms=0, deaths=deaths)
    bench.work(lambda work: put_ready(work, queue, "", work.keys.rank(0), record))


def take_all(bench: Bench, limit: int = 100, *queues: str) -> list[Delivery]:
    found: list[Delivery] = []
    while part := bench.take(limit, *queues):
        found += part
    return found


def sweep_until(bench: Bench, condition: Callable[[], bool]) -> None:
    duties = bench.duties()
    for _ in range(100):
        if condition():
            return
        bench.later(5)
        assert bench.engine.sessions.beat(bench.session)
        duties.sweep()
    raise AssertionError("the sweep did not come to its end")


def assert_nothing_left(bench: Bench) -> None:
    keys = bench.engine.keys
    assert leftovers(bench.engine) == ([] if not bench.engine.inspect.bindings() else leftovers_but_bindings(bench))
    assert bench.engine.transactions.read(lambda work: work.tr.get_range(*keys.all_copies, snapshot=True)) == []


def leftovers_but_bindings(bench: Bench) -> list[bytes]:
    keys = bench.engine.keys
    prefixes = keys._key("binding"), keys._key("bound")
    return [key for key in leftovers(bench.engine) if key.startswith(prefixes)]
