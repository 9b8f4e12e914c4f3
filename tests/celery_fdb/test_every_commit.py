"""A process dies after any commit of results, history and schedules, and the duties leave no row without a reason.

``tests/kombu_fdb/engine/test_every_commit.py`` does the same to the engine.
"""

import re
from contextlib import suppress

import pytest
from celery.states import STARTED, SUCCESS
from kit.faults import FaultyDatabase
from kit.whole.mortal import Killed, MortalDatabase

from celery_fdb.history import layout as history_layout
from celery_fdb.history import store as history_store
from celery_fdb.history.layout import RunGroup, pack_groups
from celery_fdb.history.options import History
from celery_fdb.history.reading import Wanted
from celery_fdb.history.recorder import Recorder
from celery_fdb.history.run import Run
from celery_fdb.history.store import HistoryStore
from celery_fdb.inspection import schedules as schedule_store
from celery_fdb.inspection.schedules import KEPT_S, EntryReport, ScheduleStore, unpack
from celery_fdb.results import chords, records
from celery_fdb.results import records as results_layout
from celery_fdb.results import store as results_store
from celery_fdb.results.chords import ChordPart
from celery_fdb.results.store import ResultStore
from kombu_fdb.keyspace.layout import unpack as unpack_key
from kombu_fdb.model import SessionFacts, SessionId
from kombu_fdb.testing.clock import ManualClock

#: Rows, segments or runs of one transaction, so that a verb in parts takes several.
PART = 2
LARGE = b"x" * (2 * records.INLINE_BYTES + 5)
BOUNDS = History(runs=150, max_age=86_400)
LIVE, DEAD = b"live", b"dead"
#: Seconds until results, groups and chords that expire do so.
LIFE_S = 60.0


