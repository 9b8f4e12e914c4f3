"""``dead list|show|causes|replay|edit|discard``: show dead letters and their causes; replay or discard them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from celery_fdb.cli.look import known
from celery_fdb.cli.messages import body_option, shown
from celery_fdb.cli.terminal import Answer, Invocation, Refused, clean, command, duration, rate, table, yes_option
from celery_fdb.inspection.filters import REASONS, group, letters_in
from celery_fdb.inspection.message import reason_of
from celery_fdb.inspection.overview import look
from celery_fdb.inspection.time_formats import moment
from celery_fdb.operations.action import Asked
from kombu_fdb.api.dead_letters import DeadLetters
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.errors import QueueNotFound
from kombu_fdb.model import Peeked
from kombu_fdb.primitives.plural import plural


@click.group()
def dead() -> None:
    """List, replay or discard dead letters: what failed for good, and why.

    QUEUE is the queue they died in, or QUEUE.dead, where they are kept. With a dead-letter exchange, name the queue
    that it leads to and add --in.
    """


in_option = click.option("--in", "in_queue", is_flag=True, help="QUEUE is the queue that holds the dead letters.")


def _conditions(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that choose dead letters: all of the given conditions must hold."""
    options = (
        in_option,
        click.option("--reason", help=f"For example {', '.join(REASONS)}."),
        click.option("--task", help="A Celery task's name."),
        click.option("--key", help="The fairness key."),
        click.option("--error", help="The class of the exception."),
        *(
            click.option(name, type=duration, metavar="SECONDS", help="Since the last death; 10m, 12h or 7d also work.")
            for name in ("--older-than", "--younger-than")
        ),
    )
    return functools.reduce(lambda made, option: option(made), reversed(options), function)


id_arguments = click.argument("ids", metavar="[ID]...", nargs=-1)


def _letters(invocation: Invocation, queue: str, *, in_queue: bool) -> DeadLetters:
    """The dead letters of a queue, or of ``<queue>.dead``, as the tables name it. Raises ``QueueNotFound``."""
    view = known(invocation, queue)
    return invocation.broker.dead_letters(queue if in_queue or view.dead_of is not None else queue + DEAD_SUFFIX)


def _given(conditions: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in conditions.items() if value is not None}


@command("list")
@click.argument("queue", required=False)
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many, oldest first.")
@click.option(
    "--by",
    type=click.Choice(["reason", "task", "key", "queue", "error"]),
    help="Count them by this instead of listing them.",
)
@_conditions
@body_option
def list_(
    invocation: Invocation,
    *,
    queue: str | None,
    limit: int,
    by: str | None,
    in_queue: bool,
    body: bool,
    **conditions: Any,
) -> Answer:
    """Count the dead letters of each queue; with QUEUE, list its dead letters, oldest first."""
    if queue is None:
        having = {view.name: view.dead for view in look(invocation.broker).live_queues if view.dead}
        return Answer(having, [table("queue >dead", having.items())])
    letters = _letters(invocation, queue, in_queue=in_queue)
    if by is not None:
        counts = dict(letters.count(by, **_given(conditions)).most_common())
        return Answer(counts, [table(f"{by} >dead", counts.items())])
    return shown(letters.list(limit, **_given(conditions)), body=body)


@command()
@click.argument("queue")
@click.argument("message_id", metavar="ID")
@in_option
@body_option
def show(invocation: Invocation, *, queue: str, message_id: str, in_queue: bool, body: bool) -> Answer:
    """Show one dead letter with its whole history. ID is as in the list, or the task's id."""
    answer = shown([_find(invocation, _letters(invocation, queue, in_queue=in_queue), message_id)], body=body)
    deaths = answer.document[0]["deaths"]
    return Answer(answer.document[0], [*answer.shown, *(line for each in deaths for line in _story(each))])


def _story(death: dict[str, Any]) -> Iterator[str]:
    """A death in lines; a traceback stays readable."""
    times = "" if death["count"] == 1 else f", {death['count']} times"
    at = _at(death["time"] * 1000)
    yield ""
    yield clean(f"{reason_of(death['reason'], death['details'])} in {death['queue']}{times}, the last time at {at}")
    for name, value in death["details"].items():
        attempts = value if name == "attempts" and isinstance(value, list) else None
        first, *others = ("", *map(_attempt, attempts)) if attempts else (str(value).splitlines() or [""])
        yield clean(f"  {name}: {first}".rstrip())
        yield from (f"    {clean(line)}" for line in others)


