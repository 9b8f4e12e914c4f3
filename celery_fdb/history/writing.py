"""What a worker writes: groups of runs that have ended, those that are active, and runs whose worker died.

Every verb may happen twice. A group has a key of its own, and a process that writes it again, because the answer of a
commit was lost, looks first whether it stands there; so its runs are counted once.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from celery_fdb.history import counters, segments
from celery_fdb.history.groups import Group, decode, pack_groups
from celery_fdb.history.layout import INDEXES, GroupId, HistoryKeys
from celery_fdb.history.options import History
from celery_fdb.history.run import LOST, Run
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.tuples import pack_int, pack_text
from kombu_fdb.store.protocol import Transaction

#: Names of tasks of one group that are counted by name; names come from the code, but that is no promise.
MOST_TASKS, OTHER_TASKS = 100, "(other)"
#: Active runs of a dead worker that one transaction ends.
LOST_RUNS = 100


def write(tr: Transaction, keys: HistoryKeys, group_id: GroupId, group: Group, *, bounds: History, now_ms: int) -> bool:
    """Store a group, its index entries, and what it adds to the counters. Returns whether a segment was opened."""
    tr.fill()
    number, opened = segments.choose(tr, keys, bounds, now_ms)
    tr.set(keys.group(number, group_id), group.value)
    for kind in INDEXES:
        for name in {getattr(run, kind) for run in group.runs}:
            tr.set(keys.index(number, kind, name) + group_id.packed, b"")
    _index_runs(tr, keys, number, group_id, group.runs)
    tr.add(keys.segment_runs(number), len(group.runs))
    _count(tr, keys, group.runs, group_id.end_ms // 1000)
    return opened


def _index_runs(tr: Transaction, keys: HistoryKeys, number: int, group_id: GroupId, runs: Sequence[Run]) -> None:
    by_id, by_root, packed = keys.index_by(number, "id"), keys.index_by(number, "root"), group_id.packed
    for at, run in enumerate(runs):
        place = packed + pack_int(at)
        tr.set(by_id + pack_text(run.id) + place, b"")
        for id_ in {run.root, run.group} - {""}:
            tr.set(by_root + pack_text(id_) + place, b"")


def _count(tr: Transaction, keys: HistoryKeys, runs: Sequence[Run], end_s: int) -> None:
    by_task: Mapping[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_task[run.task if run.task in by_task or len(by_task) < MOST_TASKS else OTHER_TASKS].append(run)
    for task, its_runs in by_task.items():
        total, slot = counters.deltas_of(its_runs)
        tr.add(keys.total(task), total, width=counters.TOTAL_WIDTH)
        for length_s in counters.SLOTS:
            tr.add(keys.slot(length_s, end_s - end_s % length_s, task), slot, width=counters.SLOT_WIDTH)


# -- active runs -------------------------------------------------------------------------------------------------------


def begin(tr: Transaction, keys: HistoryKeys, session: bytes, active: Mapping[int, Run]) -> None:
    """These run now, by the numbers that the worker gave them."""
    for number, run in active.items():
        tr.set(keys.active(session, number), pack_groups([run])[0].value)


def end(tr: Transaction, keys: HistoryKeys, ended: Iterable[tuple[bytes, int]]) -> None:
    """These, by session and number, do so no more."""
    for session, number in ended:
        tr.clear(keys.active(session, number))


def lose(tr: Transaction, keys: HistoryKeys, session: bytes, now_ms: int) -> list[Run]:
    """Clear up to :data:`LOST_RUNS` active runs of a session that has ended. Returns them as what they are: lost."""
    found: list[Run] = []
    for key, value in tr.get_range(*keys.active_of(session), limit=LOST_RUNS):
        tr.clear(key)
        try:
            found += [run._replace(state=LOST, end_ms=now_ms) for run in decode(value)]
        except FormatError:
            continue
    return found


# -- the rest ----------------------------------------------------------------------------------------------------------


def set_settings(tr: Transaction, keys: HistoryKeys, bounds: History, now_ms: int) -> None:
    """A worker keeps a history, within these bounds."""
    tr.set(keys.settings, json.dumps({**asdict(bounds), "since_ms": now_ms}).encode())
