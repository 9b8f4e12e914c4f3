"""``doctor``: check this machine's set-up."""

from __future__ import annotations

import os

from celery_fdb.cli.terminal import NOT_DONE, Answer, Run, command, table
from kombu_fdb.doctor import examine

__all__ = ["doctor"]


@command()
def doctor(run: Run) -> Answer:
    """Check versions, options, files, cluster and clock, and name the next step for every problem."""
    url, options = run.where.resolve()
    findings = list(examine(url, options, dict(os.environ)))
    rows = [(each.level, each.what, each.found, each.fix) for each in findings]
    failed = any(each.level == "fail" for each in findings)
    document = [each._asdict() for each in findings]
    return Answer(document, [table("level what found fix", rows)], NOT_DONE if failed else 0)
