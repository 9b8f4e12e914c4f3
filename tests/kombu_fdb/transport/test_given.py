"""What a publisher can write that makes no sense: refused, with nothing stored (transport/envelope.py)."""

import math
from uuid import UUID

import pytest
from celery import Celery, Task
from django.utils.functional import lazystr
from kombu import Consumer, Producer, Queue

from celery_fdb import FdbTask
from kombu_fdb.errors import InvalidArgument
from kombu_fdb.model import Publication
from kombu_fdb.transport.envelope import encode, open_payload, payload_of
from kombu_fdb.transport.fairkey import key_reader

NOW_MS = 1_800_000_000_000
HUGE = 10**400
NO_TEXT = [7, 0, 1.5, True, ["a"], {"a": 1}, b"a", UUID(int=7)]
NO_NUMBER = [
    *("soon", "", True, [1], {"a": 1}, math.nan, math.inf, -math.inf, "nan", "inf"),
    *(1e13, 1_795_320_004_851_654_922, "1e300", HUGE, 2**64),  # numbers, and nothing behind the edge can hold them
]
NEGATIVE = [-1, -0.5, "-3000"]
NO_WHOLE = ["high", "", "5.0", "-1", -1, 5.0, True, [5], math.nan, HUGE, "9" * 30]
NO_MOMENT = ["soon", 5, 1.5, True, [1], {"a": 1}, "2031-13-01", HUGE]

#: A Celery task of protocol 2.
TASK = {"task": "t", "id": "an-id", "lang": "py", "argsrepr": "()"}
HEADERS = {
    "fair_key": ({}, NO_TEXT),
    "MessageGroupId": ({}, NO_TEXT),
    "dedup_id": ({}, NO_TEXT),
    "x-deduplication-id": ({}, NO_TEXT),
    "MessageDeduplicationId": ({}, NO_TEXT),
    "once_id": ({}, NO_TEXT),
    "dedup_window": ({"dedup_id": "d"}, [*NO_NUMBER, *NEGATIVE, 0]),
    "once_window": ({"once_id": "o"}, [*NO_NUMBER, *NEGATIVE, 0]),
    "x-delay": ({}, NO_NUMBER),
    "DelaySeconds": ({}, NO_NUMBER),
    "x-ttr": ({}, [*NO_NUMBER, *NEGATIVE]),
    "eta": (TASK, NO_MOMENT),
    "retries": (TASK, NO_WHOLE),
    "timelimit": (TASK, [5, [1], ["a", None], [HUGE, None], [-1, None]]),
    "id": (TASK, [7, None, ["a"]]),
    "root_id": (TASK, [7, ["a"]]),
    "expires": (TASK, [5, {"a": 1}]),
    "stamped_headers": (TASK, ["a", [{}]]),
    "group_index": (TASK, ["a", 1.5, HUGE]),
    "anything": ({}, [HUGE, -HUGE, {"a": [HUGE]}, 2**63]),
}
PROPERTIES = {
    "priority": [*NO_WHOLE, 256],
    "expiration": [*NO_NUMBER, *NEGATIVE],
    "DelaySeconds": NO_NUMBER,
    "MessageGroupId": NO_TEXT,
    "MessageDeduplicationId": NO_TEXT,
    **dict.fromkeys(("message_id", "correlation_id", "reply_to", "type", "user_id", "app_id", "cluster_id"), NO_TEXT),
    # They are headers: as properties they would not be read.
    **{name: ["a", 5] for name in ("fair_key", "dedup_id", "dedup_window", "once_id", "once_window")},
    "anything": [HUGE],
}


def message(headers=None, properties=None):
    return {
        "body": b"[[], {}, {}]",
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": headers or {},
        "properties": properties or {},
    }


ODD_HEADERS = {
    name: [message({**others, name: value}) for value in values] for name, (others, values) in HEADERS.items()
}
ODD_PROPERTIES = {name: [message(None, {name: value}) for value in values] for name, values in PROPERTIES.items()}
ODD = [each for odd in (ODD_HEADERS, ODD_PROPERTIES) for messages in odd.values() for each in messages]


@pytest.mark.parametrize("name", HEADERS)
def test_a_header(name):
    for odd in ODD_HEADERS[name]:
        refuses(name, odd)


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property(name):
    for odd in ODD_PROPERTIES[name]:
        refuses(name, odd)


