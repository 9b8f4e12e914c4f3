"""What ran: ``/tasks``, ``/runs``, ``/task``, ``/workflows`` and ``/workflow``.

These pages show the numbers of each task, the runs, one task's whole life, the workflows, and one workflow as a tree
along a time line. They need the history (``celery_fdb.install(app, history=True)``), and say so if there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from celery.states import FAILURE, IGNORED, READY_STATES, REJECTED, SUCCESS
from starlette.exceptions import HTTPException
from starlette.responses import Response

from celery_fdb.history import layout
from celery_fdb.history.reading import Wanted
from celery_fdb.history.run import ACTIVE, FAILED, LOST, STATES
from celery_fdb.history.views.runs import HistoryOff, look_at_tasks, page_of_runs
from celery_fdb.history.views.timeline import TaskUnknown, Timeline, timeline_of
from celery_fdb.history.views.workflows import Node, Workflow, page_of_workflows, workflow_of
from celery_fdb.inspection import filters
from celery_fdb.inspection.message import MessageView
from celery_fdb.inspection.overview import look
from celery_fdb.operations.action import Action
from celery_fdb.operations.catalogue import named
from celery_fdb.web.pages.messages import offered
from celery_fdb.web.request_context import MOST_SHOWN, RequestContext, known
from kombu_fdb import Broker
from kombu_fdb.engine.inspection import browse

# -- tasks and runs ----------------------------------------------------------------------------------------------------


#: In seconds.
PERIODS = {"hour": 3_600, "day": 86_400}
FILTERS = ("task", "state", "key", "queue", "worker", "since", "until", "arguments")
#: Characters of a session's id, by which the session is found.
SESSION_DIGITS = 12
#: The most characters of a state or a filter; longer ones match nothing.
LONGEST = 200


def tasks(context: RequestContext, broker: Broker) -> Response:
    """The numbers by task, the busiest first."""
    period = context.asked("period", "hour")
    try:
        seen = look_at_tasks(broker, period_s=PERIODS.get(period, PERIODS["hour"]), clock=context.settings.clock)
    except HistoryOff:
        return context.page("no_history", title="Tasks", here="tasks")
    shown = seen.tasks[:MOST_SHOWN]
    return context.page("tasks", seen=seen, shown=shown, period=period, periods=list(PERIODS), error=layout.ERROR)


def runs(context: RequestContext, broker: Broker) -> Response:
    """Runs that have ended, the newest first, or active ones, the longest first."""
    given, wanted = _wanted(context, FILTERS)
    try:
        found = page_of_runs(broker, wanted, limit=context.settings.page_size, cursor=context.asked("cursor") or None)
    except HistoryOff:
        return context.page("no_history", title="Runs", here="tasks")
    choices = {
        "task": context.tasks(*(each.task for each in found.runs)),
        **{name: known(getattr(each, name) for each in found.runs) for name in ("key", "queue", "worker")},
    }
    return context.page("runs", found=found, wanted=wanted, given=given, states=STATES, choices=choices)


def _wanted(context: RequestContext, names: Sequence[str]) -> tuple[dict[str, str], Wanted]:
    """The fields of a filter in the address that are not empty, and the filter.

    Raises ``InvalidArgument``, and ``HTTPException`` for arguments that the user may not see.
    """
    given = {name: text[:LONGEST] for name in names if (text := context.asked(name))}
    fields: dict[str, Any] = dict(given)
    for name in ("since", "until"):
        fields[f"{name}_ms"] = filters.moment_ms(name, fields.pop(name, ""), context.zone) or 0
    if "arguments" in fields:
        fields["arguments"] = context.asked_arguments()[:LONGEST]
    return given, Wanted(**fields)


def task(context: RequestContext, broker: Broker) -> Response:
    """One task: where its messages are, its runs, and its result; without an id, a form that asks for one.

    The id of a session, or its beginning as the command line shows it, leads to the page of sessions.
    """
    task_id = context.asked("id").strip()
    life: Timeline | None = None
    if task_id:
        with suppress(TaskUnknown):
            life = timeline_of(broker, task_id, context.settings.app)
    now_ms = context.settings.clock.wall_ms()
    rows = [MessageView.of(each, now_ms) for each in broker.spots(task_id)] if task_id else []
    if life is None and not rows and len(task_id) >= SESSION_DIGITS:
        for each in look(broker, queues=()).sessions:
            if each.id.startswith(task_id):
                return context.redirect(f"{context.url('sessions')}#{each.id}")
    return context.page(
        "task",
        id=task_id,
        life=life,
        rows=rows,
        most=browse.MOST_OF_TASK,
        offered=lambda row: context.allowed(offered(row.message.queue, [row])),
        offered_on_task=_offered_on_task,
    )


def _offered_on_task(state: str) -> list[Action]:
    """The actions on a task: none if it has ended. ``state``: that of its newest run or message."""
    if state in {*READY_STATES, LOST, "dead", IGNORED, REJECTED}:
        return []
    return named("task_revoke", *(["task_terminate"] if state in {ACTIVE, "leased"} else []))


# -- workflows ---------------------------------------------------------------------------------------------------------


#: Levels of a tree that are drawn.
DEEPEST = 60
#: Parts of a group that are shown at once. A larger group shows parts that are not done; the others need a click.
MOST_PARTS = 10
#: Steps of a workflow that are drawn.
MOST_DRAWN = 500
WORKFLOW_STATES = (ACTIVE, FAILURE, SUCCESS)
WORKFLOW_FILTERS = ("task", "state", "since", "until")
#: The width of the line of time.
WIDTH = 1_000


#: The parts of a node that are shown, and those that are shown after a click.
Parts = tuple[list[Node], list[Node]]


def workflows(context: RequestContext, broker: Broker) -> Response:
    """The workflows: first those that are running, then the newest."""
    given, wanted = _wanted(context, WORKFLOW_FILTERS)
    try:
        found, following = page_of_workflows(broker, wanted, cursor=context.asked("cursor") or None)
    except HistoryOff:
        return context.page("no_history", title="Workflows", here="workflows")
    tasks = context.tasks(*(each.name for each in found))
    return context.page(
        "workflows", workflows=found, following=following, given=given, states=WORKFLOW_STATES, tasks=tasks
    )


def workflow(context: RequestContext, broker: Broker) -> Response:
    """The workflow of any of its tasks."""
    task_id = context.asked("id").strip()
    try:
        found = workflow_of(broker, task_id)
    except TaskUnknown:
        raise HTTPException(
            404, "Nothing is known of this task. Workflows are drawn from the history of what ran."
        ) from None
    now_s = context.settings.clock.wall_ms() / 1000
    parts = _drawn(found)
    begin, end = found.started or now_s, found.ended or now_s
    ticks = [begin + at * (end - begin) / 3 for at in range(4)]
    return context.page(
        "workflow",
        id=task_id,
        found=found,
        roots=[each for each in found.roots if id(each) in parts],
        parts=lambda node: parts[id(node)],
        bar=lambda node: _bar(node, found, now_s),
        ticks=ticks,
        lasted=max(end - begin, 0),
        not_drawn=sum(each.kind == "task" and id(each) not in parts for each in _nodes(found)),
    )


def _nodes(found: Workflow) -> list[Node]:
    return [each for root in found.roots for each in root.below()]


def _drawn(found: Workflow) -> dict[int, Parts]:
    """The parts of each node to draw, within the limits of depth and number. What has failed has precedence."""
    nodes = _nodes(found)
    #: By node: 0 if the node or a part of it has failed, 2 if all is done.
    urgency: dict[int, int] = {}
    for node in reversed(nodes):
        own = 0 if node.state in FAILED else 2 if node.is_done else 1
        urgency[id(node)] = min([own, *(urgency[id(each)] for each in node.children)])

    def urgent(nodes: Sequence[Node]) -> list[Node]:
        return sorted(nodes, key=lambda each: urgency[id(each)])

    drawn = {id(each) for each in urgent(nodes)[:MOST_DRAWN]}  # no node without the node that it is a part of
    drawn_parts: dict[int, Parts] = {}
    level = [each for each in found.roots if id(each) in drawn]
    for depth in range(DEEPEST + 1):
        below: list[Node] = []
        for node in level:
            parts = [each for each in node.children if id(each) in drawn and depth < DEEPEST]
            shown = {id(each) for each in parts}
            if len(parts) > MOST_PARTS and node.kind != "chain":
                shown = {id(each) for each in urgent(node.children)[:MOST_PARTS] if urgency[id(each)] < 2}
            hidden = [each for each in parts if id(each) not in shown]
            drawn_parts[id(node)] = [each for each in parts if id(each) in shown], hidden
            below += parts
        level = below
    return drawn_parts


def _bar(node: Node, found: Workflow, now_s: float) -> tuple[float, float] | None:
    if node.started is None or found.started is None:
        return None
    end = now_s if node.ended is None or node.state == ACTIVE else node.ended
    length = max((found.ended or now_s) - found.started, 0.001)
    x, right = ((each - found.started) / length * WIDTH for each in (node.started, end))
    x = min(max(x, 0), WIDTH - 4)
    return x, min(max(right - x, 4), WIDTH - x)
