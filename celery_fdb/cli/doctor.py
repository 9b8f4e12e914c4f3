"""``doctor``: check this machine's set-up, and the history of the broker."""

from __future__ import annotations

import os
from collections.abc import Iterator

from celery_fdb.cli.terminal import NOT_DONE, Answer, Run, command, table
from celery_fdb.history.views.checks import check_history
from kombu_fdb.doctor import Finding, examine
from kombu_fdb.errors import KombuFDBError

__all__ = ["doctor"]


@command()
def doctor(run: Run) -> Answer:
    """Check versions, options, files, cluster and clock, and name the next step for every problem."""
    url, options = run.where.resolve()
    findings = list(examine(url, options, dict(os.environ)))
    failed = any(each.level == "fail" for each in findings)
    if not failed:
        findings += _history(run)
    rows = [(each.level, each.what, each.found, each.fix) for each in findings]
    document = [each._asdict() for each in findings]
    return Answer(document, [table("level what found fix", rows)], NOT_DONE if failed else 0)


def _history(run: Run) -> Iterator[Finding]:
    try:
        yield check_history(run.made())
    except KombuFDBError:  # the store has just answered; what it says of the history is no failure of the set-up
        return
