"""The kinds of rows that a store may hold, each with its readers and its workers: what a damaged one must not stop.

The oracle. Readers, workers and duties raise nothing. A reader of just the thing that can't be read is told so, by
``FormatError``. What the row is not of is as it was, and what is made after it is as any other.
"""

import json
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from celery.states import FAILURE, STARTED, SUCCESS
from kit.conformance.queue import Bench
from kit.conformance.wait_queues import Competitor
from kit.duties import trim_all
from kit.faults import FaultyDatabase
from kit.whole.stage import Sizes, Stage, store_of
from kit.whole.verbs import READS, VERBS
from prometheus_client import CollectorRegistry, generate_latest

from celery_fdb.cli.doctor import check_history
from celery_fdb.history import layout as history_layout
from celery_fdb.history.layout import pack_groups
from celery_fdb.history.options import History
from celery_fdb.history.reading import Wanted
from celery_fdb.history.run import Run
from celery_fdb.history.views.metrics import TaskCollector
from celery_fdb.history.views.runs import (
    DAY_S,
    HOUR_S,
    HistoryOff,
    active_runs,
    history_of,
    look_at_series,
    look_at_tasks,
    page_of_runs,
)
from celery_fdb.history.views.timeline import TaskUnknown, timeline_of
from celery_fdb.history.views.workflows import workflow_of
from celery_fdb.inspection import schedules
from celery_fdb.inspection.message import describe
from celery_fdb.inspection.metrics import BrokerCollector
from celery_fdb.inspection.overview import look
from celery_fdb.inspection.schedules import EntryReport, schedule_of
from celery_fdb.operations.transfer import broker_source, export_to, file_source, import_from
from celery_fdb.results import chords, records
from celery_fdb.results.chords import ChordOver, ChordPart
from celery_fdb.results.store import ResultStore
from kombu_fdb import Broker
from kombu_fdb.engine.scheduling.wait_queue import ENDED, GRANTED
from kombu_fdb.errors import ExchangeNotFound, FormatError, KombuFDBError, SessionLost
from kombu_fdb.keyspace import layout
from kombu_fdb.keyspace.layout import range_of, unpack
from kombu_fdb.model import ClaimTerms, KeyLimits, Publication, QueueControl, StoredMessage, View
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.settings.location import MemoryLocation
from kombu_fdb.testing.clock import ManualClock
from kombu_fdb.testing.stores import MemoryStores

LARGE = b"x" * (2 * records.INLINE_BYTES + 5)


class Rows:
    """A store in memory with all of them. Rows with "safe" in them are never damaged."""

    #: The text that names every kind, one on a line.
    table = ""
    #: Each fills a store and works through all of it.
    rounds = 60

    def __init__(self, ends):
        """``ends``: an ``ExitStack``."""
        self.ends = ends

    def fill(self):
        """An empty store, and all rows in it."""
        self.database = FaultyDatabase(clock=ManualClock())
        self.clock = self.database.clock

    def rows(self):
        """By kind: the first word of the key, and of the rows of one thing their second one."""
        found = defaultdict(list)
        for key, value in self.database.begin(timeout_s=5).get_range(*range_of(self.prefix)):
            found[self.kind_of(unpack(key[len(self.prefix) :]))].append((key, value))
        return found

    def kind_of(self, elements):
        return (str(elements[0]),)

    def replace(self, row, other, *, beside):
        """``beside``: the row itself stays, too."""
        tr = self.database.begin(timeout_s=5)
        if not beside:
            tr.clear(row[0])
        tr.set(*other)
        tr.commit()

    def look(self):
        """All that only reads."""

    def work(self, damaged):
        """What workers and duties do then. ``damaged``: the rows as they were before."""

    def renew(self):
        """What clients do with what it is of."""


# -- the queues' -------------------------------------------------------------------------------------------------------

#: What they leave is not on every stage.
LEAVING = ("upkeep.sample", "transfer.finish", "sessions.hold_role", "messages.serve", "messages.join")
#: They are about nothing but what the row says.
EXACT = {f"inspect.{verb}" for verb in ("control", "limits", "queue", "exchange", "route")}
EXACT |= {"transfer.dump", "transfer.finished"}
#: They look when all that is there is due.
LATE = {"upkeep.due_queues", "upkeep.expired_heads"}
#: What an export may refuse to leave out in silence: declarations, and what looks like a newer version's message.
MAY_REFUSE = {"queue", "control", "ready", "keyed", "delayed", "lease", "count", "newer"}
SAFE = 4


