"""Messages that our publishers never make, in queues of odd names, and other bytes in the store's rows."""

import json
from contextlib import suppress

from kombu_fdb import KombuFDBError
from kombu_fdb.keyspace.codec import PAYLOAD_HEAD, PAYLOAD_VERSION
from kombu_fdb.model import Publication

NAMES = ["q", "q.dead", "", ".", "..", "_", "_2F", "a/b?c#%2F", "ü\x00\n", "x.celery.pidbox", "\u202e<b>", "n" * 3000]
ODD = [
    *(None, True, 0, -1, 2**63, 2**200, -1e308, 1e400, float("nan"), "", "\ud800", "\x00", "\x1b[2J", "<script>"),
    *([], {}, [[]], {"": None}, {"__type__": "uuid", "__value__": {"hex": 5}}, {"__type__": "datetime"}, "9" * 5000),
    *("2026-13-45T99:99:99", "9999-12-31T23:59:59+14:00", "0001-01-01T00:00:00-14:00", {"password": {"a": [1]}}),
]
HEADERS = ["task", "id", "eta", "expires", "argsrepr", "kwargsrepr", "retries", "x-death", "compression", "\ud800", ""]


def value(chance, depth=3):
    """Something JSON holds, rarely something sensible."""
    kind = chance.randrange(4) if depth else 0
    if kind == 1:
        return [value(chance, depth - 1) for _ in range(chance.randrange(3))]
    if kind == 2:
        return {str(value(chance, 0))[:50]: value(chance, depth - 1) for _ in range(chance.randrange(3))}
    return chance.choice(ODD)


def payload(chance):
    headers = {chance.choice(HEADERS): value(chance) for _ in range(chance.randrange(6))}
    properties = {str(value(chance, 0))[:50]: value(chance) for _ in range(chance.randrange(3))}
    kind = chance.choice(["application/json", "text/plain", "application/x-python-serialize", None, 5, [], "\ud800"])
    meta = json.dumps([kind, "utf-8", headers, properties, value(chance), value(chance)]).encode()
    body = chance.choice([b"[[], {}, {}]", b"\xff\x00", b"[" * 5_000, b'"\\ud800"', b"1" + b"0" * 9_000, b""])
    return mutated(chance, PAYLOAD_HEAD.pack(PAYLOAD_VERSION, len(meta)) + meta + body, often=4)


def mutated(chance, data, often=1):
    """One time in ``often``."""
    if chance.randrange(often):
        return data
    cut = chance.randrange(len(data) + 1)
    return chance.choice(
        [
            data[:cut],
            data[:cut] + chance.randbytes(chance.randrange(1, 9)) + data[cut:],
            data[:cut] + bytes([chance.randrange(256)]) + data[cut + 1 :],
            chance.randbytes(chance.randrange(40)),
            json.dumps(value(chance)).encode(),
        ]
    )


def fill(broker, chance):
    for _ in range(chance.randrange(1, 6)):
        last = 253_402_300_799_999
        options = {"due_ms": chance.choice([0, 0, last]), "expires_ms": chance.choice([0, 0, last])}
        options |= {"key": chance.choice(["", "k", "\x00<b>"]), "task_id": chance.choice(["", "t"])}
        with suppress(KombuFDBError):  # names that are too long
            broker._engine.publisher.publish([Publication("", chance.choice(NAMES), payload(chance), **options)])
    if chance.randrange(2):
        for job in broker.queue("q").take_many(2, 0):
            chance.choice([lambda job: None, lambda job: job.bury(error="\ud7ff<b>"), lambda job: job.release()])(job)
    if not chance.randrange(3):
        spoil(broker, chance)


def clear(broker):
    keys = broker._engine.keys

    def body(work):
        work.tr.clear_range(keys.prefix, keys.format)
        work.tr.clear_range(keys.format + b"\x00", keys.prefix + b"\xff")

    broker._engine.transactions.write(body)


def spoil(broker, chance, prefix=b""):
    """Other bytes in some rows, but for the one by which everybody else would refuse the whole store.

    ``prefix``: of the rows; the broker's own unless it is given.
    """
    engine = broker._engine
    prefix = prefix or engine.keys.prefix
    found = engine.transactions.read(lambda work: work.tr.get_range(prefix, prefix + b"\xff"))
    rows = [row for row in found if row[0] != engine.keys.format]
    changes = [(key, mutated(chance, old)) for key, old in chance.sample(rows, min(3, len(rows)))]

    def change(work):
        for key, new in changes:
            work.tr.set(key, new)

    engine.transactions.write(change)
