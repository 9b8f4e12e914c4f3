"""``history`` and ``task``: what ran, and one task's whole life."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import click
from rich.console import RenderableType

from celery_fdb.cli.terminal import Answer, Invocation, command, duration, table
from celery_fdb.history.reading import Wanted
from celery_fdb.history.run import ENDED, STATES
from celery_fdb.history.views.runs import HistoryOff, RunsPage, RunView, page_of_runs
from celery_fdb.history.views.timeline import Timeline, timeline_of
from celery_fdb.history.views.workflows import Node, Workflow, workflow_of
from celery_fdb.inspection import formats
from kombu_fdb import Broker
from kombu_fdb.primitives.clock import Clock

#: The most pages that one call reads; each page reads a bounded number of rows.
PAGES = 20
SECONDS = "SECONDS"


@command()
@click.option("--task", default="", help="Only runs of this task.")
@click.option(
    "--state",
    type=click.Choice(STATES, case_sensitive=False),
    metavar="STATE",
    help=f"STARTED: those that run now; {', '.join(ENDED)}.",
)
@click.option("--key", default="", help="Only with this fairness key.")
@click.option("--queue", default="", help="Only from this queue.")
@click.option("--worker", default="", help="Only by this worker, such as celery@web-1.")
@click.option("--since", type=duration, metavar=SECONDS, help="Ended at most so long ago; 10m, 12h or 7d also work.")
@click.option("--until", type=duration, metavar=SECONDS, help="Ended at least so long ago.")
@click.option("--arguments", default="", help="Only with this in their arguments.")
@click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True, help="How many, newest first.")
@click.option("--after", metavar="CURSOR", help="Go on where a list ended that named this cursor.")
def history(
    invocation: Invocation,
    *,
    state: str | None,
    since: float | None,
    until: float | None,
    limit: int,
    after: str | None,
    **texts: str,
) -> Answer:
    """List what ran, when, how long and with what result, newest first, if the app's workers keep a history."""
    now_ms = Clock().wall_ms()
    wanted = Wanted(
        state=state or "",
        since_ms=0 if since is None else max(now_ms - int(since * 1000), 0),
        until_ms=0 if until is None else max(now_ms - int(until * 1000), 1),
        **texts,
    )
    page = _page(invocation.broker, wanted, limit, after)
    more = [] if page.cursor is None else [f"There is more: --after {page.cursor}"]
    return Answer(dataclasses.asdict(page), [_table(page.runs), *more])


def _page(broker: Broker, wanted: Wanted, limit: int, after: str | None) -> RunsPage:
    """A page of ``limit`` runs, collected from several pages, whose number is bounded: rare runs may be far apart."""
    runs: list[RunView] = []
    for _ in range(PAGES):
        page = page_of_runs(broker, wanted, limit=limit - len(runs), cursor=after)
        runs += page.runs
        after = page.cursor
        if after is None or len(runs) == limit:
            break
    return RunsPage(runs[:limit], after)  # active runs are one page, whatever the limit


def _table(runs: Sequence[RunView]) -> RenderableType:
    now_s = Clock().wall_ms() / 1000
    return table(
        "task id state >ended >runtime >attempt queue key worker error",
        [
            (
                *(each.task, each.id, _state(each), _ended(each, now_s), _runtime(each, now_s)),
                *(each.attempt, each.queue, each.key, each.worker, each.said),
            )
            for each in runs
        ],
    )


def _state(run: RunView) -> str:
    return f"{run.state} (its worker is gone)" if run.alive is False else run.state


def _ended(run: RunView, now_s: float) -> str:
    return "" if run.ended is None else f"{formats.age(max(now_s - run.ended, 0))} ago"


def _runtime(run: RunView, now_s: float) -> str:
    if run.ended is None and run.started is not None:
        return formats.age(max(now_s - run.started, 0))
    return formats.took(run.runtime_s)


@command()
@click.argument("task_id")
@click.option("--tree", is_flag=True, help="Show the chain, group or chord that it belongs to.")
def task(invocation: Invocation, *, task_id: str, tree: bool) -> Answer:
    """Show the life of the task TASK_ID: published, delayed, leased, started, retried, done; from all that is known.

    Known are its messages in the broker, its runs in the history and, with an app (celery -A), the state of its result.
    """
    if tree:
        workflow = workflow_of(invocation.broker, task_id)
        return Answer(dataclasses.asdict(workflow), list(_tree(workflow)))
    life = timeline_of(invocation.broker, task_id, invocation.app_of_broker)
    return Answer(dataclasses.asdict(life), list(_life(life)))


def _life(life: Timeline) -> Iterator[RenderableType]:
    result = "" if life.result is None else f"; result: {life.result} {life.value}".rstrip()
    yield f"{life.task} {life.task_id}: {life.state}{result}"
    yield table("when what about", [(_moment(each.moment), each.what, each.about) for each in life.events])
    for each in life.runs[-1:]:
        yield from (f"{name}: {text}" for name, text in (("args", each.args), ("kwargs", each.kwargs)) if text)
        if each.traceback:
            yield each.traceback.rstrip()
    if not life.history:
        yield f"{HistoryOff.text.capitalize()}: only what is in the broker now is known. {HistoryOff.fix}"


def _moment(moment_s: float) -> str:
    return formats.moment(moment_s * 1000).isoformat(sep=" ", timespec="milliseconds").replace("+00:00", " UTC")


def _tree(workflow: Workflow) -> Iterator[str]:
    for each in workflow.roots:
        yield from _branch(each, "")
    if not workflow.complete:
        yield f"It has more than these {workflow.tasks} tasks."
    elif not workflow.saw_all_that_waits:
        yield "Members that wait far back in a long queue are not shown."


def _branch(node: Node, indent: str) -> Iterator[str]:
    runtime = "" if node.runtime_s is None else f" in {formats.took(node.runtime_s)}"
    tries = f", {node.runs} runs" if node.runs > 1 else ""
    error = f": {node.error[:80]}" if node.error else ""
    id_ = f" {node.id}" if node.kind == "task" else ""
    yield f"{indent}{node.task or node.kind}{id_} {node.state}{runtime}{tries}{error}"
    for child in node.children:
        yield from _branch(child, indent + "  ")
