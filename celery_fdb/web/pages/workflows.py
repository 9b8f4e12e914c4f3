"""``/workflows`` and ``/workflow``: those that ran, and the shape of one with its tasks on a line of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from celery.states import FAILURE, SUCCESS
from starlette.responses import Response

from celery_fdb.history.reading import Wanted
from celery_fdb.history.run import ACTIVE, FAILED
from celery_fdb.history.views.runs import HistoryOff
from celery_fdb.history.views.timeline import TaskUnknown
from celery_fdb.history.views.workflows import DONE, Node, Workflow, below, page_of_workflows, workflow_of
from celery_fdb.inspection.filters import Filter
from celery_fdb.web.visit import NotThere, Visit
from kombu_fdb import Broker

#: Levels of a tree that are drawn.
DEEPEST = 60
#: Parts of a group that are shown; of more, those that are not done, and the others behind a click.
MOST_PARTS = 10
#: Steps of a workflow that are drawn.
MOST_DRAWN = 500
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
    tasks = visit.tasks(*(each.name for each in found.workflows))
    return visit.page("workflows", found=found, given=given, states=STATES, tasks=tasks)


def workflow(visit: Visit, broker: Broker) -> Response:
    """Of any of its tasks."""
    task_id = visit.asked("id").strip()
    try:
        found = workflow_of(broker, task_id)
    except TaskUnknown:
        raise NotThere("Nothing is known of this task. Workflows are drawn from the history of what ran.") from None
    now_s = visit.settings.clock.wall_ms() / 1000
    drawing = _Drawing(found, now_s)
    branches = drawing.branches(found.roots)
    begin, end = found.started or now_s, found.ended or now_s
    ticks = [begin + at * (end - begin) / 3 for at in range(4)]
    return visit.page(
        "workflow",
        id=task_id,
        found=found,
        branches=branches,
        ticks=ticks,
        lasted=max(end - begin, 0),
        not_drawn=found.tasks - drawing.tasks,
    )


class _Drawing:
    """Of a workflow, without what is deeper than a page can show, or more; what has failed comes before all others."""

    def __init__(self, found: Workflow, now_s: float) -> None:
        self._found, self._now_s = found, now_s
        self.tasks = 0
        nodes = [each for root in found.roots for each in below(root)]
        #: Of each node: 0 if it or a part of it has failed, 2 if all is done.
        self._urgency: dict[int, int] = {}
        for node in reversed(nodes):
            own = 0 if node.state in FAILED else 2 if node.state in DONE else 1
            self._urgency[id(node)] = min([own, *(self._urgency[id(each)] for each in node.children)])
        self._drawn = {id(each) for each in self._urgent(nodes)[:MOST_DRAWN]}  # none without what it is a part of

    def _urgent(self, nodes: Sequence[Node]) -> list[Node]:
        return sorted(nodes, key=lambda each: self._urgency[id(each)])

    def branches(self, nodes: Sequence[Node], level: int = 0) -> list[Branch]:
        return [self._branch(each, level) for each in nodes if id(each) in self._drawn and level <= DEEPEST]

    def _branch(self, node: Node, level: int) -> Branch:
        self.tasks += node.kind == "task"
        below, bar = self.branches(node.children, level + 1), _bar(node, self._found, self._now_s)
        if len(below) <= MOST_PARTS or node.kind == "chain":
            return Branch(node, bar, below, [])
        shown = {id(each) for each in self._urgent(node.children)[:MOST_PARTS] if self._urgency[id(each)] < 2}
        parts: tuple[list[Branch], list[Branch]] = ([], [])
        for each in below:
            parts[id(each.node) not in shown].append(each)
        return Branch(node, bar, *parts)


def _bar(node: Node, found: Workflow, now_s: float) -> Bar | None:
    if node.started is None or found.started is None:
        return None
    end = now_s if node.ended is None or node.state == ACTIVE else node.ended
    length = max((found.ended or now_s) - found.started, 0.001)
    x, right = ((each - found.started) / length * WIDTH for each in (node.started, end))
    x = min(max(x, 0), WIDTH - 4)
    return Bar(x, min(max(right - x, 4), WIDTH - x))