class QueueRows(Rows):
    """Queues, messages, sessions."""

    table = layout.__doc__
    rounds = 20

    def fill(self):
        self.ends.close()
        self.stage = stage = Stage(_stored())
        self.database, self.clock, self.prefix = stage.database, stage.clock, stage.keys.prefix
        self.engine, self.queues = stage.engine, deque(stage.engine.inspect.queues())
        self.ends.enter_context(suppress(KombuFDBError))
        self.broker = self.ends.enter_context(Broker.on(MemoryLocation("fuzz", stage.keys.namespace), self.engine))

    def look(self):
        for name in [each for each in READS if each not in LATE]:
            with suppress(SessionLost, *[FormatError, ExchangeNotFound] * (name in EXACT)):  # the row was its session's
                READS[name](self.stage)
        inspect = self.engine.inspect
        inspect.sessions()
        for queue, state in product(self.queues, ("ready", "delayed", "leased")):
            for each in inspect.page(queue, View(state), 20).messages:
                describe(each.message, body=True)
                inspect.read_at(queue, state, each.position)
                inspect.find(queue, each.message.message_id)
        look(self.broker, top_keys=5, held=True)
        registry = CollectorRegistry()
        registry.register(BrokerCollector(lambda: self.broker))
        assert b"celery_fdb_up 1.0" in generate_latest(registry)

    def export(self, damaged):
        """And import."""
        source = broker_source(self.broker, leased=True)
        with TemporaryDirectory() as folder:
            file = Path(folder, "export")
            try:
                export_to(file, source, lambda _: None)
            except FormatError:
                assert {unpack(row[0][len(self.prefix) :])[0] for row in damaged} & MAY_REFUSE
                return
            with Broker.on(MemoryLocation("copy", "copy"), Bench(FaultyDatabase()).engine) as copy:
                import_from(file_source(file), copy, lambda _: None)

    def work(self, damaged):
        """Until all that can be had was had."""
        messages, sessions = self.engine.messages, self.engine.sessions
        duties, seen = self.stage.duties(self.engine, self.stage.session), []
        terms = ClaimTerms(consumers={"single": "tag"})
        duties.run_once()
        self.export(damaged)
        for _ in range(10):
            self.clock.advance(6)
            self.queues.rotate(-1)  # as a consumer does, so that a queue that fills a window alone shuts no other out
            if not sessions.beat(self.stage.session):  # the damaged row was its own: a process opens another one
                self.stage.session = sessions.open({})
                duties = self.stage.duties(self.engine, self.stage.session)
            duties.run_once()
            for watch in messages.arm(self.queues, self.stage.session, terms.consumers) or ():
                watch.cancel()
            found = messages.claim(self.stage.session, [*self.queues], 20, terms=terms)
            seen += [each.payload for each in found if each.queue == "safe"]
            messages.release([each.lease for each in found[:1]], due_ms=self.clock.wall_ms() + 500)
            messages.reject([each.lease for each in found[1:2]])
            messages.ack([each.lease for each in found[2:]])
        assert len(set(seen)) == SAFE, "what was not touched is delivered"
        beats = {session: beat for session, beat, _ in sessions.beats()}
        sessions.fence(self.stage.session, beats[self.stage.session])
        sessions.release(self.stage.session)
        self.stage.session = sessions.open({})

    def renew(self):
        engine = self.engine
        trim_all(engine)
        for queue in engine.upkeep.limited_queues():
            engine.upkeep.trim_full_part(queue)
        engine.upkeep.clear_dedup_part()
        list(engine.upkeep.trim_totals())
        for task_id in ("ready", "delayed", "dead"):
            engine.messages.cancel(task_id)
        for queue in ("q", "fair", "full", "ttl", "single", "another"):
            engine.messages.move(queue, "elsewhere")
            engine.queues.set_control(queue, QueueControl())
            engine.queues.limit(queue, "key0", KeyLimits(weight=2))
            engine.queues.declare(QueueDeclaration(queue))
            engine.publisher.publish([Publication("", queue, b"new")])
            assert b"new" in [each.payload for each in engine.messages.claim(self.stage.session, [queue], 50)]
            engine.queues.purge(queue)
            engine.queues.delete(queue)
        engine.queues.delete_exchange("x")


