"""``dead list|show|causes|replay|edit|discard``: show dead letters and their causes; replay or discard them."""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import click

from celery_fdb.cli import actions
from celery_fdb.cli.messages import body_option, shown
from celery_fdb.cli.status import known
from celery_fdb.cli.terminal import Answer, Invocation, Refused, ago, command, rate, table, yes_option
from celery_fdb.inspection import filters, formats
from celery_fdb.inspection.message import reason_of
from celery_fdb.inspection.overview import look
from celery_fdb.operations import messages
from celery_fdb.operations.action import Request, listed
from kombu_fdb.api.dead_letters import DeadLetters
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.errors import QueueNotFound
from kombu_fdb.model import Listed, Peeked, Spot
from kombu_fdb.primitives.masking import plain
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
        click.option("--reason", help=f"For example {', '.join(filters.REASONS)}; what failed is rejected, too."),
        click.option("--task", help="A Celery task's name; shop.* for all that begin so, - for none."),
        click.option("--key", help="The fairness key."),
        click.option("--error", help="The class of the exception; - for none."),
        *(
            click.option(*names, type=ago, metavar="SECONDS", help="Since the last death; 10m, 12h or 7d also work.")
            for names in (("--older-than", "until"), ("--younger-than", "since"))
        ),
    )
    return functools.reduce(lambda made, option: option(made), reversed(options), function)


def _filter(given: dict[str, str | None]) -> filters.Filter:
    """The options as a filter. Raises ``click.UsageError`` for an empty one, as of a script's unset variable.

    With :data:`in_option` the queue may hold messages of its own: a condition on the last death asks for one.
    """
    fields = {name: text for name, text in given.items() if text is not None}
    if not all(text.strip() for name, text in fields.items() if name != "key"):
        raise click.UsageError("a condition is empty; - finds those that have none")
    return filters.Filter.of(fields if fields.keys() <= {"task", "key"} else {**fields, "died": "yes"})


id_arguments = click.argument("ids", metavar="[ID]...", nargs=-1)


def _letters(invocation: Invocation, queue: str, *, in_queue: bool) -> DeadLetters:
    """The dead letters of a queue, or of ``<queue>.dead``, as the tables name it. Raises ``QueueNotFound``."""
    view = known(invocation, queue)
    return invocation.broker.dead_letters(queue if in_queue or view.dead_of is not None else queue + DEAD_SUFFIX)


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
    **given: str | None,
) -> Answer:
    """Count the dead letters of each queue; with QUEUE, list its dead letters, oldest first."""
    if queue is None:
        having = {view.name: view.dead for view in look(invocation.broker).live_queues if view.dead}
        return Answer(having, [table("queue >dead", having.items())])
    letters, conditions = _letters(invocation, queue, in_queue=in_queue), _filter(given).conditions()
    if by is not None:
        in_words = by == "reason" and not invocation.as_json
        counts = dict(letters.count(_reason_in_words if in_words else by, **conditions).most_common())
        return Answer(counts, [table(f"{by} >dead", counts.items())])
    return shown(letters.list(limit, **conditions), body=body)


def _reason_in_words(letter: Peeked) -> str:
    return reason_of(letter.deaths[0].reason, letter.deaths[0].details) if letter.deaths else ""


@command()
@click.argument("queue")
@click.argument("message_id", metavar="ID")
@in_option
@body_option
def show(invocation: Invocation, *, queue: str, message_id: str, in_queue: bool, body: bool) -> Answer:
    """Show one dead letter with its whole history. ID is as in the list, or the task's id."""
    letters = _letters(invocation, queue, in_queue=in_queue)
    found = _find(invocation, letters, message_id)
    whole = invocation.broker.queue(letters.dead_queue).at(found.spot) or found
    answer = shown([whole.message], body=body)
    deaths = answer.document[0]["deaths"]
    return Answer(answer.document[0], [*answer.shown, *(line for each in deaths for line in _story(each))])


