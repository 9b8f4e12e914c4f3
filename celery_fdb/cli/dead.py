"""``dead list|show|replay|discard``: the dead letters of queues without a dead-letter exchange, in ``<queue>.dead``."""

from __future__ import annotations

import click

from celery_fdb.cli.look import known
from celery_fdb.cli.messages import body_option, shown
from celery_fdb.cli.terminal import Answer, Refused, Run, clean, command, table
from celery_fdb.overview import look
from kombu_fdb.errors import QueueNotFound
from kombu_fdb.model import Peeked
from kombu_fdb.queue.deadletter import DEAD_SUFFIX

__all__ = ["dead"]


@click.group()
def dead() -> None:
    """Dead letters: what failed for good, and why; replay or discard it."""


id_argument = click.argument("ids", metavar="[ID]...", nargs=-1)


@command("list")
@click.argument("queue", required=False)
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="The oldest so many.")
@body_option
def list_(run: Run, *, queue: str | None, limit: int, body: bool) -> Answer:
    """How many dead letters each queue has; with QUEUE, those of it, the oldest first."""
    if queue is not None:
        known(run, queue)
        return shown(run.broker.queue(queue).dead.peek(limit), body=body)
    having = {view.name: view.dead for view in look(run.broker).live_queues if view.dead}
    return Answer(having, [table("queue >dead", having.items())])


@command()
@click.argument("queue")
@click.argument("message_id", metavar="ID")
@body_option
def show(run: Run, *, queue: str, message_id: str, body: bool) -> Answer:
    """One dead letter with its whole history. ID as the list shows it, or its task's id."""
    answer = shown([_find(run, queue, message_id)], body=body)
    deaths = answer.document[0]["deaths"]
    rows = [
        (each["queue"], each["reason"], each["count"], each["exchange"], _details(each["details"])) for each in deaths
    ]
    return Answer(answer.document[0], [*answer.shown, "", table("died_in of >times exchange details", rows)])


def _details(details: dict[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in details.items())


@command()
@click.argument("queue")
@id_argument
@click.option("--limit", type=click.IntRange(1), help="The oldest so many; default: all.")
@click.option("--new", is_flag=True, help="Even if nobody has declared QUEUE.")
def replay(run: Run, *, queue: str, ids: tuple[str, ...], limit: int | None, new: bool) -> Answer:
    """Bring dead letters back to QUEUE: those with the IDs, or the oldest."""
    view = known(run, queue)
    if not (view.declared or view.ready or view.delayed or view.leased or new):
        raise QueueNotFound(
            "the queue was deleted, or never declared", queue=queue, fix="Start its worker, or say --new."
        )
    if ids:
        raise Refused("single dead letters can't be replayed yet")
    count = run.broker.queue(queue).kick(view.dead if limit is None else limit)
    return Answer({"queue": queue, "replayed": count}, [f"replayed {count:,} message(s)"])


@command()
@click.argument("queue")
@id_argument
@click.option("--all", "everything", is_flag=True, help="All of them.")
@click.option("--yes", is_flag=True, help="Don't ask.")
def discard(run: Run, *, queue: str, ids: tuple[str, ...], everything: bool, yes: bool) -> Answer:
    """Delete dead letters of QUEUE for good: those with the IDs, or --all."""
    if everything == bool(ids):
        raise click.UsageError("name the IDs, or say --all")
    if everything:
        run.confirm(f"Delete {known(run, queue).dead:,} dead letters of {clean(queue)} for good?", yes=yes)
        count = run.broker.queue(queue).dead.purge()
    else:
        found = [_find(run, queue, each) for each in ids]
        run.confirm(f"Delete {len(found)} dead letter(s) for good?", yes=yes)
        count = sum(run.broker.queue(queue).dead.delete(each) for each in found)
    return Answer({"queue": queue, "discarded": count}, [f"discarded {count:,} message(s)"])


def _find(run: Run, queue: str, wanted: str) -> Peeked:
    """By its id, or by its task's. Raises ``Refused``."""
    known(run, queue)
    name = queue + DEAD_SUFFIX
    of_task = [each for each in run.broker.find(wanted) if each.queue == name]
    if of_task:
        return of_task[0]
    try:
        found = run.broker.queue(name).find(bytes.fromhex(wanted))
    except ValueError:
        found = None
    if found is None:
        raise Refused("no such dead letter", queue=queue, id=wanted, fix=f"`dead list {queue}` lists them.")
    return found


for each in (list_, show, replay, discard):
    dead.add_command(each)
