"""Commands that do what pages do: limits, and the actions of ``operations/catalogue.py`` with the same questions."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from celery_fdb.cli.status import known
from celery_fdb.cli.terminal import Answer, Invocation, Refused, command, table, yes_option
from celery_fdb.inspection import filters, formats
from celery_fdb.operations import queues
from celery_fdb.operations.action import Outcome, Request
from celery_fdb.operations.catalogue import ACTIONS
from kombu_fdb.errors import FormatError, KombuFDBError, QueueError, QueueNotFound
from kombu_fdb.primitives.masking import plain


@command("run-now")
@click.argument("task_id")
def run_now(invocation: Invocation, *, task_id: str) -> Answer:
    """Make the delayed messages of the task TASK_ID ready now."""
    return _each(invocation, task_id, "run_now", ("delayed",))


@command()
@click.argument("task_id")
@click.argument("due")
def reschedule(invocation: Invocation, *, task_id: str, due: str) -> Answer:
    """Make the waiting messages of the task TASK_ID due at DUE: 2031-12-31T23:59, in UTC, or in 90s, 10m, 2h, 7d."""
    return _each(invocation, task_id, "reschedule", ("ready", "delayed"), due=due)


def _each(invocation: Invocation, task_id: str, name: str, states: tuple[str, ...], **fields: str) -> Answer:
    """Do the action to each message of the task. A refusal for one message does not stop the others.

    Raises ``Refused`` if the task has no message in one of the states, and the error if every message is refused.
    """
    found = [
        each
        for each in invocation.broker.spots(task_id)
        if each.message.state in states and not filters.died_elsewhere(each.message, each.message.queue)
    ]
    if not found:
        fix = "`find` shows where its messages are."
        raise Refused(f"the task has no {' or '.join(states)} message", task_id=task_id, fix=fix)
    done, refused = list[Outcome](), list[KombuFDBError]()
    for each in found:
        try:
            done.append(do(invocation, name, Request(each.message.queue, [each.spot], fields=fields)))
        except (QueueError, FormatError) as refusal:
            refused.append(refusal)
    number = sum(1 - each.missed for each in done)
    for error in refused:
        if not number:
            raise error
        click.echo(plain(f"Left as it is: {error}"), err=True)
    return Answer({"task_id": task_id, "changed": number}, [each.text for each in done])


@command()
@click.argument("queue")
@click.argument("task")
@click.option("--args", default="[]", help="A JSON list.")
@click.option("--kwargs", default="{}", help="A JSON object.")
@click.option("--key", "fair_key", default="", help="The fairness key.")
@click.option("--delay", default="", help="Seconds; 10m, 12h or 7d also work.")
@click.option("--priority", default="", help="0 to 9.")
def publish(invocation: Invocation, *, queue: str, **fields: str) -> Answer:
    """Publish a task named TASK to QUEUE, as Celery would: to try a worker out."""
    outcome = do(invocation, "publish", Request(queue, fields=fields))
    task_id = outcome.text.removesuffix(f" to {queue}.").rpartition(" ")[2]  # names may have spaces in them
    return Answer({"queue": queue, "task": fields["task"], "task_id": task_id}, [outcome.text])


@command()
@click.argument("queue")
@yes_option
def delete(invocation: Invocation, *, queue: str, yes: bool) -> Answer:
    """Delete QUEUE with its bindings, limits and waiting messages. Refused while a process uses it."""
    known(invocation, queue)
    request = asked(invocation, "delete_queue", Request(queue), yes=yes)
    outcome = do(invocation, "delete_queue", request)
    return Answer({"queue": queue, "deleted": request.asked.number}, [outcome.text])


@command()
@click.argument("queue")
@yes_option
def purge(invocation: Invocation, *, queue: str, yes: bool) -> Answer:
    """Delete all ready and delayed messages of QUEUE. Leased ones stay."""
    known(invocation, queue)
    outcome = do(invocation, "purge", asked(invocation, "purge", Request(queue), yes=yes))
    return Answer({"queue": queue, "deleted": outcome.number}, [outcome.text])


@command()
@click.argument("source")
@click.argument("target")
@click.option("--limit", type=click.IntRange(1), help="How many; default: all.")
@click.option("--key", help="Only ready messages with this fairness key.")
@click.option("--new", is_flag=True, help="Allow a TARGET that is not declared.")
def move(invocation: Invocation, *, source: str, target: str, limit: int | None, key: str | None, new: bool) -> Answer:
    """Move the ready and delayed messages of SOURCE to the end of TARGET, unchanged."""
    known(invocation, source)
    fields = {"target": target, "first": "yes", **({"new": "yes"} if new else {})}
    request = asked(invocation, "move", Request(source, key=key, fields=fields), yes=True)
    if limit:
        request = request.asking(request.asked._replace(number=min(limit, request.asked.number)))
    try:
        outcome = do(invocation, "move", request)
    except QueueNotFound:
        fix = "Check its name, or add --new to move them to a new queue."
        raise QueueNotFound(queue=target, fix=fix) from None
    return Answer({"source": source, "target": target, "moved": outcome.number}, [outcome.text])


@command()
@click.argument("queue")
@click.argument("key", required=False)
def pause(invocation: Invocation, *, queue: str, key: str | None) -> Answer:
    """Stop delivering messages of QUEUE, or of one KEY of it. Messages that workers hold are not affected."""
    return _switch(invocation, "pause", queue, key)


@command()
@click.argument("queue")
@click.argument("key", required=False)
def resume(invocation: Invocation, *, queue: str, key: str | None) -> Answer:
    """Deliver messages of QUEUE, or of one KEY of it, again. Waiting consumers wake up."""
    return _switch(invocation, "resume", queue, key)


def _switch(invocation: Invocation, name: str, queue: str, key: str | None) -> Answer:
    outcome = do(invocation, name, Request(queue, key=key))
    return Answer({"queue": queue, "key": key, "paused": name == "pause"}, [outcome.text])


# -- limits ------------------------------------------------------------------------------------------------------------


@command()
@click.argument("queue")
@click.argument("key", required=False)
@click.option("--weight", metavar="INTEGER", help="Messages per turn.")
@click.option("--max-in-flight", metavar="INTEGER|NONE", help="How many may be leased at a time.")
@click.option("--rate", metavar="RATE|NONE", help="Messages a second across all consumers; 100/m and 1000/h also work.")
@click.option("--burst", metavar="INTEGER", help="How many may be delivered at once within the rate.")
@click.option(
    "--capacity", metavar="INTEGER|NONE", help="How many ready messages it may have before publishing is refused."
)
@click.option("--priority", metavar="INTEGER|NONE", help="Priority of the whole key, 0 to 9 (9 is the most urgent).")
@click.option("--remove", is_flag=True, help="Remove the key's own limits; those of every key apply again.")
def limit(invocation: Invocation, *, queue: str, key: str | None, remove: bool, **given: str | None) -> Answer:
    """Show or change the limits of KEY in QUEUE; without KEY, of every key that has no limits of its own.

    Only the limits you name change; none removes a limit. Changes apply from the next message on.
    """
    changes = {name: text for name, text in given.items() if text is not None}
    if not all(text.strip() for text in changes.values()):
        raise click.UsageError("a limit is empty; none removes it")
    removable = changes.keys() - {"weight", "burst"}
    changes = {name: "" if text == "none" and name in removable else text for name, text in changes.items()}
    for name, text in changes.items():
        queues.read_limit(name, text)  # before the store is asked: it may be away
    known(invocation, queue)
    if remove and (changes or key is None):
        raise click.UsageError("--remove needs a KEY and no other option")
    if remove or changes:
        do(invocation, "unlimit" if remove else "limit", Request(queue, key=key, fields=changes))
    fields = dataclasses.asdict(invocation.broker.queue(queue).limits(key))
    rows = [(name, _limit(name, value)) for name, value in fields.items()]
    return Answer({"queue": queue, "key": key, "limits": fields}, [table("limit value", rows)])


def _limit(name: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", False: "no", True: "yes"}[value]
    return formats.limit(value) if name == "rate" else str(value)


# -- how an action is done ---------------------------------------------------------------------------------------------


def asked(invocation: Invocation, name: str, request: Request, *, yes: bool, everything: bool = False) -> Request:
    """The request, once its question is answered; about no message at all there is none. Raises ``click.Abort``.

    ``everything``: about all dead letters of the queue. Their number comes from the counter, as unreadable ones have no
    name. Raises ``AskedAnew`` if some that the question was about are gone.
    """
    action, broker = ACTIONS[name], invocation.broker
    request = action.ask(broker, request)
    if everything:
        request = request.asking(request.asked._replace(number=broker.queue(request.queue).count()))
    if not yes and (request.spots if action.selects else not request.asked.is_about_none or name == "delete_queue"):
        click.confirm(plain(action.question(request)), abort=True, err=True)
        action.check_asked(broker, request)
    return request


def do(invocation: Invocation, name: str, request: Request) -> Outcome:
    """Do all parts of the action, with a bar if there is more than one."""
    action = ACTIONS[name]
    outcome = action.run(invocation.broker, request)
    if outcome.following:
        with invocation.bar(action.label, request.asked.number) as advance:
            advance(outcome.number)
            while outcome.following:
                outcome = action.run(invocation.broker, request._replace(mark=outcome.following))
                advance(outcome.number)
    return outcome