def _attempt(told: Any) -> str:
    return "  ".join(str(told.get(part, "")) for part in ("time", "error")) if isinstance(told, dict) else str(told)


@command()
@click.argument("queue")
@id_arguments
@_conditions
@click.option("--limit", type=click.IntRange(1), help="How many, oldest first; default: all.")
@click.option("--to", help="Replay to this queue instead of the one they died in.")
@click.option("--rate", type=rate, metavar="RATE", help="At most this many a second; 100/m and 1000/h also work.")
@click.option("--yes", is_flag=True, help="Don't ask for confirmation; scripts are never asked.")
def replay(
    invocation: Invocation,
    *,
    queue: str,
    ids: tuple[str, ...],
    in_queue: bool,
    limit: int | None,
    to: str | None,
    rate: float | None,
    yes: bool,
    **conditions: Any,
) -> Answer:
    """Move dead letters back to the queue they died in: those with the IDs, or all that match the conditions.

    Without IDs, conditions or --limit you are asked first. Ctrl-C stops between two messages: the dead letters replayed
    so far are back in their queues, and the others stay.
    """
    letters = _letters(invocation, queue, in_queue=in_queue)
    wanted = _wanted(invocation, letters, ids, _given(conditions))
    if wanted == [{}] and limit is None and _is_terminal():
        limit = letters.count().total()
        question = f"Replay all {plural(limit, 'dead letter')} of {clean(letters.dead_queue)}?"
        (asked,) = _asked(letters, wanted, question, yes=yes)
        wanted = [{"where": asked.holds}]  # letters that have died meanwhile stay
    _check_reason(letters, conditions["reason"])
    count = 0
    try:
        with invocation.bar("replay", None) as advance:
            for each in wanted:
                count += letters.replay(limit, to=to, rate=rate, progress=advance, **each)
    except QueueNotFound as error:
        fix = "Start a worker that declares it, or name another queue with --to. The dead letters stay where they are."
        replayed = count + error.attributes.get("replayed", 0)
        raise QueueNotFound(error.text, **{**error.attributes, "replayed": replayed, "fix": fix}) from None
    return Answer({"queue": queue, "replayed": count}, [f"replayed {plural(count, 'message')}"])


@command()
@click.argument("queue")
@id_arguments
@_conditions
@click.option("--all", "everything", is_flag=True, help="All of them.")
@yes_option
def discard(
    invocation: Invocation,
    *,
    queue: str,
    ids: tuple[str, ...],
    in_queue: bool,
    everything: bool,
    yes: bool,
    **conditions: Any,
) -> Answer:
    """Delete dead letters for good: those with the IDs, those that match the conditions, or --all."""
    given = _given(conditions)
    if everything == bool(ids or given):
        raise click.UsageError("give IDs, conditions or --all")
    letters = _letters(invocation, queue, in_queue=in_queue)
    wanted = _wanted(invocation, letters, ids, given)
    _check_reason(letters, conditions["reason"])
    mark = invocation.broker.queue(letters.dead_queue).mark()
    if not yes:
        number = sum(letters.count(**each).total() for each in wanted)
        question = f"Delete {plural(number, 'dead letter')} of {clean(queue)} for good?"
        asked = _asked(letters, wanted, question, yes=False)
        if not everything:  # among all, some may be unreadable, and have no name
            wanted = [{**each, "where": about.holds} for each, about in zip(wanted, asked, strict=True)]
    count = sum(_discard(letters, mark, each) for each in wanted)
    return Answer({"queue": queue, "discarded": count}, [f"discarded {plural(count, 'message')}"])


def _asked(letters: DeadLetters, wanted: list[dict[str, Any]], question: str, *, yes: bool) -> list[Asked]:
    """Ask. Returns what the question is about. Raises ``click.Abort``; ``AskedAnew`` if letters are gone by then."""
    asked = _about(letters, wanted)
    if not yes:
        click.confirm(question, abort=True, err=True)
    for before, now in zip(asked, _about(letters, wanted), strict=True):
        before.check(now)
    return asked


def _about(letters: DeadLetters, wanted: list[dict[str, Any]]) -> list[Asked]:
    return [Asked.about(letters.each(**each), lambda _: True) for each in wanted]


