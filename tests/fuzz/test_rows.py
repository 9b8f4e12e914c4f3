"""One row of the store is damaged, in its key or its value: everything else goes on, and no session ends by it.

The oracle. Claims, watches, settlements, duties, looks, metrics and exports raise nothing. Who asks for just the thing
that can't be read is told so, by ``FormatError``. What was in a queue that the row is not of is all delivered; and of
the queue it is of, a new message still is, unless the row may have been its brake.
"""

from collections import deque
from contextlib import suppress

import pytest
from kit.conformance.queue import Bench
from kit.duties import trim_all
from kit.faults import FaultyDatabase
from prometheus_client import CollectorRegistry, generate_latest
from store_rows import QUEUES, damage, filled, rows_of, sort_of, telling

from celery_fdb.inspection.message import describe
from celery_fdb.inspection.metrics import BrokerCollector
from celery_fdb.inspection.overview import look
from celery_fdb.operations.transfer import broker_source, export_to, file_source, import_from
from kombu_fdb import Broker
from kombu_fdb.engine.metrics.samples import SERIES
from kombu_fdb.errors import FormatError, KombuFDBError
from kombu_fdb.model import ClaimTerms, KeyLimits, QueueControl, View
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.settings.location import MemoryLocation

HOUR = SERIES["hour"]

#: All but the format's, which is to stop everybody.
SORTS = sorted({sort_of(bench, row) for bench in [filled()] for row in rows_of(bench)} - {"format"})
#: Each fills a store and works through all of it.
ROUNDS = 20
CANARY = 4
#: What an export may refuse to leave out: declarations, and what looks like a newer version's message.
MAY_REFUSE = {"queue", "control", "ready", "keyed", "delayed", "lease", "count"}


@pytest.fixture
def brokers():
    opened = []

    def broker(bench):
        location = MemoryLocation(bench.namespace, bench.namespace)
        opened.append(Broker.on(location, bench.engine))
        return opened[-1]

    yield broker
    for each in opened:
        with suppress(KombuFDBError):
            each.close()


def test_a_damaged_row_stops_nothing_else(fuzz, brokers, tmp_path):
    def target(rng):
        bench, sort = filled(), rng.choice(SORTS)
        rows = [row for row in rows_of(bench) if sort_of(bench, row) == sort and not is_safe(sort, row)]
        row = rng.choice(rows)
        damaged = damage(rng, bench, row)
        with telling(row, damaged):
            look_around(bench)
            look_from_outside(brokers(bench), tmp_path, may_refuse=sort in MAY_REFUSE)
            work(bench)
            look_around(bench)
            tidy_up(bench)

    fuzz(target)


def is_safe(sort, row):
    """Whether it is of the queue that nothing happens to. A sample is of all queues, and no queue needs it."""
    return sort != "sample" and b"safe" in row[0] + row[1]


def look_around(bench):
    """Every verb that only reads."""
    engine = bench.engine
    for each in (
        engine.inspect.sessions,
        engine.inspect.totals,
        engine.inspect.key_totals,
        lambda: engine.inspect.samples(HOUR),
        engine.inspect.exchanges,
        engine.inspect.bindings,
        engine.sessions.beats,
    ):
        each()
    names = [*engine.inspect.queues(), *QUEUES]
    engine.inspect.sessions(held=True)
    engine.inspect.facts(names)
    for queue in QUEUES:
        engine.inspect.counts(queue)
        engine.inspect.keys_of(queue)
        engine.inspect.key_page(queue)
        engine.inspect.snapshot(queue, 50)
        found = [*engine.inspect.peek(queue, 50), *engine.inspect.delayed(queue, 50), *engine.inspect.taken(queue)]
        for each in found:
            describe(each, body=True)
            engine.inspect.find(queue, each.message_id)
        for state in ("ready", "delayed", "leased"):
            for listed in engine.inspect.page(queue, View(state), 20).messages:
                engine.inspect.read_at(queue, state, listed.position)
        for ask in (engine.inspect.control, engine.inspect.queue, lambda name: engine.inspect.limits(name, "limited")):
            with suppress(FormatError):
                ask(queue)
    for number in range(3):
        engine.inspect.find_task(f"plain-{number}")
        engine.inspect.list_task(f"plain-{number}")
    engine.dead_letters.look(engine.dead_letters.walk("plain.dead"), b"", 10)


def look_from_outside(broker, folder, *, may_refuse):
    """``may_refuse``: an export leaves out nothing in silence."""
    look(broker, top_keys=5, held=True)
    registry = CollectorRegistry()
    registry.register(BrokerCollector(lambda: broker))
    assert b"celery_fdb_up 1.0" in generate_latest(registry)
    source = broker_source(broker, leased=True)
    try:
        export_to(folder / "export", source, lambda _: None)
    except FormatError:
        assert may_refuse
        return
    copy = Broker.on(MemoryLocation("copy", "copy"), Bench(FaultyDatabase()).engine)
    with copy:
        import_from(file_source(folder / "export"), copy, lambda _: None)


def work(bench):
    """Consumers and duties, until all that can be had was had."""
    engine = bench.engine
    duties = bench.duties()
    seen = []
    queues = deque(QUEUES)
    for _ in range(30):
        bench.later(2)
        queues.rotate(-1)  # as a consumer does, so that a queue that fills a window alone shuts no other out
        if not engine.sessions.beat(bench.session):  # the damaged row was its own: a process opens another one
            bench.session = engine.sessions.open({})
            duties = bench.duties()
        duties.run_once()
        for watch in engine.messages.arm(QUEUES, bench.session, {"single": "tag"}) or ():
            watch.cancel()
        found = engine.messages.claim(bench.session, [*queues], 20, terms=ClaimTerms(consumers={"single": "tag"}))
        seen += [each.payload for each in found if each.queue == "safe"]
        engine.messages.release([each.lease for each in found[:1]], due_ms=bench.clock.wall_ms() + 500)
        engine.messages.reject([each.lease for each in found[1:2]])
        engine.messages.ack([each.lease for each in found[2:]])
    assert len(set(seen)) == CANARY, "what was not touched is delivered"
    bench.put(b"new", queue="other")
    assert bench.payloads(1, "other") == [b"new"]
    engine.sessions.fence(bench.session, bench.beats()[bench.session])
    engine.sessions.release(bench.session)
    bench.session = engine.sessions.open({})


def tidy_up(bench):
    engine = bench.engine
    trim_all(engine)
    for queue in engine.upkeep.limited_queues():
        engine.upkeep.trim_full_part(queue)
    engine.upkeep.clear_dedup_part()
    list(engine.upkeep.trim_totals())
    for number in range(3):
        engine.messages.cancel(f"plain-{number}")
    for queue in QUEUES:
        engine.messages.move(queue, "elsewhere")
        engine.queues.set_control(queue, QueueControl())
        engine.queues.limit(queue, "limited", KeyLimits(weight=2))
        engine.queues.declare(QueueDeclaration(queue))
        bench.put(b"new", queue=queue)
        assert b"new" in [each.payload for each in bench.take(50, queue)]
        engine.queues.purge(queue)
        engine.queues.delete(queue)
    for exchange in ("dlx", "news", "all"):
        engine.queues.delete_exchange(exchange)