def refuses(name, odd):
    with pytest.raises(InvalidArgument, match=name) as raised:
        encode(odd, "", "q", now_ms=NOW_MS, key_of=key_reader(None))
    assert raised.value.fix
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("name", ["shadow", "argsrepr", "kwargsrepr"])
def test_a_lazy_text_of_djangos_is_what_it_says(name):
    """As kombu has it on Redis; a worker sees a text."""
    said = message({**TASK, name: lazystr("Grüße")}, {"correlation_id": lazystr("c")})
    opened = open_payload(encode(said, "", "q", now_ms=NOW_MS).payload)
    assert (opened.headers[name], opened.properties["correlation_id"]) == ("Grüße", "c")
    assert encode(message({"dedup_id": lazystr("d")}), "", "q", now_ms=NOW_MS).dedup_id == "d"


@pytest.mark.parametrize(
    ("odd", "fix"),
    [
        (message(None, {"correlation_id": b"c"}), "correlation_id.decode()"),
        (message(None, {"correlation_id": UUID(int=1)}), "str(correlation_id)"),
        (message({**TASK, "id": UUID(int=1)}), "task_id=str("),
    ],
    ids=["bytes", "UUID", "UUID of a task"],
)
def test_an_object_for_a_text_names_what_to_write(odd, fix):
    with pytest.raises(InvalidArgument) as raised:
        encode(odd, "", "q", now_ms=NOW_MS)
    assert fix in raised.value.fix


def test_nothing_is_stored_of_it(channel):
    for odd in ODD:
        with pytest.raises(InvalidArgument):
            channel.basic_publish(odd, "", "q")
    counts = channel.engine.inspect.counts("q")
    assert (counts.ready, counts.delayed) == (0, 0)


@pytest.mark.parametrize(
    ("headers", "properties"),
    [
        ({"x-delay": "5", "DelaySeconds": "0.5", "x-ttr": "1000"}, {"expiration": "3000", "priority": "5"}),
        ({"x-delay": -5}, {"DelaySeconds": -1, "expiration": 0, "priority": 255}),
        ({"dedup_id": "d", "dedup_window": "1.5", "once_id": None, "fair_key": None}, {"priority": None}),
        ({"dedup_id": "", "MessageDeduplicationId": None, "retries": None, "x-ttr": None}, {"message_id": None}),
        ({"task": "resize", "id": 7, "eta": None}, {}),  # of an application's own
        ({**TASK, "retries": 3, "timelimit": [None, 5], "eta": "2031-12-31", "expires": None}, {}),
        ({"big": 2**63 - 1, "small": -(2**63), "text": "9" * 100, "float": 1e300}, {}),
    ],
)
def test_what_makes_sense_is_published(headers, properties):
    encode(message(headers, properties), "", "q", now_ms=NOW_MS)


TASK_OPTIONS = [
    ({"priority": "high"}, "priority"),
    ({"expiration": -3}, "expiration"),
    ({"dedup_id": 7}, "dedup_id"),
    ({"fair_key": 7}, "fair_key"),
    ({"headers": {"fair_key": 7}}, "fair_key"),
    ({"retries": HUGE}, "retries"),
    ({"task_id": 7}, "id"),
    ({"eta": "soon"}, "eta"),
]


@pytest.mark.parametrize("base", [Task, FdbTask])
def test_options_of_a_task(url, base):
    app = Celery(broker=url, set_as_current=False)
    app.conf.task_default_queue = "q"

    @app.task(name="t", base=base, shared=False)
    def task(): ...

    odd = TASK_OPTIONS if base is FdbTask else [*TASK_OPTIONS, ({"dedup_id": "x"}, "dedup_id")]  # there it is an option
    for options, name in odd:
        with pytest.raises(InvalidArgument, match=name):
            task.apply_async(**options)
    app.close()


def test_a_prefetch_count(channel):
    for count in ("many", -1, 1.5, HUGE):
        with pytest.raises(InvalidArgument, match="prefetch_count"):
            channel.basic_qos(0, count, False)


def test_what_others_have_stored_is_delivered_and_can_be_buried(connection, channel):
    """A consumer does not judge another program's options: only what would end a worker is refused (``tasks.py``)."""
    channel.engine.publisher.publish([Publication("", "q", payload_of(odd, "", "q")) for odd in ODD])
    Producer(channel).publish("good", routing_key="q")
    seen = []
    with Consumer(channel, [Queue("q")], on_message=seen.append, accept=["json"]):
        while len(seen) <= len(ODD):
            connection.drain_events(timeout=60)
    assert seen[-1].body == b"good"
    for each in seen:
        channel.encode_again(each)
        each.ack()
