"""A chain, group or chord as a tree with states, from any of its tasks.

What belongs together is found by what runs and messages say of themselves: the root's id, the group's, the parent's,
and what follows in a chain or chord. Each step of the search reads a bounded number of rows, and there is a bounded
number of steps; ``complete`` says whether a bound ended it. Tasks that wait are known in two ways: as followers of a
run, and among the first messages of the queues that the workflow was seen in.

A group stands in the tree as a node of its own, its members below it, and so does the body of a chord, behind them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from celery import states

from celery_fdb.history.run import ACTIVE, Run, bounded, id_text
from celery_fdb.history.views.runs import history_of
from celery_fdb.history.views.timeline import TaskUnknown, fix_id
from kombu_fdb import Broker
from kombu_fdb.api.arguments import State
from kombu_fdb.errors import FormatError
from kombu_fdb.model import Peeked
from kombu_fdb.transport.encoding.envelope import open_payload

#: Runs of one root or group, and how many tasks, roots and groups are looked up.
MOST_RUNS, MOST_STEPS = 500, 100
#: Queues that are looked into, and messages of each and of each state.
MOST_QUEUES, MOST_MESSAGES = 10, 200
#: Levels of a tree; what is deeper stands below the last one.
MOST_DEPTH = 100
PENDING, NOT_RUN = states.PENDING, "NOT_RUN"
#: After these nothing of a chain follows.
FAILED = frozenset({states.FAILURE, states.REVOKED, states.REJECTED})
WAITING: tuple[State, ...] = ("ready", "delayed")


@dataclass(slots=True)
class Node:
    """A task, or a group. ``state``: of its newest run; of a message ready, delayed or leased.

    PENDING: not published; NOT_RUN: what it follows has failed, so it is not published any more.
    Of a group: FAILURE if a member failed, SUCCESS if all succeeded, else STARTED.
    """

    id: str
    task: str = ""
    kind: str = "task"
    state: str = PENDING
    runs: int = 0
    started: float | None = None
    ended: float | None = None
    runtime_s: float | None = None
    error: str = ""
    children: list[Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Workflow:
    """``tasks``: without groups. ``complete``: nothing was left out for want of room.

    ``saw_all_that_waits``: the queues were so short that all that waits in them was looked at.
    """

    roots: list[Node]
    tasks: int
    complete: bool
    saw_all_that_waits: bool


def workflow_of(broker: Broker, task_id: str) -> Workflow:
    """The workflow that a task belongs to; a task alone is one of its own. Raises ``TaskUnknown``."""
    search = _Search(broker)
    search.run(id_text(task_id))
    if not search.nodes:
        raise TaskUnknown(task_id=task_id, fix=fix_id(history_of(broker)))
    tree = search.tree()
    tasks = sum(each.kind == "task" for each in search.nodes.values())
    return Workflow(tree, tasks, search.complete, search.saw_all_that_waits)


class _Search:
    """What was found so far, and where to look next: for a task by its id, or for the family of a root or group."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._history = history_of(broker)
        self._active = [run for _, run in self._history.active()]
        self.nodes: dict[str, Node] = {}
        self.complete = self.saw_all_that_waits = True
        self._parents: dict[str, str] = {}
        #: Of members their groups.
        self._groups: dict[str, str] = {}
        #: Of followers, how many others come before them.
        self._behind: dict[str, int] = {}
        self._queues: set[str] = set()
        self._families: set[str] = set()
        self._steps: deque[tuple[str, str]] = deque()
        self._taken: set[tuple[str, str]] = set()
        self._counted: set[tuple[str, int, int, int]] = set()

    def run(self, task_id: str) -> None:
        """Find what belongs to the task."""
        self._look_for("task", task_id)
        self._look_for("family", task_id)
        for _ in range(MOST_STEPS):
            if not self._steps:
                break
            kind, id_ = self._steps.popleft()
            self._look_up(id_) if kind == "task" else self._expand(id_)
        self.complete &= not self._steps
        self._look_into_queues()

    def _look_for(self, kind: str, id_: str) -> None:
        if id_ and (kind, id_) not in self._taken:
            self._taken.add((kind, id_))
            self._steps.append((kind, id_))

    def _look_up(self, task_id: str) -> None:
        self._add_runs(self._history.runs_of_task(task_id))
        self._add_runs(run for run in self._active if run.id == task_id)
        for each in self._broker.spots(task_id):
            self._add_message(each.message)

    def _expand(self, id_: str) -> None:
        self._families.add(id_)
        found = self._history.runs_of_workflow(id_, limit=MOST_RUNS)
        self.complete &= len(found) < MOST_RUNS
        self._add_runs(found)
        self._add_runs(run for run in self._active if id_ in {run.root, run.group})

    def _look_into_queues(self) -> None:
        """For what waits and was not found otherwise: members of a group, and what a task has called."""
        self.saw_all_that_waits &= len(self._queues) <= MOST_QUEUES
        for queue in sorted(self._queues)[:MOST_QUEUES]:
            for state in WAITING:
                found = self._broker.queue(queue).peek(MOST_MESSAGES, state=state)
                self.saw_all_that_waits &= len(found) < MOST_MESSAGES
                for each in found:
                    headers = _headers(each)
                    if {id_text(headers.get("root_id")), id_text(headers.get("group"))} & self._families:
                        self._add_message(each)

    # -- what was found ----------------------------------------------------------------------------------------------

    def _add_runs(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self._queues.add(run.queue)
            if not self._count(run):
                continue  # found by its id, and by its root or group
            self._relate(run.id, root=run.root, parent=run.parent, group=run.group)
            before = run.id
            for number, follower in enumerate(run.followers, 1):
                self._node(follower.id, follower.task)
                self._behind[follower.id] = min(number, self._behind.get(follower.id, number))
                self._parents.setdefault(follower.id, run.group if before == run.id and run.group else before)
                self._look_for("task", follower.id)
                before = follower.id

    def _count(self, run: Run) -> bool:
        """Once for each run. Of several, the newest tells the node's state, in whatever order they are found."""
        mark = (run.id, run.start_ms, run.end_ms, run.retries)
        if mark in self._counted:
            return False
        self._counted.add(mark)
        node = self._node(run.id, run.task)
        node.runs += 1
        ended = run.end_ms / 1000 or None
        if node.runs == 1 or ended is None or (node.state != ACTIVE and (node.ended or 0.0) <= ended):
            node.state, node.runtime_s, node.error = run.state, run.runtime_s, run.error
            node.started, node.ended = run.start_ms / 1000 or None, ended
        return True

    def _add_message(self, message: Peeked) -> None:
        headers = _headers(message)
        task_id = id_text(message.task_id or headers.get("id"))
        node = self._node(task_id, bounded(headers.get("task")))
        if node.state not in {ACTIVE, states.SUCCESS, states.FAILURE}:
            node.state = message.state
        self._queues.add(message.queue)
        root, parent, group = (id_text(headers.get(name)) for name in ("root_id", "parent_id", "group"))
        self._relate(task_id, root="" if root == task_id else root, parent=parent, group=group)

    def _relate(self, task_id: str, *, root: str, parent: str, group: str) -> None:
        if group:
            self._node(group, "").kind = "group"  # it may be known as what follows a task in a chain
            self._groups[task_id] = group
            if parent:
                self._parents.setdefault(group, parent)
        elif parent:
            self._parents.setdefault(task_id, parent)
        for kind, id_ in (("family", root), ("family", group), ("task", root)):
            self._look_for(kind, id_)

    def _node(self, id_: str, task: str) -> Node:
        node = self.nodes.setdefault(id_, Node(id_))
        node.task = node.task or task
        return node

    # -- as a tree ---------------------------------------------------------------------------------------------------

    def tree(self) -> list[Node]:
        """Those that nothing led to, with all the others below them. Each once, whatever parents are claimed."""
        above = {id_: self._groups.get(id_) or self._parents.get(id_, "") for id_ in self.nodes}
        for id_, node in self.nodes.items():
            line = self._line(above, id_)
            if not line:
                above[id_] = ""
                continue
            shown = line[-1 - MOST_DEPTH] if len(line) > MOST_DEPTH else line[0]
            self.nodes[shown].children.append(node)
        roots = [node for id_, node in self.nodes.items() if not above[id_]]
        for node in self.nodes.values():
            node.children.sort(key=self._order)
        for node in self.nodes.values():
            if node.kind == "group":
                node.state = _of_members([each for each in node.children if each.id in self._groups])
        for node in self.nodes.values():
            if node.id in self._behind and node.state == PENDING and self._has_failed(above, node.id):
                node.state = NOT_RUN
        return sorted(roots, key=self._order)

    def _has_failed(self, above: dict[str, str], id_: str) -> bool:
        """Whether a task that it follows has."""
        return any(self.nodes[each].state in FAILED for each in self._line(above, id_))

    def _order(self, node: Node) -> tuple[float, int]:
        """By their starts; those that have not begun at the end, in the order of their chain."""
        begun = [each.started for each in (node, *node.children) if each.started is not None]
        return min(begun, default=math.inf), self._behind.get(node.id, 0)

    def _line(self, above: dict[str, str], id_: str) -> list[str]:
        """What is above a node, up to a root; nothing for a circle of parents, as no version of ours makes."""
        line: dict[str, None] = {}
        while (id_ := above.get(id_, "")) in self.nodes:
            if id_ in line:
                return []
            line[id_] = None
        return list(line)


def _of_members(members: list[Node]) -> str:
    found = {each.state for each in members}
    if states.FAILURE in found:
        return str(states.FAILURE)
    return str(states.SUCCESS) if found == {states.SUCCESS} else ACTIVE


def _headers(message: Peeked) -> dict[str, Any]:
    try:
        return open_payload(message.payload).headers
    except FormatError:
        return {}
