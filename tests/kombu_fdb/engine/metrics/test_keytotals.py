"""Totals by key: bounded in number, and nothing is lost but names."""

from collections import Counter

import pytest
from kit.conformance.queue import Bench
from kit.costs import CountingDatabase
from kit.faults import FaultyDatabase

from kombu_fdb.engine.messages import claim
from kombu_fdb.engine.metrics import totals
from kombu_fdb.engine.metrics.totals import (
    KEYS_KEPT,
    KINDS_PENDING,
    NAMES,
    NAMES_PER_QUEUE,
    NAMES_S,
    OTHERS,
    surplus,
)
from kombu_fdb.model import ClaimTerms, Publication
from kombu_fdb.process.duties import LEFT_INTERVAL_S
from kombu_fdb.store.sqlite.database import SqliteDatabase


@pytest.fixture
def bench(database):
    bench = Bench(database)
    yield bench
    assert_sums_are_right(bench)
    bench.check()
    bench.clean()


def assert_sums_are_right(bench):
    """All messages of these tests have a key."""
    bench.engine.upkeep.flush_totals()
    for queue, keys in bench.engine.inspect.key_totals().items():
        of_queue = {
            event: number for event, number in bench.engine.inspect.totals()[queue].items() if event != "conflicts"
        }
        assert sums(keys) == of_queue, queue


def sums(keys):
    found = Counter()
    for events in keys.values():
        found.update(events)
    return found


def publish(bench, *keys, queue="q", engine=None):
    (engine or bench.engine).publisher.publish([Publication("", queue, b"x", key=key) for key in keys])


def test_a_beaten_claim_is_counted_for_the_keys_it_wanted(bench, monkeypatch):
    if isinstance(bench.database, SqliteDatabase):
        pytest.skip("SQLite's writers wait for each other, so no claim is beaten")
    publish(bench, "a", "b")
    other, wanted, claims = bench.another(), claim.claim, []

    def beaten_once(*args, **options):
        found = wanted(*args, **options)
        if not claims:
            claims.append(1)
            claims.append(other.messages.claim(bench.session, ["q"], 2))
        return found

    monkeypatch.setattr(claim, "claim", beaten_once)
    assert bench.engine.messages.claim(bench.session, ["q"], 2) == []
    bench.engine.upkeep.flush_totals()
    assert bench.engine.inspect.totals()["q"]["conflicts"] == 1
    assert {key: events["contested"] for key, events in bench.engine.inspect.key_totals()["q"].items()} == {
        "a": 1,
        "b": 1,
    }


def test_what_happens_to_a_message_is_counted_for_its_key(bench):
    publish(bench, *["a"] * 5, "b")
    done, back, poison, *_ = [each.lease for each in bench.take() if each.key == "a"]
    bench.engine.messages.ack([done])
    bench.engine.messages.release([back])
    bench.engine.messages.reject([poison])
    beat = bench.beats()[bench.session]
    assert bench.engine.sessions.fence(bench.session, beat)
    bench.engine.sessions.release(bench.session)
    bench.engine.upkeep.flush_totals()
    assert bench.engine.inspect.key_totals()["q"] == {
        "a": {"published": 5, "claimed": 5, "acked": 1, "returned": 1 + 2, "dead": 1, "lost": 2},
        "b": {"published": 1, "claimed": 1, "returned": 1, "lost": 1},
    }


def test_what_is_published_in_a_callers_transaction_is_counted_if_that_commits(bench):
    for end in ("cancel", "commit"):
        tr = bench.database.begin(timeout_s=5.0)
        bench.engine.publisher.publish_in(tr, [Publication("", "q", b"x", key="a")])
        getattr(tr, end)()
    bench.engine.upkeep.flush_totals()
    assert bench.engine.inspect.key_totals() == {"q": {"a": {"published": 1}}}


def test_what_is_taken_without_a_lease_is_done(bench):
    publish(bench, "a")
    assert bench.engine.messages.claim(bench.session, ["q"], 1, terms=ClaimTerms(no_ack={"q"}))
    bench.engine.upkeep.flush_totals()
    assert bench.engine.inspect.key_totals() == {"q": {"a": {"published": 1, "claimed": 1, "acked": 1}}}


def test_a_queue_without_keys_has_no_totals_of_keys(bench):
    bench.put(b"a")
    bench.engine.upkeep.flush_totals()
    assert bench.engine.inspect.key_totals() == {}
    assert bench.engine.inspect.totals() == {"q": {"published": 1}}


