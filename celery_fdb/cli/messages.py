"""``peek``, ``find``, ``search`` and ``cancel``: commands on the messages of a queue or a task."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import click
from rich.console import RenderableType

from celery_fdb.cli.status import known
from celery_fdb.cli.terminal import Answer, Invocation, Refused, ago, command, table
from celery_fdb.control import cancel_task
from celery_fdb.inspection import filters, formats
from celery_fdb.inspection.message import describe, error_line, reason_of
from celery_fdb.inspection.overview import STATES
from kombu_fdb.model import Peeked, State
from kombu_fdb.primitives.masking import plain
from kombu_fdb.primitives.plural import plural

#: The note after a cancellation by the broker's URL.
UNTOLD = "its result and chord are not updated: that needs the app, as in celery -A APP fdb cancel"

state_option = click.option(
    "--state", type=click.Choice(STATES), default="ready", show_default=True, help="Which ones."
)
body_option = click.option(
    "--body", is_flag=True, help="Also show headers and body. JSON and text only; nothing is ever unpickled."
)


@command()
@click.argument("queue")
@click.option("--limit", type=click.IntRange(1, 1000), default=10, show_default=True)
@click.option("--key", help="Only messages with this fairness key.")
@state_option
@body_option
def peek(invocation: Invocation, *, queue: str, limit: int, key: str | None, state: State, body: bool) -> Answer:
    """Show what a consumer of QUEUE would get next, without taking it."""
    known(invocation, queue)
    return shown(invocation.broker.queue(queue).peek(limit, state=state, key=key), body=body)


@command()
@click.argument("task_id")
@body_option
def find(invocation: Invocation, *, task_id: str, body: bool) -> Answer:
    """Find the messages of the task TASK_ID, in every queue and state."""
    found = invocation.broker.find(task_id)
    if not found:
        raise _no_task(task_id)
    return shown(found, body=body)


def _no_task(task_id: str) -> Refused:
    return Refused(
        "the broker has no message of this task",
        task_id=task_id,
        fix="The task is done, or was never sent to this broker.",
    )


def shown(found: Sequence[Peeked], *, body: bool) -> Answer:
    """Messages as an answer."""
    described = [describe(each, body=body) for each in found]
    return Answer(described, [*message_table(described, body=body)])


def message_table(described: Sequence[dict[str, Any]], *, body: bool) -> Iterator[RenderableType]:
    """A line for each message and, with ``body``, its headers and body below."""
    yield table(
        "id queue state key task task_id >age >due_in >redelivered >size note",
        [
            (
                *(each["id"], each["queue"], each["state"], each["key"], each["task"], each["task_id"]),
                *(formats.age(each["age_s"]), formats.age(each["due_in_s"]), each["redeliveries"], each["size"]),
                _note(each),
            )
            for each in described
        ],
    )
    if body:
        yield from (line for each in described for line in ("", *_content_lines(each)))


def _note(described: dict[str, Any]) -> str:
    if described["owner"]:
        return f"held by session {described['owner'][:12]}"
    return f"died: {died_of(described['deaths'][0])}" if described["deaths"] else ""


def died_of(death: dict[str, Any]) -> str:
    """The reason and the error of a death, as ``describe`` gives them."""
    reason, details = death["reason"], death["details"]
    return ": ".join(filter(None, (reason_of(reason, details), error_line(details))))


def _content_lines(described: dict[str, Any]) -> list[str]:
    content = described["content"]
    return [
        f"{described['id']} {content['content_type'] or ''}",
        *(f"  {name}: {plain(str(value))}" for name, value in content["headers"].items() if value is not None),
        f"  body: {plain(json.dumps(content['body'], ensure_ascii=False, default=str))}",
    ]


@command()
@click.argument("queue")
@click.option("--task", default="", help="A Celery task's name; shop.* for all that begin so.")
@click.option("--key", help="The fairness key.")
@click.option("--error", default="", help="The class of the exception of the last death, or attempt.")
@click.option("--reason", default="", help="Why it died last.")
@click.option("--text", default="", help="A part of the task's id, or of the message's.")
@click.option("--arguments", default="", help="A part of the task's arguments.")
@click.option(
    "--since", default="", metavar="TIME", help="Waits, or died, since 2031-12-31T23:59 UTC, or 10m, 12h or 7d ago."
)
@click.option("--until", default="", metavar="TIME", help="Before then.")
@state_option
@click.option("--newest", is_flag=True, help="From the end of the queue.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=20, show_default=True)
@click.option("--most", type=click.IntRange(1), default=100_000, show_default=True, help="Messages to look through.")
@body_option
def search(
    invocation: Invocation,
    *,
    queue: str,
    state: State,
    newest: bool,
    limit: int,
    most: int,
    body: bool,
    **given: str | None,
) -> Answer:
    """Find messages of QUEUE that match all the options, dead letters too: name QUEUE.dead."""
    known(invocation, queue)
    wanted = filters.Filter.of({name: _moment(name, value) for name, value in given.items() if value is not None})
    of_queue = invocation.broker.queue(queue)
    described: list[dict[str, Any]] = []
    looked_at = 0
    following: bytes | None = b""
    while following is not None and len(described) < limit and looked_at < most:
        found, number, following = filters.search(
            of_queue,
            wanted,
            limit - len(described),
            state=state,
            reverse=newest,
            after=following,
            most=most - looked_at,
        )
        looked_at += number
        for each in found:
            whole = of_queue.at(each.spot) if body else None
            described.append({**describe((whole or each).message, body=body), "size": each.size})
    through = f"looked through {plural(looked_at, 'message')}{', all there are' if following is None else ''}"
    return Answer(described, [*message_table(described, body=body), through])


def _moment(name: str, text: str) -> str:
    """A moment for ``since`` or ``until``, which may also be given as an age."""
    return ago(text) if name in {"since", "until"} and formats.seconds_of(text) is not None else text


@command()
@click.argument("task_id")
def cancel(invocation: Invocation, *, task_id: str) -> Answer:
    """Delete the messages of the task TASK_ID that no worker holds. No worker needs to run.

    With an app (celery -A), its result becomes REVOKED and its chord fails.
    """
    app = invocation.app_of_broker
    if cancelled := cancel_task(invocation.broker, task_id, app):
        told = "its result, if it has one, is REVOKED" if app else UNTOLD
        document = {"task_id": task_id, "cancelled": cancelled, "revoked": app is not None}
        return Answer(document, [f"cancelled: {plural(cancelled, 'message')} deleted; {told}"])
    if invocation.broker.find(task_id):
        raise Refused(
            "a worker holds this task",
            task_id=task_id,
            fix=f"To end it there, run: celery -A APP control terminate TERM {task_id}",
        )
    raise _no_task(task_id)
