"""A store with a row of every kind, and what may happen to one of them."""

import json
from contextlib import contextmanager
from functools import cache

from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase

from kombu_fdb.engine.metrics.samples import SERIES
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import ClaimTerms, KeyLimits, Publication, QueueControl, StoredMessage
from kombu_fdb.routing.tables import Exchange, QueueDeclaration
from kombu_fdb.transport.envelope import encode

HOUR, DAY = SERIES["hour"], SERIES["day"]

#: What the queues are called; those of "safe" are never touched.
QUEUES = ("plain", "fair", "expiring", "single", "full", "plain.dead", "safe")
DLX = {"x-dead-letter-exchange": "dlx", "x-max-length": 50}


def filled():
    """A bench of its own, with the rows that :func:`_rows` made once."""
    bench = Bench(FaultyDatabase())
    keys = bench.engine.keys

    bench.write(lambda tr: write_all(tr, ((keys.prefix + suffix, value) for suffix, value in _rows())))
    return bench


@cache
def _rows():
    bench = Bench(FaultyDatabase())
    _fill(bench)
    prefix = len(bench.engine.keys.prefix)
    return tuple((key[prefix:], value) for key, value in rows_of(bench))


def rows_of(bench):
    return bench.engine.transactions.read(
        lambda work: work.tr.get_range(*range_of(bench.engine.keys.prefix), snapshot=True)
    )


def sort_of(bench, row):
    return str(bench.engine.keys.unpack(row[0])[0])


def task(name, number):
    headers = {"task": name, "id": f"{name}-{number}", "retries": 0}
    message = {"body": b"[[], {}, {}]", "content-type": "application/json", "headers": headers}
    return encode(message, "", name, now_ms=1).payload


def _fill(bench):
    engine = bench.engine
    for name, kind in (("dlx", "direct"), ("news", "topic"), ("all", "fanout")):
        engine.queues.declare_exchange(Exchange(name, kind))
    engine.queues.declare(QueueDeclaration("plain", arguments=DLX))
    engine.queues.declare(QueueDeclaration("expiring", auto_delete=True, arguments={"x-expires": 60_000}))
    engine.queues.declare(QueueDeclaration("single", arguments={"x-single-active-consumer": True}))
    engine.queues.declare(QueueDeclaration("full", arguments={"x-max-length": 3}))
    for queue, exchange, routing_key in (("plain", "news", "a.#"), ("fair", "all", ""), ("safe", "news", "*.b")):
        engine.queues.bind(queue, exchange, routing_key)
    engine.queues.limit("fair", "limited", KeyLimits(rate=5.0, max_in_flight=2))
    engine.queues.set_control("fair", QueueControl(every_key=KeyLimits(weight=2, rate=100.0), ageing=5.0))
    _publish(bench)
    _consume(bench)
    engine.transfer.finish(b"i" * 16, {"messages": 1})
    stored = StoredMessage("plain", "ready", b"imported", 0, message_id=b"m" * 16)
    engine.transfer.restore(b"j" * 16, [(b"mark", stored)])
    engine.upkeep.flush_totals()
    engine.upkeep.sample([HOUR, DAY])


def _publish(bench):
    soon = bench.clock.wall_ms() + 5_000
    for number in range(3):
        for queue in QUEUES:
            bench.put(task(queue, number), queue=queue, task_id=f"{queue}-{number}", priority=number)
        bench.put(task("d", number), queue="plain", due_ms=soon + number, task_id=f"d-{number}")
        for key in ("t/a", "t/b", "limited", "k"):
            bench.put(task(key, number), queue="fair", key=key, task_id=f"{key}-{number}")
    bench.put(bytes(200_000), queue="plain", ttl_ms=60_000, ttr_ms=5_000)
    bench.put(b"safe, later", queue="safe", due_ms=soon)
    bench.engine.publisher.publish(
        [Publication("", "plain", b"once", dedup_id="d", dedup_window_ms=9_000, once_id="o")]
    )


def _consume(bench):
    engine, session = bench.engine, bench.session
    engine.queues.add_consumer(session, "expiring", "tag")
    engine.messages.claim(session, ["single"], 1, terms=ClaimTerms(consumers={"single": "tag"}))
    held = engine.messages.claim(session, ["plain", "fair"], 12)
    engine.messages.ack([held[0].lease])
    engine.messages.reject([held[1].lease], error="reason")
    engine.messages.release([held[2].lease], due_ms=bench.clock.wall_ms() + 7_000)
    duties = bench.duties()
    duties.run_once()
    other = engine.sessions.open({"host": "another", "pid": 5, "program": "worker"})
    engine.sessions.beat(other, consumed=["plain", "fair"])


# -- mutations ---------------------------------------------------------------------------------------------------------


def mutated(rng, row, prefix):
    """The row with something else in its key (behind the namespace and the tag), or its value, or both."""
    key, value = row
    tag = key.find(b"\x00", len(prefix)) + 1
    which = rng.randrange(3)
    if which != 0:
        key = key[:tag] + _scrambled(rng, key[tag:])
    if which != 1:
        value = rng.choice((_scrambled, _other_json))(rng, value)
    return key, value


def replace(tr, row, damaged, *, beside):
    """``beside``: the row itself stays, too."""
    if not beside:
        tr.clear(row[0])
    tr.set(*damaged)


def write_all(tr, rows):
    for key, value in rows:
        tr.set(key, value)


def damage(rng, bench, row):
    """Put the row as :func:`mutated` into the store, in its place or beside it. Returns what was put."""
    damaged = mutated(rng, row, bench.engine.keys.prefix)
    beside = rng.random() >= 0.7
    bench.write(lambda tr: replace(tr, row, damaged, beside=beside))
    return damaged


@contextmanager
def telling(row, damaged):
    """An error tells which row was damaged, and how."""
    try:
        yield
    except Exception as error:
        error.add_note(f"{row[0]!r}: {row[1][:200]!r}\n-> {damaged[0]!r}: {damaged[1][:200]!r}")
        raise


def _scrambled(rng, text):
    found = bytearray(text)
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, len(found))
        length = rng.choice((0, 0, 1, 2, 5, 100))
        # Bytes that mean something in a key: text, bytes, numbers of 0 to 9 bytes, a stamp, an end.
        alphabet = b"\x00\x01\x02\x14\x15\x1c\x1d\x33\xff\x80A"
        found[at : at + length] = bytes(rng.choices(alphabet, k=rng.choice((0, 1, 1, 2, 9, 13))))
    return bytes(found)


ODD = [None, -1, 0, 2**63, 10**400, float("inf"), float("nan"), "", "\ud800", "q", [], {}, True, [[]], {"a": {}}]


def _other_json(rng, value):
    """With one odd value in it, if it is JSON."""
    begin = next((at for at, byte in enumerate(value) if byte in b"[{"), None)
    if begin is None:
        return rng.choice((b"", b"\xff" * rng.randint(1, 40), bytes(rng.randint(1, 40))))
    try:
        found, end = json.JSONDecoder().raw_decode(value[begin:].decode(errors="replace"))
    except ValueError:
        return _scrambled(rng, value)
    names = range(len(found)) if isinstance(found, list) else [*found, "unheard of"]
    names = list(names)
    if not names:
        found = rng.choice(ODD)
    else:
        found[rng.choice(names)] = rng.choice(ODD)
    return value[:begin] + json.dumps(found).encode() + value[begin + end :]
