"""A chain, group or chord as a tree with states, from any of its tasks.

Runs and messages name the ids of their root, group and parent, and the tasks that follow in a chain or chord. The
search goes from task to task by these ids. Each step reads a bounded number of rows, and the number of steps is
bounded; ``complete`` is False if a bound ended the search. Waiting tasks are found in two ways: as followers of a run,
and among the first messages of the queues that the workflow was seen in.

A workflow is counted as a whole, even if a page draws only a part: its runs are read in parts, up to :data:`MOST_RUNS`.
The numbers of a larger workflow are lower bounds.

Model of the tree. The parts of a *chain* run one after another, those of a *group* at once, and a task may have called
others. What follows a member of a group (the body of a chord) follows the group, and the group that a body names is
that of its header. So a chord is a chain of a group and its body, wherever it stands.

The list of workflows goes through the history from its newest segment on, by the index of roots and groups; a workflow
stands at its newest run. A page ends when it is full, when it has looked at :data:`MOST_LOOKED_AT` workflows, or after
the segment with which it has read :data:`MOST_ROWS` rows; the next page goes on there.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery import states

from celery_fdb.history.reading import RUNS_AT_ONCE, Wanted
from celery_fdb.history.run import ACTIVE, FAILED, Run, bounded
from celery_fdb.history.views.runs import history_of, kept_by
from celery_fdb.history.views.timeline import TaskUnknown
from celery_fdb.inspection.overview import STATES
from kombu_fdb import Broker
from kombu_fdb.errors import FormatError, InvalidArgument
from kombu_fdb.model import Peeked
from kombu_fdb.primitives.masking import masked_text
from kombu_fdb.transport.envelope import open_payload

#: Runs of a workflow that are counted, how many roots and groups are looked up, and how many tasks.
MOST_RUNS, MOST_FAMILIES, MOST_STEPS = 20_000, 500, 100
#: Active runs that are looked at; where there are more, each workflow may have some of them.
MOST_ACTIVE = 1_000
#: Workflows that a page of the list looks at; rows of the index after which it begins no further segment, or runs after
#: which it looks at no further workflow.
MOST_LOOKED_AT, MOST_ROWS = 100, 20_000
#: Queues that are looked into, and messages of each and of each state.
MOST_QUEUES, MOST_MESSAGES = 10, 200
#: Levels of a tree; what is deeper stands below the last one.
MOST_DEPTH = 100
PENDING, NOT_RUN = states.PENDING, "NOT_RUN"
DONE = frozenset({states.SUCCESS, states.IGNORED})
#: How a chain names a group that is one of its steps, and another chain.
GROUPS, CHAIN = frozenset({"celery.group", "celery.chord"}), "celery.chain"


@dataclass(slots=True)
class Node:
    """A task; a group, whose children run at once; or a chain, whose children run one after another.

    ``state`` of a task: that of its newest run, else of its message (ready, delayed or leased). PENDING: not published
    yet. NOT_RUN: the task before it failed, so it will not be published. ``state`` of a group or chain: FAILURE if a
    part failed, SUCCESS if all succeeded, PENDING if none has begun, else STARTED. A group or chain lasts from its
    first start to its last end. ``children`` of a task: the tasks that it has called.
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

    @property
    def is_done(self) -> bool:
        return self.state in DONE

    def below(self) -> list[Node]:
        """The node and all below it, each before its children."""
        found = [self]
        for each in found:
            found += each.children
        return found


@dataclass(frozen=True, slots=True)
class Workflow:
    """``id``: that of its first task. ``tasks``: how many, without groups; ``done`` and ``failed``: how many of them.

    ``state``: as if all its tasks were one group; "" if all counted tasks are done, but others were not counted.
    ``ended``: when its newest run did, None while it goes on. ``complete``: all tasks were counted; else the numbers
    are lower bounds. ``saw_all_that_waits``: its queues were short enough to look at every message in them.
    """

    id: str
    name: str
    roots: list[Node]
    state: str
    tasks: int
    done: int
    failed: int
    started: float | None
    ended: float | None
    complete: bool
    saw_all_that_waits: bool


def workflow_of(broker: Broker, task_id: str) -> Workflow:
    """The workflow that a task belongs to; a task alone is one of its own. Raises ``TaskUnknown``."""
    search = _Search(broker, {}, MOST_RUNS)
    search.run(bounded(task_id))
    if not search.nodes:
        raise TaskUnknown.of(task_id, history_of(broker))
    return search.workflow()