class Stage:
    """A store with something of everything. ``most_commits``: of the process that acts."""

    def __init__(self, most_commits=float("inf")):
        self.clock = ManualClock(wall_ms=1_800_000_000_000)
        self.database = FaultyDatabase(clock=self.clock)
        self.results, self.history, self.schedules = self._stores(self.database)
        self._fill()
        self.way = MortalDatabase(self.database, most_commits)
        self.acting = self._stores(self.way)

    def _stores(self, database):
        clock = self.clock
        return (
            ResultStore(database, "n", clock=clock, timeout_s=300.0),
            HistoryStore(database, "n", clock=clock, timeout_s=300.0),
            ScheduleStore(database, "n", clock=clock, timeout_s=300.0),
        )

    def later(self, seconds=LIFE_S):
        self.clock.advance(seconds)
        return self

    def run(self, name):
        now_ms = self.clock.wall_ms()
        return Run(name, "shop.pay", state=SUCCESS, root="root", start_ms=now_ms - 500, end_ms=now_ms, runtime_s=0.5)

    def told(self, name):
        return EntryReport(name, "shop.pay", "every second", "q", None, None, 0, self.clock.wall_ms(), 65.0)

    def _fill(self):
        results, expires_ms = self.results, self.clock.wall_ms() + round(LIFE_S * 1000)
        for number in range(2 * PART + 1):
            results.store(f"t{number}", SUCCESS, LARGE, expires_ms)
            results.save_group(f"own{number}", LARGE, expires_ms)
        results.store("started", STARTED, LARGE, 0)
        for chord, expires in (("complete", 0), ("open", expires_ms)):
            results.open_chord(chord, LARGE, expires)
            results.save_group(chord, LARGE, expires)
            for place in range(2):
                results.enlarge_chord(chord, joined=f"joined{place}")
                results.add_part(returned(chord, place, LARGE))
        results.enlarge_chord("complete", size=0)
        for number in range(4 * PART):
            for unwritten in pack_groups([self.run(f"r{number}{each}") for each in range(3)]):
                self.history.write(unwritten, BOUNDS)
        for session in (LIVE, DEAD):
            self.history.activity(session, {number: self.run(f"a{number}") for number in range(2 * PART + 1)})
        self.history.set_settings(BOUNDS)
        self.history.activity(LIVE, {}, dropped=1)
        self.schedules.report([self.told(f"e{number}") for number in range(2 * PART + 1)])
        self.schedules.pause("e0")

    def upkeep(self, history):
        live = [SessionFacts(SessionId(LIVE), {}, b"", 30.0, open=True, consumed=[])]
        Recorder(BOUNDS, self.clock).tidy(history, lambda: live, opened=True)

    def tidy(self):
        """What other workers and another beat do, for days."""
        for pause_s in (0.0, LIFE_S, chords.LONGEST_LOOK_MS / 1000, KEPT_S, LIFE_S):
            self.clock.advance(pause_s)
            for chord in self.results.abandoned_chords():
                self.results._write(self.results.finishing(chord))
            self.results.sweep()
            self.upkeep(self.history)
            self.schedules.forget_old(self.clock.wall_ms())

    def unexplained(self):
        rows = dict(self.database.items())
        explains = {"result": self._result, "history": self._history, "schedule": self._entry}
        return [
            f"{unpack_key(key)!r}"
            for key, value in rows.items()
            if not explains[str(unpack_key(key)[2])](rows, unpack_key(key)[3:], value)
        ]

    def _result(self, rows, elements, value):
        keys, (tag, *of) = self.results.keys, elements
        if tag == "expiry":
            found = rows.get(keys.record(of[1], of[2]))
            return found is not None and expires_of(of[1], found) == of[0]
        if tag == "look":
            found = rows.get(keys.chord(of[1]))
            return found is not None and chords._decode(found).look_ms == of[0]
        parent = rows.get(keys.record(tag, of[0]))
        if parent is None:
            return False
        if tag == "group" and not of[0].startswith("own") and keys.chord(of[0]) not in rows:
            return False  # the structure of a header whose chord is over
        if tag == "chord" and keys.look(chords._decode(parent).look_ms, of[0]) not in rows:
            return False  # no worker would find it
        expires_ms = expires_of(tag, parent)
        return not expires_ms or keys.expiry(expires_ms, tag, of[0]) in rows

    def _history(self, rows, elements, value):
        keys, (tag, *of) = self.history.keys, elements
        if tag == "active":
            return bool(of[0] == LIVE)
        if tag == "segment" and len(of) == 2:
            groups = [each for key, each in rows.items() if key.startswith(keys.groups(of[0]))]
            return keys.segment(of[0]) in rows and int.from_bytes(value, "little") == sum(
                len(RunGroup.decode(g)) for g in groups
            )
        if tag == "in":
            group = history_layout.group_id(*(of[2:4] if of[1] == "group" else of[3:5]))
            return keys.segment(of[0]) in rows and keys.group(of[0], group) in rows
        if tag in {"slot", "all"}:
            return bool(of[1] >= self.clock.wall_ms() // 1000 - history_layout.SLOTS[of[0]])
        return tag in {"segment", "settings", "total", "dropped"}

    def _entry(self, rows, elements, value):
        tag, name = str(elements[0]), str(elements[1])
        if tag == "paused":
            return self.schedules._key(name) in rows
        return self.clock.wall_ms() - unpack(name, value).reported_ms <= KEPT_S * 1000


def expires_of(kind, value):
    return chords._decode(value).expires_ms if kind == "chord" else records.decode(value).expires_ms


def returned(chord, place, payload=b"1"):
    return ChordPart(chord, place, f"t{place}", SUCCESS, payload, lifetime_ms=round(LIFE_S * 1000))


#: Each verb of each store; ``of`` is the store of the process that acts.
READS = {
    "results.load": lambda _, of: of.load("t0"),
    "results.exists": lambda _, of: of.exists("t0"),
    "results.look": lambda _, of: of.look(["t0", "none"], timeout_s=300.0),
    "results.load_group": lambda _, of: of.load_group("own0"),
    "results.parts": lambda _, of: of.parts("complete"),
    "results.chord_body": lambda _, of: of.chord_body("complete"),
    "history.settings": lambda _, of: of.settings(),
    "history.dropped": lambda _, of: of.dropped(),
    "history.kept": lambda _, of: of.kept(),
    "history.page": lambda _, of: of.page(Wanted(), limit=5),
    "history.runs_of_task": lambda _, of: of.runs_of_task("r00"),
    "history.runs_of_workflow": lambda _, of: of.runs_of_workflow("root"),
    "history.segments": lambda _, of: of.segments(),
    "history.workflows_in": lambda _, of: of.workflows_in(1, Wanted()),
    "history.active": lambda _, of: of.active(),
    "history.holders": lambda _, of: of.holders(limit=5),
    "history.slots": lambda _, of: of.slots(60, 0, 2_000_000_000),
    "history.series": lambda _, of: of.series(60, 0, 2_000_000_000),
    "history.totals": lambda _, of: of.totals(),
    "schedules.reports": lambda _, of: of.reports(),
    "schedules.paused": lambda _, of: of.paused(),
    "schedules.is_paused": lambda _, of: of.is_paused("e0"),
}
WRITES = {
    "results.store": lambda _, of: of.store("t9", SUCCESS, LARGE, 0, returned("open", 9, None)),
    "results.forget": lambda _, of: [of.forget(each) for each in ("t0", "t1")],
    "results.save_group": lambda stage, of: of.save_group("own0", b"", stage.clock.wall_ms() + 1),
    "results.delete_group": lambda _, of: of.delete_group("own0"),
    "results.open_chord": lambda stage, of: [of.open_chord(each, b"", stage.clock.wall_ms() + 1) for each in "ab"],
    "results.enlarge_chord": lambda _, of: of.enlarge_chord("open", joined="another"),
    "results.add_part": lambda _, of: [of.add_part(returned("open", place, LARGE)) for place in (5, 6)],
    "results.claim_chord": lambda _, of: of.claim_chord(returned("complete", 0)),
    "results.renew_claim": lambda _, of: of.renew_claim("complete"),
    "results.finishing": lambda _, of: of._write(of.finishing("complete")),
    "results.abandoned_chords": lambda stage, of: stage.later() and of.abandoned_chords(),
    "results.sweep": lambda stage, of: stage.later() and of.sweep(),
    "history.write": lambda stage, of: [of.write(each, BOUNDS) for each in pack_groups([stage.run("new")])],
    "history.activity": lambda stage, of: of.activity(DEAD, {9: stage.run("new")}, [(LIVE, 0)]),
    "history.lose": lambda _, of: of.lose(DEAD, BOUNDS),
    "history.trim": lambda stage, of: of.trim(BOUNDS, parts=9, now_ms=stage.clock.wall_ms() + 2 * 86_400_000),
    "history.set_settings": lambda _, of: of.set_settings(BOUNDS),
    "schedules.report": lambda stage, of: of.report([stage.told("new")], ["e0"]),
    "schedules.pause": lambda _, of: of.pause("e1"),
    "schedules.resume": lambda _, of: of.resume("e0"),
    "schedules.forget_old": lambda stage, of: stage.later(KEPT_S + 1) and of.forget_old(stage.clock.wall_ms()),
}
VERBS = READS | WRITES
IN_PARTS = {"results.sweep", "history.lose", "history.trim", "schedules.forget_old"}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(results_store, "SWEEP_ROWS", PART)
    monkeypatch.setattr(history_store, "TRIM_SEGMENTS", 1)
    monkeypatch.setattr(history_store, "LOST_RUNS", PART)
    monkeypatch.setattr(schedule_store, "MOST_ENTRIES", PART)


def act(stage, name):
    """Returns how many commits it took."""
    of = dict(zip(("results", "history", "schedules"), stage.acting, strict=True))[name.split(".", maxsplit=1)[0]]
    with suppress(Killed):
        VERBS[name](stage, of)
    return stage.way.commits


@pytest.mark.parametrize("name", WRITES)
def test_a_verb_that_is_killed_after_any_commit_leaves_nothing(name):
    whole = act(Stage(), name)
    assert name not in IN_PARTS or whole > 1, "else nothing is killed between two of them"
    for most_commits in range(1, whole + 1):
        stage = Stage(most_commits)
        act(stage, name)
        stage.tidy()
        assert stage.unexplained() == [], f"after {most_commits} commits"


def test_each_verb_of_each_store_is_in_the_table():
    named = {"results": ResultStore, "history": HistoryStore, "schedules": ScheduleStore}
    verbs = {
        f"{name}.{verb}"
        for name, store in named.items()
        for verb, value in vars(store).items()
        if not verb.startswith("_") and callable(value)
    }
    assert verbs == set(VERBS)


def test_a_verb_commits_if_it_is_among_those_that_write():
    """The others have no commits at which anything could happen."""
    assert {name for name in VERBS if not act(Stage(), name)} == set(READS)


def test_the_stage_has_rows_of_each_kind():
    documented = {
        tag
        for layout in (results_layout, history_layout, schedule_store)
        for tag in re.findall(r'^``\("(\w+)",', layout.__doc__ or "", re.MULTILINE)
    }
    kinds = {str(unpack_key(key)[3]) for key, _ in Stage().database.items()}
    assert kinds == documented


def test_a_row_that_no_duty_can_find_is_noticed(monkeypatch):
    monkeypatch.setattr(chords.records, "delete_record", lambda *_: None)
    stage = Stage(1)
    act(stage, "results.finishing")
    stage.tidy()
    assert any("'group', 'complete'" in each for each in stage.unexplained())