def _story(death: dict[str, Any]) -> Iterator[str]:
    """A death in lines; a traceback stays readable."""
    times = "" if death["count"] == 1 else f", {death['count']} times"
    at = _at(death["time"] * 1000)
    yield ""
    yield plain(f"{reason_of(death['reason'], death['details'])} in {death['queue']}{times}, the last time at {at}")
    for name, value in death["details"].items():
        attempts = value if name == "attempts" and isinstance(value, list) else None
        first, *others = ("", *map(_attempt, attempts)) if attempts else (str(value).splitlines() or [""])
        yield plain(f"  {name}: {first}".rstrip())
        yield from (f"    {plain(line)}" for line in others)


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
    **given: str | None,
) -> Answer:
    """Move dead letters back to the queue they died in: those with the IDs, or all that match the conditions.

    Without IDs, conditions or --limit you are asked first. Ctrl-C stops between two messages: the dead letters replayed
    so far are back in their queues, and the others stay.
    """
    letters, wanted = _letters(invocation, queue, in_queue=in_queue), _filter(given)
    spots = _spots(invocation, letters, ids, wanted)
    _check_reason(letters, wanted.reason)
    conditions = wanted.conditions()
    if not (ids or wanted or limit or yes) and _is_terminal():
        request = Request(letters.dead_queue, fields={} if to is None else {"to": to})
        request = actions.asked(invocation, "replay_all", request, yes=False, everything=True)
        # Letters that have died meanwhile stay.
        conditions, limit = messages.conditions(request), request.asked.number
    count = 0
    try:
        with invocation.bar("replay", None) as advance:
            for each in [{"message_id": spot.message_id} for spot in spots[:limit]] if ids else [conditions]:
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
    **given: str | None,
) -> Answer:
    """Delete dead letters for good: those with the IDs, those that match the conditions, or --all."""
    wanted = _filter(given)
    if everything == bool(ids or wanted):
        raise click.UsageError("give IDs, conditions or --all")
    letters = _letters(invocation, queue, in_queue=in_queue)
    spots = _spots(invocation, letters, ids, wanted)
    _check_reason(letters, wanted.reason)
    request = Request(letters.dead_queue, spots, fields=wanted.fields(), seconds=math.inf)
    name = "discard" if ids else "discard_all"
    request = actions.asked(invocation, name, request, yes=yes, everything=everything)
    if everything and not request.asked.is_about_none:  # some may be unreadable, and have no name
        request = request.asking(request.asked._replace(named=None))
    outcome = actions.do(invocation, name, request)
    count = len(spots) - outcome.missed if ids else outcome.number
    return Answer({"queue": queue, "discarded": count}, [outcome.text])


def _check_reason(letters: DeadLetters, reason: str) -> None:
    """Refuse a mistyped reason, which would match nothing and look like success. Raises ``Refused``."""
    found = letters.each(**filters.Filter(reason=reason, died=True).conditions())
    if reason in {"", filters.NONE, *filters.REASONS} or next(found, None) is not None:
        return
    reasons = ", ".join(plain(each) for each in sorted(letters.count(by="reason")) if each)
    fix = f"There are: {reasons}. (What failed is rejected.)" if reasons else "There are no dead letters."
    raise Refused("no dead letter has this reason", queue=letters.dead_queue, reason=reason, fix=fix)


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _spots(invocation: Invocation, letters: DeadLetters, ids: tuple[str, ...], wanted: filters.Filter) -> list[Spot]:
    """Where the dead letters with these ids stand, if they match. Raises ``Refused`` for an id that is not there."""
    found = [_find(invocation, letters, each) for each in ids]
    found = [each for each in found if each.message.state == "ready" and wanted.matches(each.message)]
    return list(dict.fromkeys(each.spot for each in found))


def _find(invocation: Invocation, letters: DeadLetters, wanted: str) -> Listed:
    """The dead letter of this id, or of the task with this id. Raises ``Refused``."""
    queue = invocation.broker.queue(letters.dead_queue)
    of_task = (each for each in invocation.broker.spots(wanted) if each.message.queue == queue.name)
    all_letters = listed(queue, "ready") if re.fullmatch("[0-9a-fA-F]{32}", wanted) else ()
    of_id = (each for each in all_letters if each.message.message_id.hex() == wanted.lower())
    found = next(chain(of_task, of_id), None)
    if found is None:
        raise Refused("no such dead letter", queue=queue.name, id=wanted, fix="`dead list` lists them.")
    return found


@command()
@click.argument("queue")
@in_option
@click.option("--most", type=click.IntRange(1), default=10_000, show_default=True, help="Dead letters to count.")
def causes(invocation: Invocation, *, queue: str, in_queue: bool, most: int) -> Answer:
    """Count the dead letters of QUEUE by task, error and reason, with the first and the last death of each."""
    queues = [_letters(invocation, queue, in_queue=in_queue).dead_queue]
    groups, counted, _ = filters.group(invocation.broker, queues, most=most)
    total = filters.letters_in(invocation.broker, queues)
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
    return formats.moment(ms).isoformat(sep=" ", timespec="seconds")


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
    fields = {name: text for name, text in (("args", args), ("kwargs", kwargs)) if text is not None}
    if not fields:
        raise click.UsageError("give --args or --kwargs")
    letters = _letters(invocation, queue, in_queue=in_queue)
    spot = _find(invocation, letters, message_id).spot
    outcome = actions.do(invocation, "edit", Request(letters.dead_queue, [spot], fields=fields))
    return Answer({"queue": queue, "id": message_id, "replayed": 1 - outcome.missed}, [outcome.text])


for each in (list_, show, causes, replay, edit, discard):
    dead.add_command(each)
