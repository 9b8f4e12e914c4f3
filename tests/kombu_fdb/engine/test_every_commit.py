"""A process dies after any commit of any verb, and the duties leave no row that nothing explains."""

import re
from contextlib import suppress
from functools import partial

import pytest
from kit.conformance.invariants import check_counts, check_whereabouts
from kit.whole.explained import RULES, unexplained
from kit.whole.mortal import Killed, MortalDatabase, small_parts
from kit.whole.stage import Sizes, Stage, store_of
from kit.whole.verbs import READS, VERBS, WRITES, facade_verbs

from kombu_fdb.engine import topology
from kombu_fdb.engine.scheduling import limit_changes
from kombu_fdb.keyspace import layout

#: Messages of a transaction, so that a verb in parts takes several.
PART = 2
COME_WITH_A_VERB = {
    "bucket",
    "deleting",
    "import",
    "imported",
    "relimit",
    "role",
    "sample",
    "served",
    "thaw",
}


@pytest.fixture(scope="module")
def store():
    return store_of(Sizes(messages=3, keys=2, bindings=2, consumers=3, queues=2))


def commits(store, verb):
    stage = Stage(store, MortalDatabase)
    with pytest.MonkeyPatch.context() as monkeypatch:
        small_parts(monkeypatch, PART)
        verb(stage)
    assert isinstance(stage.way, MortalDatabase)
    return stage.way.commits


def left(store, verb, most_commits):
    """What nothing explains, after the process that acts was killed with its so many-th commit."""
    stage = Stage(store, partial(MortalDatabase, most_commits=most_commits))
    with pytest.MonkeyPatch.context() as monkeypatch, suppress(Killed):
        small_parts(monkeypatch, PART)
        verb(stage)
    stage.tidy()
    check_counts(stage.observer)
    check_whereabouts(stage.observer)
    return unexplained(stage.observer, [store.observer])


@pytest.mark.parametrize("name", WRITES)
def test_a_verb_that_is_killed_after_any_commit_leaves_nothing(store, name):
    verb = WRITES[name]
    for most_commits in range(1, commits(store, verb) + 1):
        assert left(store, verb, most_commits) == [], f"after {most_commits} commits"


def test_each_verb_of_the_facade_is_in_the_table(store):
    assert facade_verbs(Stage(store).engine) == set(VERBS)


def test_a_verb_commits_if_it_is_among_those_that_write(store):
    """The others have no commits at which anything could happen."""
    assert {name for name, verb in VERBS.items() if not commits(store, verb)} == set(READS)


def test_each_kind_of_row_has_a_rule():
    assert set(re.findall(r'^``\("(\w+)",', layout.__doc__ or "", re.MULTILINE)) == set(RULES)


def test_the_stage_has_rows_of_each_kind(store):
    """But for those that come with a verb."""
    stage = Stage(store)
    kinds = {stage.keys.unpack(key)[0] for key, _ in store.rows}
    assert set(RULES) - kinds == COME_WITH_A_VERB


def test_verbs_in_parts_take_several_commits(store):
    """Else nothing is killed between two of them."""
    alone = {name for name in WRITES if name.endswith("_part") and commits(store, WRITES[name]) < 2}
    assert alone == {"upkeep.regain_part", "upkeep.trim_full_part"}


def test_a_deletion_that_no_duty_can_find_is_noticed(store, monkeypatch):
    monkeypatch.setattr(topology, "to_be_purged", lambda *_: None)
    assert any("ready" in each for each in left(store, VERBS["queues.delete"], 1))


def test_a_bell_that_no_consumer_hears_is_noticed(store, monkeypatch):
    monkeypatch.setattr(
        limit_changes, "limit", lambda work, queue, key, _: work.tr.set(work.keys.freed(queue, key), b"")
    )
    assert any("freed" in each for each in left(store, lambda stage: stage.engine.queues.limit("target", "a", None), 1))
