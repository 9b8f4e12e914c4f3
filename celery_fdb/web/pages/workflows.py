"""``/workflows`` and ``/workflow``: those that ran, and the shape of one with its tasks on a line of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from celery.states import FAILURE, SUCCESS
from starlette.responses import Response

from celery_fdb.history.reading import Wanted
from celery_fdb.history.run import ACTIVE
from celery_fdb.history.views.runs import HistoryOff
from celery_fdb.history.views.timeline import TaskUnknown
from celery_fdb.history.views.workflows import DONE, Node, Workflow, page_of_workflows, workflow_of
from celery_fdb.inspection.filters import Filter
from celery_fdb.web.page import NotThere
from celery_fdb.web.visit import Visit
from kombu_fdb import Broker

#: Levels of a tree that are drawn.
DEEPEST = 60
#: Parts of a group that are shown; of more, those that are not done, and the others behind a click.
MOST_PARTS = 10
STATES = (ACTIVE, FAILURE, SUCCESS)
FIELDS = ("task", "state", "since", "until")
#: The width of the line of time.
WIDTH = 1_000


class Bar(NamedTuple):
    """Where it is on the line of time."""

    x: float
    width: float


@dataclass(frozen=True, slots=True)
class Branch:
    """A node as it is drawn. ``hidden``: parts behind a click."""

    node: Node
    bar: Bar | None
    shown: list[Branch]
    hidden: list[Branch]


def workflows(visit: Visit, broker: Broker) -> Response:
    """Those that go on first, then the newest."""
    given = {name: visit.asked(name)[:200] for name in FIELDS if visit.asked(name)}
    ended = Filter.of({name: given[name] for name in ("since", "until") if name in given}, visit.zone)
    wanted = Wanted(
        given.get("task", ""), given.get("state", ""), since_ms=ended.since_ms or 0, until_ms=ended.until_ms or 0
    )
    try:
        found = page_of_workflows(broker, wanted, cursor=visit.asked("cursor") or None)
    except HistoryOff:
        return visit.page("no_history", title="Workflows", here="workflows")
    return visit.page("workflows", found=found, given=given, states=STATES)


def workflow(visit: Visit, broker: Broker) -> Response:
    """Of any of its tasks."""
    task_id = visit.asked("id").strip()
    try:
        found = workflow_of(broker, task_id)
    except TaskUnknown:
        raise NotThere("Nothing is known of this task. Workflows are drawn from the history of what ran.") from None
    now_s = visit.settings.clock.wall_ms() / 1000
    branches = [_branch(each, found, now_s) for each in found.roots]
    begin, end = found.started or now_s, found.ended or now_s
    ticks = [begin + at * (end - begin) / 3 for at in range(4)]
    return visit.page("workflow", id=task_id, found=found, branches=branches, ticks=ticks, lasted=max(end - begin, 0))


def _branch(node: Node, found: Workflow, now_s: float, level: int = 0) -> Branch:
    """Without what is deeper than a page can show."""
    below = [_branch(each, found, now_s, level + 1) for each in node.children] if level < DEEPEST else []
    bar = _bar(node, found, now_s)
    if len(below) <= MOST_PARTS or node.kind == "chain":
        return Branch(node, bar, below, [])
    shown = [each for each in below if each.node.state not in DONE][:MOST_PARTS]
    return Branch(node, bar, shown, [each for each in below if each not in shown])


def _bar(node: Node, found: Workflow, now_s: float) -> Bar | None:
    if node.started is None or found.started is None:
        return None
    end = now_s if node.ended is None or node.state == ACTIVE else node.ended
    length = max((found.ended or now_s) - found.started, 0.001)
    x, right = ((each - found.started) / length * WIDTH for each in (node.started, end))
    x = min(max(x, 0), WIDTH - 4)
    return Bar(x, min(max(right - x, 4), WIDTH - x))
