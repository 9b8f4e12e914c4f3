"""``/workflows`` and ``/workflow``: those that ran lately, and one as a tree with the state of each task."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.responses import Response

from celery_fdb.history.views.runs import HistoryOff, RunView, page_of_runs
from celery_fdb.history.views.timeline import TaskUnknown
from celery_fdb.history.views.workflows import Node, workflow_of
from celery_fdb.web.page import NotThere
from celery_fdb.web.visit import Visit
from kombu_fdb import Broker

#: Of the newest runs, among which the workflows are looked for.
RUNS_READ = 500
#: Levels of a tree that are drawn; a chain is as deep as it is long.
DEEPEST = 60


@dataclass(slots=True)
class Recent:
    """``root``: the id of its first task. ``runs``: of those that were read."""

    root: str
    latest: RunView
    runs: int = 0


def workflows(visit: Visit, broker: Broker) -> Response:
    """The newest first."""
    try:
        found = page_of_runs(broker, limit=RUNS_READ).runs
    except HistoryOff:
        return visit.page("no_history", title="Workflows", here="workflows")
    recent: dict[str, Recent] = {}
    for each in found:
        if each.root != each.id or each.group:
            recent.setdefault(each.root, Recent(each.root, each)).runs += 1
    return visit.page("workflows", recent=list(recent.values())[: visit.settings.page_size], read=len(found))


def workflow(visit: Visit, broker: Broker) -> Response:
    """Of any of its tasks."""
    task_id = visit.asked("id").strip()
    try:
        found = workflow_of(broker, task_id)
    except TaskUnknown:
        raise NotThere("Nothing is known of this task. Workflows are drawn from the history of what ran.") from None
    return visit.page("workflow", id=task_id, found=found, roots=[_cut(each) for each in found.roots])


def _cut(node: Node, level: int = 0) -> Node:
    """Without what is deeper than a page can show."""
    node.children = [_cut(each, level + 1) for each in node.children] if level < DEEPEST else []
    return node