@cache
def _stored():
    """With rows of every kind."""
    stage = Stage(store_of(Sizes(messages=1, keys=3, bindings=1, consumers=3, queues=1)))
    engine, keys = stage.engine, stage.keys
    for name in LEAVING:
        VERBS[name](stage)
    engine.messages.claim(stage.session, ["expires"], 100)  # of keys with a rate
    engine.queues.declare(QueueDeclaration("safe"))
    engine.queues.bind("safe", "x", "*.safe")
    for exchange in ("x", "nowhere"):
        arguments = {"x-dead-letter-exchange": exchange, "x-message-ttl": 1}
        engine.queues.declare(QueueDeclaration(f"to {exchange}", arguments=arguments))
        engine.publisher.publish([Publication("", f"to {exchange}", b"")])
    worker = engine.sessions.open({"host": "another", "pid": 5, "program": "worker"})
    engine.sessions.beat(worker, consumed=["q", "fair"])
    engine.queues.change_control("fair", every_key={"weight": 2}, ageing=5.0)
    due_ms = stage.clock.wall_ms() + 5_000
    engine.publisher.publish([Publication("", "safe", b"%d" % each, due_ms=each and due_ms) for each in range(SAFE)])
    engine.transfer.restore(b"another", [(b"mark", StoredMessage("q", "ready", b"imported", 0))])
    rows = {keys.deleting("gone"): b"\xff" * 10, keys.relimit("fair"): b"P"}
    engine.transactions.write(lambda work: [work.tr.set(*row) for row in rows.items()])
    return replace(stage.store, rows=stage.database.items(), version=stage.database.version)


class WaitQueueRows(Rows):
    """Competitors that wait for the messages of a queue, and have been served once."""

    def fill(self):
        super().fill()
        self.bench = Bench(self.database)
        self.prefix = self.bench.engine.keys.prefix
        self.competitors = [Competitor(self.bench) for _ in range(4)]
        self.bench.put(b"a", b"b")
        self.competitors[0].serve()

    def rows(self):
        found = super().rows()
        return {kind: found[kind] for kind in (("line",), ("demand",), ("served",))}

    def work(self, damaged):
        """One that stands in the wait queue, and evicts a first one that does not serve, is served."""
        self.bench.put(b"new")
        competitor = self.competitors[-1]
        for _ in range(40):
            sight = competitor.look()
            if sight.stands == GRANTED or (sight.is_first and competitor.serve(sight).deliveries):
                return
            if sight.stands == ENDED:
                competitor.join()
            elif not sight.is_first:
                competitor.engine.messages.evict(competitor.demand, sight.first)
        raise AssertionError("no consumer serves it")

    def renew(self):
        for each in self.competitors:
            each.collect()
            each.engine.messages.leave(each.demand)
            each.engine.sessions.recover(each.session, each.demand.first)
            each.engine.sessions.close(each.session)
        assert self.bench.counts()[2] == 0


# -- results' ----------------------------------------------------------------------------------------------------------

TASKS = ("small", "large", "started")
#: Complete and unclaimed; waits for more; has very many that joined.
CHORDS = ("complete", "open", "many")