def _discard(letters: DeadLetters, mark: bytes | None, conditions: dict[str, Any]) -> int:
    """Discard the letters that had died by the mark, and none that died while the question was open."""
    count = 0
    while mark:
        part = letters.discard_part(mark, **conditions)
        count, mark = count + part.number, part.following
    return count


def _check_reason(letters: DeadLetters, reason: str | None) -> None:
    """Refuse a mistyped reason, which would match nothing and look like success. Raises ``Refused``."""
    if reason is None or reason in REASONS or next(letters.each(reason=reason), None) is not None:
        return
    reasons = ", ".join(clean(each) for each in sorted(letters.count(by="reason")) if each)
    fix = f"There are: {reasons}." if reasons else "There are no dead letters."
    raise Refused("no dead letter has this reason", queue=letters.dead_queue, reason=reason, fix=fix)


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _wanted(
    invocation: Invocation, letters: DeadLetters, ids: tuple[str, ...], given: dict[str, Any]
) -> list[dict[str, Any]]:
    """The conditions of one walk, or of one walk for each id. Raises ``Refused`` for an id that is not there."""
    if not ids:
        return [given]
    return [{**given, "message_id": _find(invocation, letters, each).message_id} for each in ids]


def _find(invocation: Invocation, letters: DeadLetters, wanted: str) -> Peeked:
    """The dead letter of this id, or of the task with this id. Raises ``Refused``."""
    of_task = [each for each in invocation.broker.find(wanted) if each.queue == letters.dead_queue]
    if of_task:
        return of_task[0]
    try:
        found = letters.get(bytes.fromhex(wanted))
    except ValueError:
        found = None
    if found is None:
        raise Refused("no such dead letter", queue=letters.dead_queue, id=wanted, fix="`dead list` lists them.")
    return found


@command()
@click.argument("queue")
@in_option
@click.option("--most", type=click.IntRange(1), default=10_000, show_default=True, help="Dead letters to count.")
def causes(invocation: Invocation, *, queue: str, in_queue: bool, most: int) -> Answer:
    """Count the dead letters of QUEUE by task, error and reason, with the first and the last death of each."""
    queues = [_letters(invocation, queue, in_queue=in_queue).dead_queue]
    groups, counted, _ = group(invocation.broker, queues, most=most)
    total = letters_in(invocation.broker, queues)
    rows = [(each.task, each.said, each.reason, each.count, _at(each.first_ms), _at(each.last_ms)) for each in groups]
    document = {
        "causes": [
            {**each.cause._asdict(), "count": each.count, "first": _at(each.first_ms), "last": _at(each.last_ms)}
            for each in groups
        ],
        "counted": counted,
        "total": total,
    }
    among = f"counted {counted:,} of {plural(total, 'dead letter')}"
    return Answer(document, [table("task error reason >dead first last", rows), among])


def _at(ms: float) -> str:
    return moment(ms).isoformat(sep=" ", timespec="seconds")


@command()
@click.argument("queue")
@click.argument("message_id", metavar="ID")
@in_option
@click.option("--args", help="A JSON list; default: as they are.")
@click.option("--kwargs", help="A JSON object; default: as they are.")
def edit(
    invocation: Invocation, *, queue: str, message_id: str, in_queue: bool, args: str | None, kwargs: str | None
) -> Answer:
    """Replay the dead letter ID with other arguments. It has to be a Celery task in JSON, not compressed."""
    from celery_fdb.operations import messages  # imports much of Celery
    from celery_fdb.operations.action import Request

    fields = _given({"args": args, "kwargs": kwargs})
    if not fields:
        raise click.UsageError("give --args or --kwargs")
    letter = _find(invocation, _letters(invocation, queue, in_queue=in_queue), message_id)
    found = [
        each.spot for each in invocation.broker.spots(letter.task_id) if each.message.message_id == letter.message_id
    ]
    if not found:
        raise Refused("not a task that can be edited", id=message_id, fix="Replay it as it is, or discard it.")
    outcome = messages.edit(invocation.broker, Request(letter.queue, found, fields=fields))
    return Answer({"queue": queue, "id": message_id, "replayed": 1 - outcome.missed}, [outcome.text])


for each in (list_, show, causes, replay, edit, discard):
    dead.add_command(each)
