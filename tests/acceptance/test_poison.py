"""Messages that Celery's consumer is not prepared for: a worker that meets them lives on. Guarantee: POISON-ENDS."""

import json
import re
from datetime import UTC, datetime, timedelta

import pytest
from kombu import Exchange, Producer

from kombu_fdb.model import Publication
from kombu_fdb.transport.envelope import payload_of

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

GOOD = {"lang": "py", "task": "acceptance_app.note", "id": "an-id", "root_id": "r", "parent_id": None, "group": None}
BODY = [["poison"], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
ODD = [{"a": 1}, [1], 5, 1.5, True, "nonsense", {"__type__": "uuid", "__value__": {"hex": 5}}]
#: One header is odd in each.
HEADERS = [
    {**GOOD, name: odd}
    for name in ("id", "task", "eta", "expires", "retries", "timelimit", "root_id", "group", "shadow", "argsrepr")
    for odd in ODD
]
#: An integer of JSON that no timer can add to the time.
HUGE = 10**400
HEADERS += [{**GOOD, "timelimit": limits} for limits in ([HUGE, HUGE], [None, HUGE], [HUGE, None])]
HEADERS += [{name: value for name, value in GOOD.items() if name != missing} for missing in ("id", "task")]
#: Looked up by name when a process is free.
HEADERS += [{**GOOD, "stamped_headers": names} for names in ([5, {}], [["a"]])]
HEADERS += [
    {**GOOD, name: odd} for name in ("stamps", "stamped_headers", "replaced_task_nesting", "x-death") for odd in ODD[:3]
]
#: Bodies of protocol 2, and of protocol 1, which has all in its body.
BODIES = [None, 5, "text", [], {}, [1], [[], [], []], [{}, 5, None], [[], {}, {}, {}]]
#: An error in the pool, where only prefork tells of it.
BODIES += [[1, 2, 3], [[], {}, [1]], [[], {}, "x"], [[], {}, 5], [[], {}]]
BODIES += [[["x"], {}, {name: 5}] for name in ("callbacks", "errbacks", "chain", "chord", "id", "self", "args")]
BODIES_1 = [
    {**GOOD, "args": [], "kwargs": {}, name: odd}
    for name in ("id", "task", "args", "kwargs", "timelimit")
    for odd in ODD
]
BODIES_1.append({**GOOD, "args": [], "kwargs": {}, "timelimit": [HUGE, HUGE]})
#: What the result backend can't store, at each moment at which Celery tells it something: the id is longer than a key,
#: or the chord is none. When it is received, when its ETA has come, when a place is free, when its time is over.
LONG_ID = "x" * 20_000
ODD_CHORD = [["poison"], {}, {"callbacks": None, "errbacks": [5], "chain": [5], "chord": 5}]
HOLD = "acceptance_app.hold"
#: What no publisher of ours has encoded.
UNDECODABLE = {b"", b"\xff" * 40, b'{"body": "old"}', b"\x01\x00\x00\x00\x02[]"}


def unstorable():
    """Headers and bodies. Those of an ETA are not due in the store, which knows only what a publisher tells it."""
    begin = datetime.now(UTC)
    past, sooner, soon = ((begin + timedelta(seconds=seconds)).isoformat() for seconds in (-5, 1, 2))
    moments = [{"expires": past}, {"eta": soon, "expires": sooner}, {"eta": soon}, {}]
    for kind, body in ((LONG_ID, BODY), ("odd", ODD_CHORD)):
        for number, times in enumerate(moments):
            yield {**GOOD, "id": f"{kind}{number}", **times}, body
        yield {**GOOD, "id": f"{kind}-held", "task": HOLD, "timelimit": [1, None]}, [["poison", 3], {}, body[2]]
        yield {**GOOD, "id": f"{kind}-fails"}, [["too", "many"], {}, body[2]]
        yield {**GOOD, "id": f"{kind}0"}, body  # revoked, since the first one has expired


def send(
    producer,
    body,
    headers,
    *,
    content_type="application/json",
    content_encoding="utf-8",
    exchange=None,
    routing_key="celery",
    **properties,
):
    """As another program may have stored it: our publishers refuse much of it."""
    message = producer.channel.prepare_message(
        body if isinstance(body, bytes) else json.dumps(body).encode(),
        content_type=content_type,
        content_encoding=content_encoding,
        headers=headers,
        properties=properties,
    )
    name = "" if exchange is None else exchange.name
    payload = payload_of(message, name, routing_key)
    producer.channel.engine.publisher.publish([Publication(name, routing_key, payload)])


def send_all(producer):
    for headers in HEADERS:
        send(producer, BODY, headers)
    for body in BODIES:
        send(producer, body, GOOD)
    for body in BODIES_1:
        send(producer, body, {})
    for headers, body in unstorable():
        send(producer, body, headers)
    for content_type, encoding in (("application/x-python-serialize", "binary"), ("no/such", "klingon"), (None, None)):
        send(producer, b"\x80\x04", GOOD, content_type=content_type, content_encoding=encoding)
    send(producer, b"[" * 100_000, GOOD)
    send(producer, BODY, {**GOOD, "compression": "application/x-bz2"})
    send(producer, BODY, GOOD, reply_to={"a": 1}, correlation_id=[1], priority="x", app_id={})
    producer.channel.engine.publisher.publish([Publication("", "celery", payload) for payload in UNDECODABLE])


def broadcast(producer):
    """To the remote control, and to the events that workers hear of each other."""
    commands = Exchange("celery.pidbox", "fanout", durable=False)
    events = Exchange("celeryev", "topic")
    for exchange in (commands, events):
        exchange(producer.channel).declare()
    for odd in [*ODD, None, {"method": {"a": 1}}, {"method": "ping", "arguments": 5, "destination": 5}]:
        send(producer, odd, {"clock": odd}, exchange=commands, routing_key="")
        for routing_key in ("worker.heartbeat", "worker.online", "task.x", "odd", ""):
            for headers in ({}, {"hostname": "another"}, {"hostname": odd}):
                send(producer, odd, headers, exchange=events, routing_key=routing_key)
    send(producer, b"\xff", {}, exchange=commands, routing_key="")
    send(producer, b"\xff", {"compression": "x"}, exchange=events, routing_key="worker.heartbeat")


def test_no_message_ends_a_worker(broker, start, until, request, monkeypatch, pool):
    broker.queue_arguments["x-delivery-limit"] = 2  # before the publisher's application is made, which declares it too
    monkeypatch.setenv("ACCEPTANCE_RESULTS", broker.url)
    app, engine = request.getfixturevalue("app"), request.getfixturevalue("engine")
    worker = start("-c", "2", pool=pool)
    with app.app.connection_for_write() as connection:
        producer = Producer(connection, auto_declare=False)
        send_all(producer)
        broadcast(producer)
    app.note.delay("after")
    until(lambda: broker.marks("run", "after"), say=lambda: (worker.process.poll(), worker.log.read_text()[-30000:]))

    def ended():
        counts = engine.inspect.counts("celery")
        return not counts.ready + counts.leased + counts.delayed

    until(
        ended, say=lambda: ([each.payload for each in engine.inspect.taken("celery")], worker.log.read_text()[-20000:])
    )
    assert worker.process.poll() is None, "the same worker"
    assert app.app.control.ping(timeout=5), "which still hears its remote control"
    letters = engine.inspect.peek("celery.dead", 1_000)
    assert {letter.payload for letter in letters} > UNDECODABLE
    assert all(letter.deaths and letter.deaths[0].reason for letter in letters)
    _each_is_traced_once(worker.log.read_text())


def _each_is_traced_once(log):
    """Of a message that comes back, the first attempt is told with its traceback and each other one in a line."""
    lines = [*log.splitlines(), ""]
    told = [
        at for at, line in enumerate(lines) if re.search(r"attempt \d+: message [0-9a-f]{32} of queue celery", line)
    ]
    assert told
    for at in told:
        first = " attempt 1: " in lines[at]
        assert [each.startswith("Traceback") for each in lines[at + 1 : at + 2]] == [first], lines[at : at + 2]