class ResultRows(Rows):
    """What tasks and chords returned."""

    table = records.__doc__
    rounds = 150

    def fill(self):
        super().fill()
        self.store = store = ResultStore(self.database, "fuzz", clock=self.clock)
        self.prefix = store.keys.prefix
        soon = self.clock.wall_ms() + 60_000
        for task_id, state, payload in (("small", SUCCESS, b"1"), ("large", SUCCESS, LARGE), ("started", STARTED, b"")):
            store.store(task_id, state, payload, soon)
        store.save_group("group", LARGE, soon)
        store.store("safe", SUCCESS, LARGE, 0)
        for group_id in (*CHORDS, "safe"):
            store.open_chord(group_id, LARGE if group_id == "complete" else b"body", soon * (group_id != "safe"))
            store.enlarge_chord(group_id, size=9 if group_id == "open" else 3)
            for place, payload in enumerate((b"1", LARGE, None)):
                store.add_part(ChordPart(group_id, place, f"t{place}", SUCCESS, payload))
        with pytest.MonkeyPatch.context() as monkeypatch:  # of those that joined, one has its place in the chord's row
            monkeypatch.setattr(chords, "JOINED_WITHIN", 1)
            for number in range(4):
                store.enlarge_chord("many", joined=f"j{number}")

    def kind_of(self, elements):
        first, _id, *more = elements
        return (str(first), *map(str, more[:1] if first == "chord" else ["chunk"] * len(more[:1])))

    def look(self):
        store = self.store
        for task_id in TASKS:
            store.exists(task_id)
            with suppress(FormatError):
                store.load(task_id)
            with suppress(FormatError):
                for _, watch in store.look([task_id], timeout_s=5):
                    if watch is not None:
                        watch.cancel()
        with suppress(FormatError):
            store.load_group("group")
        for group_id in CHORDS:
            with suppress(FormatError, ChordOver):
                store.parts(group_id)
            with suppress(FormatError):
                store.chord_body(group_id)

    def work(self, damaged):
        """Results come, the chords of the dead are published, what has expired is deleted."""
        store, published = self.store, []
        for group_id in CHORDS:
            for place in (0, 3):  # the worker that finds its chord complete is killed before it can publish
                with suppress(FormatError):
                    part = ChordPart(group_id, place, f"t{place}", SUCCESS, b"1")
                    store.store(part.task_id, SUCCESS, b"1", 0, part)
                    store.claim_chord(part)
        for _ in range(6):
            self.clock.advance(chords.CLAIM_MS / 1000)
            for group_id in store.abandoned_chords():
                with suppress(FormatError, ChordOver):
                    store.parts(group_id)
                    store.chord_body(group_id)
                    store._write(store.finishing(group_id))
                    published.append(group_id)
            assert store.abandoned_chords() == [], "the claim is held by the call that found it"
        assert published.count("safe") == 1
        self.clock.advance(60)
        store.sweep(parts=10)
        assert store.sweep(parts=1) == 0, "it comes to an end"
        assert store.load("safe").payload == LARGE

    def renew(self):
        """The same ids once more, as a task that is retried and a frozen chord have them."""
        store = self.store
        for task_id in TASKS:
            store.forget(task_id)
            store.store(task_id, SUCCESS, b"anew", 0)
            assert store.load(task_id).payload == b"anew"
        store.delete_group("group")
        store.save_group("group", b"anew", 0)
        assert store.load_group("group").payload == b"anew"
        for group_id in CHORDS:
            store.open_chord(group_id, b"anew", 0)
            store.enlarge_chord(group_id, size=2)
            for place, payload in enumerate((b"1", LARGE)):
                part = ChordPart(group_id, place, f"t{place}", SUCCESS, payload)
                store.add_part(part)
                assert store.claim_chord(part) == ("publish" if place else "nothing")
            assert [each.payload for each in store.parts(group_id)] == [b"1", LARGE]
            assert store.chord_body(group_id) == b"anew"
            store._write(store.finishing(group_id))
        self.clock.advance(chords.LONGEST_LOOK_MS / 1000)
        assert not {*store.abandoned_chords()} & {*CHORDS, "safe"}


# -- the history's, and the schedules' ---------------------------------------------------------------------------------

URL = "fdb+memory://fuzz"
BOUNDS = History(runs=100, max_age=86_400)


class OpenRows(Rows):
    """Of a broker that is opened by its URL."""

    def __init__(self, ends):
        ends.enter_context(MemoryStores())
        self.broker = ends.enter_context(Broker.open(URL))
        self.database, self.clock = self.broker.database, Clock()

    def fill(self):
        tr = self.database.begin(timeout_s=5)
        tr.clear_range(*range_of(self.prefix))
        tr.commit()


