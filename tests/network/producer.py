"""``python -m tests.network.producer SEED``: publishes by Celery, by Kombu and by the Broker API, and acts as a person.

A name says who published the message, by what, and which one it is.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from itertools import count
from typing import Any

from celery import chord
from kit.history.record import Answer
from kombu import Connection
from kombu.exceptions import BatchPublishError, OperationalError

from celery_fdb import publish_many
from celery_fdb.contrib.outbox import Outbox
from kombu_fdb import Broker
from kombu_fdb.errors import InvalidArgument, QueueError, StoreError

from .app import OPTIONS, URL, app, connect, counted, failing, plain, recorder, retried
from .programs import work

KEYS = ("a", "b", "c", "d")
#: Of one thread, in seconds.
PAUSE_S = 0.12


class RolledBack(Exception):
    """An order that did not come about."""


REFUSALS = (InvalidArgument, QueueError, RolledBack)
DOUBTS = (StoreError, OperationalError, BatchPublishError, OSError)
PUBLISH_S = OPTIONS["publish_timeout"]
WINDOW_S = 300.0
#: A page of the dashboard says within ten seconds that the store is away (docs/dashboard.md); as much again is for its
#: process, which does not tell when the machine lets it wait.
PAGE_S = 20.0
PAGES = (
    *("/", "/queues", "/queue?queue=fair", "/keys?queue=fair", "/messages?queue=tasks", "/dead?queue=tasks.dead"),
    *("/causes", "/tasks", "/workflows", "/schedules", "/sessions", "/workers"),
)


def publish(name: str, queue: str, send: Callable[[], Any], **fields: Any) -> Answer:
    return recorder.call("publish", send, refusals=REFUSALS, doubts=DOUBTS, message=name, queue=queue, **fields)


def group(names: Sequence[str], send: Callable[[], Any]) -> None:
    with suppress(*REFUSALS, *DOUBTS):
        publish_all(names, send)


def publish_all(names: Sequence[str], send: Callable[[], Any]) -> None:
    """Several with one call, which are in doubt together."""
    if names:
        answer = publish(names[0], "tasks", lambda: publish_all(names[1:], send))
        if answer.kind != "ok":
            raise answer.value
    else:
        send()


def by_groups(over: threading.Event, rng: random.Random) -> None:
    """Chords, batches, and orders with a task in the outbox."""
    box = Outbox(app, connect)
    for number in count():
        if over.wait(10 * PAUSE_S):
            return
        kind = rng.choice(["chord", "batch", "order"])
        names = [f"{recorder.who}-{kind}-{number}-{each}" for each in range(4)]
        if kind == "chord":
            parts = [counted.s().set(task_id=name) for name in names[1:]]
            group(names, partial(chord(parts), counted.s().set(task_id=names[0])))
        elif kind == "batch":
            group(names, partial(publish_many, [plain.s().set(task_id=name) for name in names]))
        else:
            group(names, partial(order, box, names, commits=rng.random() < 0.7))


def order(box: Outbox, names: Sequence[str], *, commits: bool) -> None:
    with closing(connect()) as database:
        cursor = database.cursor()
        for name in names:
            box.add(cursor, plain.s().set(task_id=name))
        if not commits:
            raise RolledBack  # as closing does that
        database.commit()


def by_celery(over: threading.Event, rng: random.Random) -> None:
    for number in count():
        if over.wait(PAUSE_S):
            return
        name = f"{recorder.who}-celery-{number}"
        chance = rng.random()
        if chance < 0.3:
            key = rng.choice(KEYS)
            sent = plain.s(0.05)
            options: dict[str, Any] = {"queue": "keyed", "headers": {"fair_key": key}}
            fields: dict[str, Any] = {"key": key}
        elif chance < 0.5:
            fields = {"delay": rng.choice([1, 2, 3])}
            sent, options = plain.s(), {"countdown": fields["delay"]}
        else:
            sent = rng.choice([plain.s(), plain.s(0.2), plain.s(0.5), retried.s(), failing.s()])
            options, fields = {}, {}
        publish(name, options.get("queue", "tasks"), partial(sent.apply_async, task_id=name, **options), **fields)


def by_kombu(over: threading.Event, rng: random.Random) -> None:
    numbers = count()
    while not over.is_set():
        try:
            with Connection(URL, transport_options=OPTIONS) as connection:
                connection.connect()  # Kombu tries that for longer than a call may take
                producer = connection.Producer()
                while not over.wait(PAUSE_S):
                    name, priority = f"{recorder.who}-kombu-{next(numbers)}", rng.choice([0, 0, 5])
                    options = {"routing_key": "line", "headers": {"id": name}, "priority": priority, "retry": False}
                    send = partial(producer.publish, name, **options)
                    if publish(name, "line", send, priority=priority, deadline=PUBLISH_S).kind == "info":
                        break
        except DOUBTS as error:
            recorder.note("reconnect", error=str(error))


def by_api(over: threading.Event, rng: random.Random) -> None:
    with opened(over) as broker:
        for number in count():
            if over.wait(PAUSE_S / 2):
                return
            name = f"{recorder.who}-api-{number}"
            # A noisy key among four.
            queue = rng.choice(["fair", "fair", "fair", "rated", "poison", "purged", "moved", "deduped", "deduped"])
            key = rng.choice([*KEYS, "a", "a", "a"]) if queue == "fair" else ""
            fields: dict[str, Any] = {"key": key}
            options: dict[str, Any] = {"key": key, "task_id": name}
            if queue == "deduped":
                # The other producer draws from the same few.
                options["dedup_id"] = fields["dedup"] = f"{number // 4}"
                fields["window"] = WINDOW_S

            send = partial(broker.queue(queue).put, name, **options)
            if (
                publish(name, queue, send, deadline=PUBLISH_S, **fields).kind == "info"
                and queue != "deduped"
                and rng.random() < 0.5
            ):
                publish(name, queue, send, deadline=PUBLISH_S, again=True, **fields)


def as_a_person(over: threading.Event, rng: random.Random) -> None:
    with opened(over) as broker:
        while not over.wait(1):
            op, queue, act = rng.choice(
                [
                    ("purge", "purged", lambda: broker.queue("purged").purge()),
                    ("replay", "poison", lambda: broker.queue("poison").dead_letters.replay(5)),
                    ("replay", "tasks", lambda: broker.queue("tasks").dead_letters.replay(5)),
                    ("move", "moved", lambda: broker.queue("moved").move("sink")),
                    ("look", "fair", lambda: broker.queue("fair").stats().ready),
                ]
            )
            # Moving and purging is many transactions, each with its own deadline.
            deadline = OPTIONS["operation_timeout"] if op == "look" else None
            recorder.call(
                op, act, refusals=REFUSALS, doubts=DOUBTS, tell=lambda n: {"count": n}, queue=queue, deadline=deadline
            )


def at_the_dashboard(over: threading.Event, rng: random.Random) -> None:
    while not over.wait(0.5):
        page = rng.choice(PAGES)
        recorder.call("page", partial(show, page), doubts=(OSError, HTTPException), page=page, deadline=PAGE_S)


def show(page: str) -> None:
    """Raises ``OSError`` if the store is away, or the dashboard: it was killed, or told to end and cut pages off."""
    with closing(HTTPConnection("127.0.0.1", 9810, timeout=2 * PAGE_S)) as connection:
        connection.request("GET", page, headers={"accept": "text/html"})
        answer = connection.getresponse()
        answer.read()
    is_servers = not answer.getheader("content-security-policy")
    if answer.status == HTTPStatus.SERVICE_UNAVAILABLE or (is_servers and answer.status != HTTPStatus.OK):
        raise ConnectionError(page)
    assert answer.status == HTTPStatus.OK, f"{page}: {answer.status}"


def opened(over: threading.Event) -> Broker:
    """As soon as the store answers."""
    while True:
        try:
            return Broker.open(URL, **OPTIONS)
        except StoreError as error:
            recorder.note("reconnect", error=str(error))
            if over.is_set():
                sys.exit(0)  # ends this thread, which has nothing to do


def main(seed: str) -> None:
    acts = [by_celery, by_groups, by_kombu, by_api]
    if recorder.who.startswith("producer1"):
        acts += [as_a_person, at_the_dashboard]
    work(recorder, [lambda over, act=act, s=seed: act(over, random.Random(f"{s} {act.__name__}")) for act in acts])
    app.pool.force_close_all()


if __name__ == "__main__":
    main(sys.argv[1])