def page_of_workflows(
    broker: Broker, wanted: Wanted | None = None, *, limit: int = 25, cursor: str | None = None
) -> tuple[list[Workflow], str | None]:
    """Those that go on, then those that have ended, the newest first, and the cursor of the next page; None at the end.

    A page may have few, or none, and a cursor all the same. Raises ``HistoryOff``, ``InvalidArgument``.

    ``wanted``: the name of any of its tasks, its state (FAILURE, SUCCESS, or STARTED), and when it ended.
    """
    history, wanted, after = kept_by(broker), wanted or Wanted(), _parsed(cursor)
    shown: list[Workflow] = []
    waiting: dict[str, list[Peeked]] = {}
    seen: set[str] = set()
    looked_at = runs = rows = 0
    if after is None:
        for _, run in history.active(limit=MOST_ACTIVE):
            id_ = run.root or run.group or (run.id if run.followers else "")
            if id_ and id_ not in seen:
                search = _Search(broker, waiting, max(MOST_RUNS - runs, RUNS_AT_ONCE), history_only=True)
                search.run(id_)
                seen |= search.ids
                runs += search.read
                shown += _if_wanted(search, wanted)
    numbers = history.segments()
    last = f"{numbers[0] + 1}.0." if numbers else None  # before all of them
    for number in numbers:
        if after is not None and (number, 0, "") >= after:
            continue
        if rows >= MOST_ROWS:
            return shown, last
        found, read = history.workflows_in(number, wanted)
        rows += read
        spots = {id_: (end_ms, id_) for end_ms, id_ in found}
        for end_ms, id_ in spots.values():
            if after is not None and (number, end_ms, id_) >= after:
                continue
            if looked_at == MOST_LOOKED_AT or len(shown) >= limit or runs >= MOST_ROWS:
                return shown, last
            looked_at += id_ not in seen
            last = f"{number}.{end_ms}.{id_}"
            if not id_ or id_ in seen:
                continue
            search = _Search(broker, waiting, MOST_RUNS, history_only=True)
            search.run(id_)
            seen |= search.ids
            runs += search.read
            if _stands_here(search, spots, id_, wanted, goes_on=after is None):
                shown += _if_wanted(search, wanted)
        last = f"{number}.0."  # behind all of this one
    return shown, None


def _stands_here(
    search: _Search, spots: Mapping[str, tuple[int, str]], id_: str, wanted: Wanted, *, goes_on: bool
) -> bool:
    """A workflow is shown at the first of its ids (``spots``) in the segment with its newest run that is wanted.

    ``goes_on``: show one that does.
    """
    newest_ms = search.newest_ms(wanted)
    is_first = max(spots[each] for each in search.ids if each in spots) == spots[id_]
    return is_first and (newest_ms is not None or goes_on) and (newest_ms or 0) <= spots[id_][0]


def _if_wanted(search: _Search, wanted: Wanted) -> list[Workflow]:
    found = search.workflow()
    is_wanted = (
        found.tasks > 1
        and (not wanted.task or wanted.task in {each.task for each in search.nodes.values()})
        and (not wanted.state or found.state == wanted.state)
        and (not wanted.since_ms or (found.ended or math.inf) * 1000 >= wanted.since_ms)
        and (not wanted.until_ms or (found.ended or math.inf) * 1000 <= wanted.until_ms)
    )
    return [found] if is_wanted else []


def _parsed(cursor: str | None) -> tuple[int, int, str] | None:
    if not cursor:
        return None
    try:
        segment, end_ms, id_ = cursor.split(".", 2)
        return int(segment), int(end_ms), id_
    except ValueError as error:
        fix = "Use the cursor that the page before gave."
        raise InvalidArgument("not a cursor of the workflows", given=cursor[:80], fix=fix) from error