class HistoryRows(OpenRows):
    """Runs of tasks."""

    table = history_layout.__doc__
    rounds = 40

    def __init__(self, ends):
        super().__init__(ends)
        self.store = history_of(self.broker)
        self.prefix = self.store.keys.prefix

    def fill(self):
        super().fill()
        self.store.set_settings(BOUNDS)
        for number in range(6):
            self.keep(self.run(f"t{number}"), self.run(f"t{number}", state=FAILURE, root="t0", group="g", parent="t1"))
        self.keep(self.run("first", followers=(("second", "b"),)))
        self.store.activity(b"s" * 16, {1: self.run("active", state=STARTED, end_ms=0)}, dropped=2)

    def run(self, id_, **fields):
        now_ms = self.clock.wall_ms()
        told = {"state": SUCCESS, "start_ms": now_ms - 10, "end_ms": now_ms, "runtime_s": 0.01, **fields}
        return Run(id_, "shop.pay", "q", "w@h", **told)

    def keep(self, *runs):
        for unwritten in pack_groups(runs):
            self.store.write(unwritten, BOUNDS)

    def look(self):
        broker = self.broker
        for wanted in (
            Wanted(), Wanted(task="shop.pay"), Wanted(state=FAILURE), Wanted(key="k", since_ms=1, until_ms=2)
        ):  # fmt: skip
            with suppress(HistoryOff):  # the row that says so was it
                cursor = None
                for _ in range(5):
                    page = page_of_runs(broker, wanted, limit=3, cursor=cursor)
                    json.dumps(asdict(page)).encode()
                    cursor = page.cursor
                active_runs(broker)
                for period_s in (HOUR_S, DAY_S):
                    json.dumps(asdict(look_at_tasks(broker, period_s=period_s)))
                    look_at_series(broker, period_s=period_s)
        for task_id in ("t0", "first", "active", "g"):
            for ask in (timeline_of, workflow_of):
                with suppress(TaskUnknown):
                    json.dumps(asdict(ask(broker, task_id))).encode()
        check_history(broker)
        registry = CollectorRegistry()
        registry.register(TaskCollector(lambda: broker))
        generate_latest(registry)

    def work(self, damaged):
        """A worker starts, writes, trims and ends. If a row was a segment's, a trim may take more than it has to."""
        store = self.store
        store.set_settings(BOUNDS)
        self.keep(self.run("new", root="r"))
        assert [each.id for each in store.runs_of_task("new")] == ["new"]
        assert [each.id for each in store.runs_of_workflow("r")] == ["new"]
        assert "new" in [each.id for each in page_of_runs(self.broker, limit=100).runs]
        store.activity(b"z" * 16, {7: self.run("begun", state=STARTED, end_ms=0)})
        assert "begun" in [each.id for _, each in store.active()]
        assert store.lose(b"z" * 16, BOUNDS) == 1
        store.lose(b"s" * 16, BOUNDS)
        store.trim(BOUNDS, parts=5, now_ms=self.clock.wall_ms())
        assert [each.id for each in store.runs_of_task("new")] == ["new"] or any(
            b"segment" in key for key, _ in damaged
        )
        counted = look_at_tasks(self.broker).tasks
        assert sum(each.runs for each in counted if each.task == "shop.pay") >= 2


class ScheduleRows(OpenRows):
    """What beats told of their schedules, and what persons paused."""

    table = schedules.__doc__

    def __init__(self, ends):
        pytest.importorskip("starlette", reason="the dashboard's libraries are not installed")
        from starlette.testclient import TestClient

        from celery_fdb.web import dashboard

        super().__init__(ends)
        self.person = ends.enter_context(TestClient(dashboard(URL, anonymous=True, hosts=["testserver"])))
        self.person.get("/login")
        self.store = schedule_of(self.broker)
        self.prefix = self.store._prefix.removesuffix(layout.pack("entry"))

    def fill(self):
        super().fill()
        self.store.report([self.told("safe"), self.told("bad")])
        self.store.pause("bad")

    def told(self, name):
        timing = f"every {name} second"
        return EntryReport(name, "shop.pay", timing, "q", 5, 10_000, 3, self.clock.wall_ms(), 65.0)

    def look(self, *names):
        shown = self.person.get("/schedules")
        assert shown.status_code == 200
        for name in ("safe", *names):
            assert (name, f"every {name} second") in [(each.name, each.timing) for each in self.store.reports()]
            assert f"every {name} second" in shown.text

    def work(self, damaged):
        """A beat tells of its entries, and forgets the old ones."""
        self.store.report([self.told("bad")])
        self.store.forget_old(self.clock.wall_ms())
        self.look("bad")


KINDS = {"queues": QueueRows, "wait_queues": WaitQueueRows, "results": ResultRows, "history": HistoryRows}
KINDS |= {"schedules": ScheduleRows}
