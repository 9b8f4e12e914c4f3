"""``python -m tests.network.observer declare|drain|look``: prepares the store of a run, and sees what is left in it."""

from __future__ import annotations

import re
import sys
import threading
import time
from contextlib import closing

from kit.conformance.invariants import check_counts, leftovers
from kit.history.record import Recorder

from kombu_fdb import Broker
from kombu_fdb.model import Peeked
from kombu_fdb.process.duties import EXPIRED_INTERVAL_S

from .app import OPTIONS, URL, connect, recorder

#: What the run's processes rely on, and what the checks ask (:mod:`kit.history.checks`).
QUEUES = {
    "tasks": {},
    "tasks.dead": {"kept": True},
    "keyed": {"max_in_flight": 1, "ordered": "key"},
    "line": {"ordered": "queue", "single": True},
    "fair": {"fair": True},
    "rated": {"rate": [4.0, 4]},
    "poison": {"delivery_limit": 2},
    "poison.dead": {"kept": True},
    "purged": {"kept": True},
    "moved": {"kept": True},
    "sink": {},
    "deduped": {},
}
ARGUMENTS = {"line": {"x-single-active-consumer": True}, "poison": {"x-delivery-limit": 2}}
PATIENCE_S = 60.0
#: Expired messages that no consumer claims are dropped by a walk.
STILL_S = PATIENCE_S + EXPIRED_INTERVAL_S
LOOK_S = 0.5


def declare(broker: Broker) -> None:
    for name in QUEUES:
        if not name.endswith(".dead"):
            broker.declare(name, arguments=ARGUMENTS.get(name, {}))
    broker.queue("keyed").limit_every_key(max_in_flight=1)
    broker.queue("rated").limit("", rate=4, burst=4)
    recorder.note("setup", queues=QUEUES, **OPTIONS)


def drain(broker: Broker) -> None:
    """Wait until all has ended, for as long as anything moves."""
    before, deadline = {}, time.monotonic() + STILL_S
    while True:
        counts = {
            name: each
            for name, each in broker.queues().items()
            if not QUEUES.get(name, {}).get("kept") and (each.ready or each.delayed or each.leased or each.newer)
        }
        waiting = in_the_outbox()
        if not waiting and not counts:
            return
        if counts != before:
            before, deadline = counts, time.monotonic() + STILL_S
        if time.monotonic() > deadline:
            if waiting or any(each.ready or each.leased or each.newer for each in counts.values()):
                print(
                    "not drained:",
                    waiting,
                    *(f"\n{name}: {each} {about(broker, name)}" for name, each in counts.items()),
                )
            return  # what a clock that was ahead delays: the check of what is left knows when it is due
        threading.Event().wait(LOOK_S)


def about(broker: Broker, name: str) -> list[object]:
    """What explains why a queue's messages stay."""
    queue, facts = broker.queue(name), broker.inspect.facts([name])
    return [facts.get(name), queue.consumers(), [each._replace(payload=b"") for each in queue.each("ready")][:3]]


def name_in(message: Peeked) -> str:
    """A retry counts in it, as in the history. What has no task id is Kombu's: its body is its name."""
    if not message.task_id:
        return message.payload.decode(errors="replace").rpartition("]")[2]
    retries = re.search(rb'"retries":(\d+)', message.payload)
    return f"{message.task_id}#{retries[1].decode()}" if retries and int(retries[1]) else message.task_id


def in_the_outbox() -> list[str]:
    with closing(connect()) as database:
        return [name for (name,) in database.execute("SELECT id FROM celery_outbox")]


def look(broker: Broker) -> None:
    messages = [
        (name_in(each), name, state)
        for name in broker.queues()
        for state in ("ready", "delayed", "leased")
        for each in broker.queue(name).each(state)
    ]
    messages += [(name, "outbox", "ready") for name in in_the_outbox()]
    wrong = []
    try:
        check_counts(broker._engine)
    except AssertionError as error:
        wrong.append(str(error))
    left = [f"session {each.description}" for each in broker._engine.inspect.sessions()]
    if not left:
        for name in broker.queues():
            broker.queue(name).purge()
            broker.queue(name).drop()
        waiting, end = broker._engine.keys.all_waiting  # which the next promoter clears, and none is left
        left = [repr(each) for each in leftovers(broker._engine) if not waiting <= each < end]
    recorder.note("final", messages=messages, counts=wrong, leftovers=left)


def main(act: str) -> None:
    assert isinstance(recorder, Recorder)
    with Broker.open(URL, **{**OPTIONS, "connect_timeout": PATIENCE_S, "operation_timeout": PATIENCE_S}) as broker:
        {"declare": declare, "drain": drain, "look": look}[act](broker)


if __name__ == "__main__":
    main(sys.argv[1])
