"""``tour``: the acts, with a stop after each one where there is a terminal."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.prompt import Prompt

from celery_fdb.cli.terminal import DONE, NOT_DONE, Answer, Refused, Run, command
from celery_fdb.cli.tour.acts import Tour


@command()
@click.option("--store", type=click.Choice(["sqlite", "fdb"]), default="sqlite", help="fdb starts a FoundationDB node.")
@click.option("--port", type=click.IntRange(0, 65_535), default=0, help="The dashboard's. By default a free one.")
@click.option("--go-on", is_flag=True, help="Stop nowhere, as without a terminal.")
def tour(run: Run, store: str, port: int, *, go_on: bool) -> Answer:
    """Show a shop with two workers on a broker of its own: a flood, a killed worker, an outage; ends with a verdict."""
    try:
        import celery_fdb.web  # noqa: F401 - told now, and not by the process of the dashboard
    except ImportError as error:
        raise Refused(
            "the tour shows the dashboard, whose libraries are not installed",
            missing=error.name,
            fix="Run: pip install 'celery-fdb[web]'",
        ) from error
    stops = sys.stdin.isatty() and sys.stdout.isatty() and not (go_on or run.as_json)
    # As in other commands, but for the markup, which is all the tour's own.
    console = Console(
        highlight=False, quiet=run.as_json, no_color=run.where.no_color or None, width=None if stops else 110
    )

    def pause(_: Tour, __: str) -> None:
        if stops:
            Prompt.ask("   [dim]Enter goes on[/]", default="", show_default=False, console=console)

    with tempfile.TemporaryDirectory(prefix="celery-fdb-tour-") as home, broker(store, Path(home)) as url:
        outcome = Tour(console, pause).run(Path(home), url, port)
    checks = outcome.checks()
    holds = all(check.holds for check in checks)
    shown = f"{len(outcome.sent):,} sent, {outcome.lost} lost." + ("" if holds else " The verdict: FAILED.")
    return Answer([check._asdict() for check in checks], [f"\n{shown}"], DONE if holds else NOT_DONE)


@contextmanager
def broker(store: str, home: Path) -> Iterator[str]:
    """The URL of a new one. Raises ``Refused``."""
    if store == "sqlite":
        yield f"fdb+sqlite:///{home}/broker.db"
        return
    from kombu_fdb.testing.fdbserver import SingleNodeCluster, fdb_unavailable_reason

    fix = "Install FoundationDB's server and client, or leave out --store fdb."
    if (reason := fdb_unavailable_reason()) is not None:
        raise Refused("no FoundationDB node can be started", reason=reason, fix=fix)
    with SingleNodeCluster() as cluster:
        yield f"fdb:///{cluster.cluster_file}"
