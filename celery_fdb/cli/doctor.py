"""``doctor``: check this machine's set-up, and the history of the broker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from celery_fdb.cli.terminal import Answer, Invocation, command, table
from celery_fdb.history.views.runs import HistoryOff, history_of
from kombu_fdb import Broker
from kombu_fdb.doctor import Finding, examine
from kombu_fdb.errors import KombuFDBError
from kombu_fdb.primitives.plural import plural
from kombu_fdb.transport.worker import without_effect


@command()
def doctor(invocation: Invocation) -> Answer:
    """Check versions, options, files, cluster and clock, and name the next step for every problem."""
    url, options = invocation.resolve()
    findings = [*examine(url, options, dict(os.environ)), *_tasks(invocation.app_of_broker)]
    failed = any(each.level == "fail" for each in findings)
    if not failed:
        with suppress(KombuFDBError):  # the store has just answered; this is no failure of the set-up
            findings.append(check_history(invocation.made()))
    rows = [(each.level, each.what, each.found, each.fix) for each in findings]
    document = [each._asdict() for each in findings]
    return Answer(document, [table("level what found fix", rows)], ok=not failed)


def _tasks(app: Any) -> Iterator[Finding]:
    """The warnings that a worker of the app would log when it starts."""
    if app is None:
        return
    try:
        found = without_effect(app, load=True)
    except Exception as error:  # noqa: BLE001 - whatever a module of the user's raises
        yield Finding("fail", "tasks", f"{error!r:.200}", "The app's tasks can't be imported: no worker of it starts.")
        return
    if found:
        fix = "Call celery_fdb.install(app) right after Celery(...)."
        yield Finding("warn", "tasks", f"options of celery-fdb without effect: {', '.join(found)}", fix)


def check_history(broker: Broker) -> Finding:
    """Whether a history is kept, how much there is, and whether runs had to be dropped. Raises a ``StoreError``."""
    history = history_of(broker)
    settings = history.settings()
    if settings is None:
        return Finding("ok", "history", f"{HistoryOff.text}; workers do with celery_fdb.install(app, history=True)")
    dropped = history.dropped()
    kept = plural(history.kept(), "run")
    found = f"{kept} of at most {settings.get('runs')}; {plural(dropped, 'run')} dropped so far"
    if not dropped:
        return Finding("ok", "history", found)
    fix = "The store did not answer in time. Watch celery_fdb_history_dropped_total: does the number grow?"
    return Finding("warn", "history", found, fix)
