"""The round trips of each verb, as functions of how much there is: constant, or in parts of a quarter of a second.

Where a round trip takes a millisecond, a transaction that makes one for each message, key, binding, consumer or queue
ends at five thousand of them, for ever (FoundationDB's transactions live 5 s); and a call that takes one for each holds
up the thread that waits for it.
"""

from dataclasses import fields, replace
from functools import lru_cache

import pytest
from kit.costs import Cost, CountingDatabase
from kit.whole.stage import Sizes, Stage, store_of
from kit.whole.verbs import VERBS, facade_verbs

from kombu_fdb.engine.messages.message import read_all

TRIP_S = 0.001
FEW, MANY = 10, 90
#: They are of megabytes, together.
FEW_LARGE, MANY_LARGE = 2, 15
SMALL = Sizes(FEW, FEW, FEW, FEW, FEW, FEW_LARGE)
DIMENSIONS = [each.name for each in fields(Sizes)]

#: Of one transaction, at most: the quarter of a second that is a duty's turn.
MOST = 250
#: More of something may cost so many further round trips in all: whole parts are counted, and their ends.
FURTHER = 4
#: Per thing, in all, of what is done to many things together.
SHARED = 1 / 5

#: Verbs that do one thing after the other, in short transactions, and what that costs for each.
ONE_BY_ONE = {
    # A queue that ends with its consumer is deleted: its bindings, messages and keys are asked for.
    ("queues.drop_consumers_part", "consumers"): 9,
    ("sessions.release", "consumers"): 9,
    ("sessions.release_part", "consumers"): 9,
    ("sessions.forget_part", "consumers"): 9,
}


@lru_cache(None)
def store(dimension):
    """Small, but for that."""
    many = MANY_LARGE if dimension == "large" else MANY
    return store_of(replace(SMALL, **{dimension: many}) if dimension else SMALL)


def way(database):
    """Each round trip takes its time, by the clock that the verb and the store have."""
    return CountingDatabase(database, clock=database.clock, trip_s=TRIP_S)


def paid(of, verb):
    """Round trips in all, and of the worst transaction."""
    stage = Stage(of, way)
    assert isinstance(stage.way, CountingDatabase)
    stage.way.reset()
    verb(stage)
    worst = stage.way.worst() if stage.way.transactions else Cost()
    return stage.way.total().round_trips, worst.round_trips


def allowed(name, dimension):
    """How many more than with few."""
    more = MANY_LARGE - FEW_LARGE if dimension == "large" else MANY - FEW
    return FURTHER + more * ONE_BY_ONE.get((name, dimension), SHARED)


@pytest.mark.parametrize("name", VERBS)
def test_round_trips_do_not_grow_with_what_there_is(name):
    few, _ = paid(store(""), VERBS[name])
    for dimension in DIMENSIONS:
        many, worst = paid(store(dimension), VERBS[name])
        assert many - few <= allowed(name, dimension), f"with many {dimension}"
        assert worst <= MOST, f"with many {dimension}"


def test_each_verb_of_the_facade_is_in_the_table():
    assert facade_verbs(Stage(store("")).engine) == set(VERBS)
    assert {name for name, _ in ONE_BY_ONE} <= set(VERBS)


def one_by_one(stage):
    """What each of these tests is to find."""
    keys = [key for key, _ in stage.engine.upkeep.rows(stage.keys.bindings("x"))]
    stage.engine.transactions.read(lambda work: [work.tr.get(key) for key in keys])


def payloads(stage):
    rows = stage.engine.upkeep.rows((stage.keys.delayed("q"), stage.keys.delayed("q") + b"\xff"))
    stage.engine.transactions.read(lambda work: [read_all(work, [value]) for _, value in rows])


@pytest.mark.parametrize(("verb", "dimension"), [(one_by_one, "bindings"), (one_by_one, "queues"), (payloads, "large")])
def test_a_read_for_each_row_is_noticed(verb, dimension):
    (few, _), (many, _) = paid(store(""), verb), paid(store(dimension), verb)
    assert many - few > allowed("", dimension)