class _Search:
    """What was found so far, and where to look next: for a task by its id, or for the family of a root or group."""

    def __init__(
        self, broker: Broker, waiting: dict[str, list[Peeked]], most: int, *, history_only: bool = False
    ) -> None:
        """``waiting``: what was seen of queues. ``history_only``: messages are not looked for by their ids."""
        self._broker = broker
        self._waiting = waiting
        self._history_only = history_only
        self._history = history_of(broker)
        self._active = [run for _, run in self._history.active(limit=MOST_ACTIVE)]
        self.nodes: dict[str, Node] = {}
        self.complete, self.saw_all_that_waits = len(self._active) < MOST_ACTIVE, True
        #: Runs that were read by a root or group, and at most.
        self.read, self._most = 0, most
        self._parents: dict[str, str] = {}
        #: Of tasks, the groups that they say to be of, and what they say to be followed by.
        self._groups: dict[str, str] = {}
        self._followers: dict[str, tuple[str, ...]] = {}
        self._queues: set[str] = set()
        self._families: set[str] = set()
        self._steps: deque[tuple[str, str]] = deque()
        self._taken: set[tuple[str, str]] = set()
        self._counted: dict[tuple[str, int, int], Run] = {}
        #: How many of the runs are of a root or group.
        self._known = Counter[str]()
        #: By task, the start and the end of the run that its state is of.
        self._newest: dict[str, tuple[int, int]] = {}

    def run(self, task_id: str) -> None:
        """Find the tasks that belong to the same workflow as this one."""
        self._look_for("task", task_id)
        self._look_for("family", task_id)
        steps = 0
        while self._steps and steps < MOST_STEPS and len(self._families) < MOST_FAMILIES:
            kind, id_ = self._steps.popleft()
            if kind == "family":
                self._expand(id_)
                continue
            if id_ in self.nodes and self.nodes[id_].runs:
                continue  # its runs have been found by its root or group
            self._look_up(id_)
            steps += 1
        # The runs of what follows are of a family that was read; where its message is was not asked.
        self.complete &= all(kind == "task" and id_ in self.nodes for kind, id_ in self._steps)
        self.saw_all_that_waits &= not self._steps
        self._look_into_queues()

    def _look_for(self, kind: str, id_: str) -> None:
        if id_ and (kind, id_) not in self._taken:
            self._taken.add((kind, id_))
            self._steps.append((kind, id_)) if kind == "task" else self._steps.appendleft((kind, id_))

    def _look_up(self, task_id: str) -> None:
        self._add_runs(self._history.runs_of_task(task_id))
        self._add_runs(run for run in self._active if run.id == task_id)
        if not self._history_only:
            for each in self._broker.spots(task_id):
                self._add_message(each.message)

    def _expand(self, id_: str) -> None:
        self._families.add(id_)
        # Those of a group were mostly read with those of their root.
        most = self._most - len(self._counted) + self._known[id_]
        found = self._history.runs_of_workflow(id_, limit=most)
        self.read += len(found)
        self.complete &= len(found) < most
        self._add_runs(found)
        self._add_runs(run for run in self._active if id_ in {run.root, run.group})

    def _look_into_queues(self) -> None:
        """Look for waiting tasks that no run names: members of a group, and tasks that another has called."""
        self.saw_all_that_waits &= len(self._queues) <= MOST_QUEUES
        for queue in sorted(self._queues)[:MOST_QUEUES]:
            for each in self._peek(queue):
                headers = _headers(each)
                if {bounded(headers.get("root_id")), bounded(headers.get("group"))} & self._families:
                    self._add_message(each)

    def _peek(self, queue: str) -> list[Peeked]:
        if queue not in self._waiting:
            of_queue = self._broker.queue(queue)
            found = [of_queue.peek(MOST_MESSAGES, state=state) for state in STATES]
            self._waiting[queue] = [each for some in found for each in some]
        self.saw_all_that_waits &= len(self._waiting[queue]) < MOST_MESSAGES
        return self._waiting[queue]

    # -- what was found ----------------------------------------------------------------------------------------------

    def _add_runs(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self._queues.add(run.queue)
            if not self._count(run):
                continue  # the run was found by its id, and by its root or group
            self._relate(run.id, root=run.root, parent=run.parent, group=run.group)
            if run.followers:
                self._followers[run.id] = tuple(id_ for id_, _ in run.followers)
            for id_, task in run.followers:
                self._node(id_, task)
                self._look_for("task", id_)
                if task in GROUPS:
                    self._look_for("family", id_)

    def _count(self, run: Run) -> bool:
        """Count a run, and set the state of its node. Runs may come in any order. Returns False for one counted before.

        The state is that of the run that began last, which need not be the last to end: a dead worker's run ends when
        another worker notices, long after the task ran elsewhere.
        """
        mark = (run.id, run.start_ms or run.end_ms, run.retries)
        known = self._counted.get(mark)
        if known is not None and known.end_ms >= run.end_ms:
            return False
        self._counted[mark] = run
        node = self._node(run.id, run.task)
        self._known.update({} if known else dict.fromkeys({run.root, run.group}, 1))
        node.runs += known is None  # the run may have ended since the active ones were read
        order = (run.start_ms or run.end_ms, run.end_ms)
        if order >= self._newest.get(run.id, order):
            self._newest[run.id] = order
            node.state, node.runtime_s, node.error = run.state, run.runtime_s, masked_text(run.error)
            node.started, node.ended = run.start_ms / 1000 or None, run.end_ms / 1000 or None
        return True

    def _add_message(self, message: Peeked) -> None:
        headers = _headers(message)
        task_id = bounded(message.task_id or headers.get("id"))
        node = self._node(task_id, bounded(headers.get("shadow") or headers.get("task")))
        if node.state not in {ACTIVE, states.SUCCESS, states.FAILURE}:
            node.state = message.state
        self._queues.add(message.queue)
        root, parent, group = (bounded(headers.get(name)) for name in ("root_id", "parent_id", "group"))
        self._relate(task_id, root="" if root == task_id else root, parent=parent, group=group)

    def _relate(self, task_id: str, *, root: str, parent: str, group: str) -> None:
        if group:
            self._groups[task_id] = group
        if parent:
            self._parents.setdefault(task_id, parent)
        for kind, id_ in (("family", root), ("family", group), ("task", root)):
            self._look_for(kind, id_)

    def _node(self, id_: str, task: str) -> Node:
        node = self.nodes.setdefault(id_, Node(id_))
        if not node.task or node.task == CHAIN:
            node.task = task or node.task
        if node.task in GROUPS:
            node.kind, node.task = "group", ""
        return node

    # -- what became of it -------------------------------------------------------------------------------------------

    @property
    def ids(self) -> set[str]:
        """The ids by which the workflow may stand in the index."""
        return self._families | self.nodes.keys()

    def newest_ms(self, wanted: Wanted) -> int | None:
        """When the newest run ended that leads to the workflow in the index; None while a run goes on."""
        if any(node.state == ACTIVE for node in self.nodes.values()):
            return None
        named = wanted.found_by()
        counted = self._counted.values()
        return max((r.end_ms for r in counted if not named or any(getattr(r, k) == v for k, v in named)), default=0)

    def workflow(self) -> Workflow:
        tree = _Tree(self.nodes, self._groups, self._followers, self._parents)
        tasks = [each for each in self.nodes.values() if each.kind == "task"]
        whole = Node("", kind="group", children=tree.roots)
        _conclude(whole)
        first = min(tasks, key=lambda each: each.started or math.inf, default=whole)
        state = _of_parts({each.state for each in tasks} - {NOT_RUN})
        goes_on = state in {ACTIVE, PENDING} or any(each.state in {ACTIVE, states.RETRY, *STATES} for each in tasks)
        return Workflow(
            id=first.id,
            name=first.task,
            roots=tree.roots,
            state="" if state == states.SUCCESS and not self.complete else state,
            tasks=len(tasks),
            done=sum(each.is_done for each in tasks),
            failed=sum(each.state in FAILED for each in tasks),
            started=whole.started,
            ended=None if goes_on else whole.ended,
            complete=self.complete,
            saw_all_that_waits=self.saw_all_that_waits,
        )


class _Tree:
    """The tree, with each node once, whatever its runs claim: nodes that follow each other in a circle become roots."""

    def __init__(
        self,
        nodes: dict[str, Node],
        groups: Mapping[str, str],
        followers: Mapping[str, Sequence[str]],
        parents: Mapping[str, str],
    ) -> None:
        self._nodes = nodes
        self._followers = followers
        self._said: dict[str, set[str]] = defaultdict(set)
        for id_, group in groups.items():
            self._said[group].add(id_)
        self._behind = {group: self._reached(group) for group in self._said}
        #: Bodies by group: a body says to be of its header's group.
        self._group = {id_: group for id_, group in groups.items() if id_ not in self._behind[group]}
        for group in self._group.values():
            node = nodes.setdefault(group, Node(group))
            node.kind, node.task = "group", ""
        self._next: dict[str, str] = {}
        self._before: dict[str, str] = {}
        self._earlier: dict[str, str] = {}
        self._link()
        self.roots = self._placed(parents)

    def _reached(self, group: str) -> set[str]:
        """The ids of what follows a group, and of what follows that."""
        found: set[str] = set()
        steps = [group]
        while steps:
            here = steps.pop()
            for id_ in (here, *self._said.get(here, ())):
                fresh = set(self._followers.get(id_, ())) - found
                found |= fresh
                steps += fresh
        return found

    def _link(self) -> None:
        by_group = sorted(self._followers, key=lambda id_: id_ in self._group)  # tasks first
        for id_ in by_group:
            before = self._group.get(id_, id_)
            for follower in self._followers[id_]:
                # A chain is named by its last task; it begins with its first one.
                self._join(before, self._head(follower) if before in self._said else follower)
                before = follower

    def _join(self, before: str, after: str) -> None:
        """Have a node follow another. The rest of a chain behind a chord follows the chord's body."""
        if after in self._before or self._head(before) == after:
            return
        following = self._next.get(before)
        if following is not None:
            if before not in self._said:
                return
            last = after
            while last in self._next:
                last = self._next[last]
            self._next[last], self._before[following] = following, last
        self._next[before], self._before[after] = after, before
        self._earlier[after] = before

    def _head(self, id_: str) -> str:
        """The first node of a chain. Nodes passed on the way are linked to it directly, as chains may be long."""
        passed = []
        while id_ in self._earlier:
            passed.append(id_)
            id_ = self._earlier[id_]
        self._earlier |= dict.fromkeys(passed, id_)
        return id_

    def _placed(self, parents: Mapping[str, str]) -> list[Node]:
        above: dict[str, str] = {}
        tops: dict[str, Node] = {}
        for head in [id_ for id_ in self._nodes if id_ not in self._before]:
            line = [head]
            while (following := self._next.get(line[-1])) is not None:
                line.append(following)
            parts = [self._nodes[id_] for id_ in line]
            tops[head] = parts[0] if len(parts) == 1 else Node(head, kind="chain", children=parts)
            inside = next((self._group[id_] for id_ in line if id_ in self._group), "")
            members = [id_ for id_ in self._said[head] if self._group.get(id_) == head and id_ not in self._before]
            above[head] = inside or next((parents[id_] for id_ in (head, *members) if id_ in parents), "")
        roots: list[Node] = []
        places: dict[str, tuple[int, str] | None] = {}
        for head, top in tops.items():
            _, id_ = self._place(above, head, places) or (0, "")
            (self._nodes[id_].children if id_ else roots).append(top)
        for node in self._nodes.values():
            node.children.sort(key=_order)
        return sorted(roots, key=_order)

    def _place(
        self, above: Mapping[str, str], head: str, places: dict[str, tuple[int, str] | None]
    ) -> tuple[int, str] | None:
        """A chain's level and the node it is drawn below; None in a circle. ``places``: those found before."""
        lines: list[str] = []
        while head not in places and above.get(head, "") in self._nodes:
            places[head] = None
            lines.append(head)
            head = self._head(above[head])
        found = places.setdefault(head, (0, ""))
        for each in reversed(lines):
            if found is not None:
                level, id_ = found
                found = level + 1, above[each] if level < MOST_DEPTH else id_
            places[each] = found
        return found


def _order(node: Node) -> float:
    """The key that sorts nodes by their starts; those that have not begun come last."""
    begun = [each.started for each in node.below() if each.started is not None]
    return min(begun, default=math.inf)


def _conclude(whole: Node) -> None:
    """Set states and times of groups and chains from their parts, and mark tasks that will not run any more."""
    for node in reversed(whole.below()):
        if node.kind == "chain":
            has_failed = False
            for part in node.children:
                if has_failed and part.state == PENDING:
                    part.state = NOT_RUN
                has_failed = has_failed or part.state in FAILED
        if node.kind != "task":
            node.state = _of_parts({each.state for each in node.children} - {NOT_RUN})
            spans = [each for part in node.children for each in part.below()]
            node.started = min((each.started for each in spans if each.started), default=None)
            node.ended = max((each.ended for each in spans if each.ended), default=None)


def _of_parts(found: set[str]) -> str:
    if found & FAILED:
        return str(states.FAILURE)
    if found and found <= DONE:
        return str(states.SUCCESS)
    return PENDING if found <= {PENDING} else ACTIVE


def _headers(message: Peeked) -> dict[str, Any]:
    try:
        return open_payload(message.payload).headers
    except FormatError:
        return {}
