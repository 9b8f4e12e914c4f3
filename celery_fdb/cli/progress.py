"""Progress where a person can see it: on standard error, if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from celery_fdb.cli.terminal import Run


@contextmanager
def bar(run: Run, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """``total``: None if it is unknown. Gives a function that is told how many are done."""
    shape = (TimeElapsedColumn(),) if total is None else (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = run.as_json or not sys.stderr.isatty()
    with Progress(TextColumn("{task.description}"), *shape, console=run.errors, disable=hidden) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)