def test_messages_without_a_key_are_not_among_the_others(bench):
    bench.put(b"a", queue="mixed")
    publish(bench, "k", queue="mixed")
    bench.engine.messages.ack([each.lease for each in bench.take(2, "mixed")])
    bench.engine.upkeep.flush_totals()
    assert bench.engine.inspect.key_totals().pop("mixed") == {"k": {"published": 1, "claimed": 1, "acked": 1}}
    bench.engine.queues.delete("mixed")


def test_a_flood_of_keys_makes_few_rows_and_the_busy_key_keeps_its_name(bench):
    for start in range(0, 2000, 500):
        publish(bench, *(f"k{number}" for number in range(start, start + 500)), *["busy"] * 10)
    bench.engine.upkeep.flush_totals()
    found = bench.engine.inspect.key_totals()["q"]
    assert len(found) == NAMES_PER_QUEUE + 1
    assert found["busy"] == {"published": 40}
    assert found[OTHERS] == {"published": 2000 - (NAMES_PER_QUEUE - 1)}


def test_a_process_names_so_many_keys_of_all_queues_together(bench):
    for queue in range(NAMES // NAMES_PER_QUEUE + 2):
        publish(bench, *(f"k{number}" for number in range(NAMES_PER_QUEUE)), queue=f"q{queue}")
    bench.engine.upkeep.flush_totals()
    assert sum(key != OTHERS for keys in bench.engine.inspect.key_totals().values() for key in keys) == NAMES


def test_a_key_that_becomes_busy_has_its_name_when_names_are_given_anew(bench):
    publish(bench, *(f"k{number}" for number in range(NAMES_PER_QUEUE)))
    bench.engine.upkeep.flush_totals()
    publish(bench, *["late"] * 3, "k0")
    bench.engine.upkeep.flush_totals()
    assert "late" not in bench.engine.inspect.key_totals()["q"]
    bench.later(NAMES_S)
    publish(bench, *["late"] * 3)
    bench.engine.upkeep.flush_totals()
    found = bench.engine.inspect.key_totals()["q"]
    assert (found["late"], found["k0"], found[OTHERS]) == ({"published": 3}, {"published": 2}, {"published": 3})


def test_a_process_has_names_to_give_anew(bench):
    for queue in range(NAMES // NAMES_PER_QUEUE):
        publish(bench, *(f"k{number}" for number in range(NAMES_PER_QUEUE)), queue=f"q{queue}")
    bench.engine.upkeep.flush_totals()
    bench.later(NAMES_S)
    publish(bench, "late")
    bench.engine.upkeep.flush_totals()
    assert bench.engine.inspect.key_totals()["q"] == {"late": {"published": 1}}


def trim(engine):
    for _ in engine.upkeep.trim_totals():
        pass


def test_the_duties_keep_the_keys_that_grew_most(bench, monkeypatch):
    monkeypatch.setattr(totals, "KEYS_KEPT", 2)
    publish(bench, *["old"] * 9, *["steady"] * 5, "once", "twice", "twice")
    bench.engine.upkeep.flush_totals()
    trim(bench.engine)
    assert len(bench.engine.inspect.key_totals()["q"]) == 4, "the first look only remembers"
    publish(bench, *["new"] * 3, "steady", "steady")
    bench.engine.upkeep.flush_totals()
    trim(bench.engine)
    assert bench.engine.inspect.key_totals()["q"] == {
        "new": {"published": 3},
        "steady": {"published": 7},
        OTHERS: {"published": 12},
    }


def test_keys_that_come_once_are_folded_by_the_duties_of_a_process(bench):
    duties = bench.duties()
    duties.run_once()
    for number in range(2 * KEYS_KEPT // NAMES_PER_QUEUE):
        publish(bench, *(f"k{number}-{each}" for each in range(NAMES_PER_QUEUE)))
        bench.engine.upkeep.flush_totals()
        bench.later(NAMES_S)
    for _ in range(2):
        bench.later(LEFT_INTERVAL_S)
        bench.engine.sessions.beat(bench.session)
        duties.run_once()
    found = bench.engine.inspect.key_totals()["q"]
    assert len(found) == KEYS_KEPT + 1
    assert sums(found) == {"published": 2 * KEYS_KEPT}


def test_several_processes_fold_the_same_keys_once(bench, monkeypatch):
    monkeypatch.setattr(totals, "KEYS_KEPT", 1)
    publish(bench, "a", "b", "c")
    bench.engine.upkeep.flush_totals()
    others = [bench.another() for _ in range(3)]
    for engine in others:
        trim(engine)
    seen = bench.engine.inspect.key_totals()["q"]
    for engine in others:
        end = engine.keys.key_totals("q")[1]
        monkeypatch.setattr(
            engine.upkeep, "_key_totals", lambda begin, end=end: ("q", seen, end) if begin < end else None
        )
        trim(engine)
    assert bench.engine.inspect.key_totals()["q"] == {"a": {"published": 1}, OTHERS: {"published": 2}}


def test_what_is_added_during_a_fold_is_not_lost(bench, database):
    publish(bench, "a", "b")
    bench.engine.upkeep.flush_totals()
    if isinstance(database, FaultyDatabase):

        def once():
            database.before_commit = None
            publish(bench, "a")
            bench.engine.upkeep.flush_totals()

        database.before_commit = once
    else:
        publish(bench, "a")
    bench.engine.upkeep._fold_totals("q", ["a"])
    bench.engine.upkeep.flush_totals()
    found = sums(bench.engine.inspect.key_totals()["q"])
    assert found == {"published": 3}


def test_the_totals_of_a_queues_keys_go_with_it(bench):
    publish(bench, "a")
    bench.engine.upkeep.flush_totals()
    bench.engine.queues.delete("q")
    assert bench.engine.inspect.key_totals() == {}


# -- what it costs, in the process ------------------------------------------------------------------------------------


def test_what_waits_to_be_written_is_bounded_and_complete():
    bench = Bench(FaultyDatabase())
    counted = bench.engine.transactions.totals
    for number in range(3 * KINDS_PENDING):
        counted.note({("q", "published"): 1, ("q", "published", f"k{number}"): 1})
    share = counted.share()
    assert len(share) == 1 + KINDS_PENDING + 1
    counted.note(share)
    assert counted.share() == share, "as it was, after a transaction that did not happen"
    assert share["q", "published", OTHERS] == 2 * KINDS_PENDING


def test_what_a_flush_could_not_write_is_written_later():
    bench = Bench(FaultyDatabase())
    publish(bench, "k")

    def interruption():
        bench.database.before_commit = None
        raise KeyboardInterrupt

    bench.database.before_commit = interruption
    with pytest.raises(KeyboardInterrupt):
        bench.engine.upkeep.flush_totals()
    assert bench.engine.inspect.totals() == {}
    assert_sums_are_right(bench)
    assert bench.engine.inspect.totals() == {"q": {"published": 1}}


def test_keys_take_no_room_from_queues(monkeypatch):
    monkeypatch.setattr(totals, "MOST_PENDING", 3)
    counted = Bench(FaultyDatabase()).engine.transactions.totals
    counted.share()
    for queue in "abcd":
        counted.note({(queue, "published"): 1, **{(queue, "published", f"k{number}"): 1 for number in range(9)}})
    found = counted.share()
    assert {kind[0] for kind in found} == {"a", "b", "c"}
    assert sum(len(kind) == 3 for kind in found) == 3 * 9, "nor are they counted where the queue is not"


def test_a_key_costs_a_transaction_nothing_between_the_shares_and_no_read_with_one():
    counted = CountingDatabase(FaultyDatabase())
    bench = Bench(counted)
    publish(bench, "k")
    paid = []
    for next_s in (bench.clock.monotonic() + totals.INTERVAL_S, 0.0):
        bench.engine.transactions.totals.next_s = next_s
        counted.reset()
        publish(bench, "k")
        paid.append(counted.total())
    assert paid[0].atomics == 2, "the queue's counter and the key's"
    assert paid[1].atomics == 2 + 2, "and the totals of both"
    assert [(each.point_reads, each.range_reads) for each in paid] == [(0, 0), (0, 0)]
    assert paid[0].round_trips == paid[1].round_trips


def test_a_key_that_was_folded_counts_as_new():
    before = {f"k{n}": 100 + n for n in range(KEYS_KEPT + 1)}
    assert not surplus(None, before)
    assert surplus(before, {key: number + 1 for key, number in before.items()} | {"k0": 5}) == ["k1"]


def test_a_queue_that_is_gone_is_not_remembered(bench, monkeypatch):
    monkeypatch.setattr(totals, "KEYS_KEPT", 1)
    for _ in range(2):
        publish(bench, "a", "b")
        bench.engine.upkeep.flush_totals()
        trim(bench.engine)
        assert bench.engine.inspect.key_totals()["q"].keys() == {"a", "b"}, "the first look only remembers"
        bench.engine.queues.delete("q")
        trim(bench.engine)
