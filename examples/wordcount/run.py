"""Index a folder of poems with a real Celery worker, and check that everything happened exactly as it should.

    python examples/wordcount/run.py                   # a file: fdb+sqlite://
    python examples/wordcount/run.py --store fdb       # a single-node FoundationDB cluster, started for this run
    python examples/wordcount/run.py --broker URL      # any broker, for comparison

Exit code 0 if all checks hold, 1 if one does not, 2 if the job could not be run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).parent
DEADLINE_S = 55.0
ETA_S = 5.0
ALONE = ("tasks.add_up", "tasks.look_up_errata", "tasks.send_report", "tasks.scan_archive")

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


class CannotRun(Exception):
    """The job could not be run at all; the text says why and what to do."""


@dataclass(frozen=True)
class Job:
    """Where it runs, and what was sent."""

    home: Path
    worker: subprocess.Popen[bytes]
    result: Any
    messages: int

    @property
    def log(self) -> Path:
        return self.home / "worker.log"


def main() -> int:
    arguments = _arguments()
    try:
        with _home(keep=arguments.keep) as home, _broker(arguments, home) as url:
            return _run(home, url)
    except CannotRun as error:
        console.print(f"[bold red]could not run:[/] {escape(str(error))}")
        return 2


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=("sqlite", "fdb"), default="sqlite", help="where messages are kept")
    parser.add_argument("--broker", metavar="URL", help="use this broker instead; it should be empty")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the journal and the worker's log")
    return parser.parse_args()


@contextmanager
def _home(*, keep: bool) -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="celery-fdb-demo-"))
    try:
        yield home
    finally:
        if keep:
            console.print(f"kept: {home}")
        else:
            shutil.rmtree(home, ignore_errors=True)


@contextmanager
def _broker(arguments: argparse.Namespace, home: Path) -> Iterator[str]:
    if arguments.broker:
        yield arguments.broker
    elif arguments.store == "sqlite":
        yield f"fdb+sqlite:///{home}/broker.db"
    else:
        from kombu_fdb.testing.fdbserver import SingleNodeCluster, fdb_unavailable_reason

        reason = fdb_unavailable_reason()
        if reason:
            raise CannotRun(f"{reason}\nInstall FoundationDB's server and client packages, or use --store sqlite.")
        console.print("starting a FoundationDB node ...")
        with SingleNodeCluster() as cluster:
            yield f"fdb:///{cluster.cluster_file}"


def _run(home: Path, url: str) -> int:
    os.environ.update(WORDCOUNT_HOME=str(home), WORDCOUNT_BROKER=url)
    import tasks  # reads the environment; the worker imports it the same way
    import verdict

    texts = sorted(path.name for path in tasks.TEXTS.glob("*.txt"))
    expected = {name: Counter(tasks.words_of((tasks.TEXTS / name).read_text())) for name in texts}
    console.print(f"[bold]broker[/]  {_check_broker(tasks.app)}")
    console.print(f"[bold]results[/] {tasks.app.backend.as_uri()}")
    console.print(f"[bold]work[/]    {len(texts)} texts: a chord of chains fetch | parse | count, and three hard cases")
    with _worker(home) as worker:
        job = Job(home, worker, *_send(tasks, texts))
        done = _watch(job)
        total = _total(job) if done else None
    left = _left(tasks.app, url)
    outcome = verdict.Outcome(_journal(home), expected, total, left)
    return _report(outcome, verdict.judge(outcome), job, finished=done)


def _check_broker(app: Any) -> str:
    """Its address, if it answers. Asked before a worker is started, which would wait for it."""
    from kombu.exceptions import OperationalError

    try:
        with app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, timeout=5)
            return str(connection.as_uri())
    except (OperationalError, ValueError, KeyError, ImportError) as error:
        raise CannotRun(str(error)) from error


def _send(tasks: Any, texts: list[str]) -> tuple[Any, int]:
    """Everything at once; the worker may still be starting."""
    from celery import chord

    chains = [tasks.fetch.s(name) | tasks.parse.s() | tasks.count.s() for name in texts]
    tasks.scan_archive.delay()
    tasks.look_up_errata.delay()
    tasks.send_report.apply_async(eta=datetime.now(UTC) + timedelta(seconds=ETA_S))
    result = chord(chains)(tasks.add_up.s())
    return result, len(texts) * 3 + len(ALONE)


@contextmanager
def _worker(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``celery worker``, as anybody would start it; SIGTERM at the end, so that it shuts down warmly."""
    command = [sys.executable, "-m", "celery", "-A", "tasks", "worker", "--pool=prefork", "--concurrency=2"]
    with (home / "worker.log").open("wb") as log:
        worker = subprocess.Popen([*command, "--loglevel=INFO"], cwd=HERE, stdout=log, stderr=subprocess.STDOUT)
        console.print(f"[bold]worker[/]  celery -A tasks worker --pool=prefork --concurrency=2   (pid {worker.pid})")
        try:
            yield worker
        finally:
            worker.send_signal(signal.SIGTERM)
            try:
                worker.wait(timeout=15)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()


def _journal(home: Path) -> Any:
    from journal import Journal

    return Journal.read(home / "journal")


def _finished(home: Path) -> int:
    named = _journal(home).tasks.values()
    return sum(task.finished for task in named if not task.name.startswith("celery."))


def _watch(job: Job) -> bool:
    """Show progress until all tasks have finished, the worker dies or the time is up."""
    columns = (
        TextColumn("[bold]tasks[/]  "),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    deadline = time.monotonic() + DEADLINE_S
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=job.messages)
        shown = -1
        while time.monotonic() < deadline and job.worker.poll() is None:
            finished = _finished(job.home)
            progress.update(bar, completed=finished, description=_doing(job.home))
            if not console.is_terminal and (finished // 20 != shown // 20 or finished == job.messages):
                console.print(f"[bold]tasks[/]   {finished:3} of {job.messages} finished   {_doing(job.home)}")
                shown = finished
            if finished >= job.messages:
                return True
            time.sleep(0.1)
    if job.worker.poll() is not None:
        console.print(f"[bold red]the worker ended by itself with code {job.worker.returncode}[/]")
    return False


def _doing(home: Path) -> str:
    """What is worth waiting for, in words."""
    journal = _journal(home)
    if not journal.worker_ready:
        return "worker is starting"
    alone = {name: tasks[0] for name in ALONE if (tasks := journal.named(name))}
    notes = []
    if (errata := alone.get("tasks.look_up_errata")) and not errata.finished:
        notes.append(f"errata: attempt {len(errata.started) or 1}")
    if (report := alone.get("tasks.send_report")) and not report.started:
        notes.append(f"report: due in {max(report.due[0] - time.time(), 0):.0f} s")
    if (scan := alone.get("tasks.scan_archive")) and not scan.finished:
        notes.append("archive: killed" if len(scan.started) == 1 else "archive: running again")
    return ", ".join(notes)


def _total(job: Job) -> dict[str, int] | None:
    try:
        return job.result.get(timeout=5, disable_sync_subtasks=False)
    except Exception as error:  # noqa: BLE001 - whatever it is, the verdict has to come
        console.print(f"[red]the chord failed: {escape(repr(error))}[/]")
        return None


def _left(app: Any, url: str) -> dict[str, int]:
    """Messages still in the broker, after the worker is gone."""
    if url.startswith("fdb"):
        return _left_in_store(url)
    queue = app.conf.task_default_queue
    with app.connection_for_read() as connection:
        ready = app.amqp.queues[queue].bind(connection.default_channel).queue_declare().message_count
    return {f"ready in {queue}": ready}


def _left_in_store(url: str) -> dict[str, int]:
    """Those of every queue and in every state, also where a Celery client can't look."""
    from kombu_fdb.process.connect import open_store
    from kombu_fdb.settings.location import locate, parse_url
    from kombu_fdb.settings.options import parse_options

    options = parse_options()
    store = open_store(locate(parse_url(url), options), options, timeout_s=10)
    with closing(store.database):
        queues = store.engine.inspect.queues()
    return {
        f"{state} in {queue}": getattr(counts, state)
        for queue, counts in queues.items()
        for state in ("ready", "delayed", "leased")
    }


def _report(outcome: Any, checks: list[Any], job: Job, *, finished: bool) -> int:
    console.print()
    console.print(_table(outcome.journal))
    console.print()
    for check in checks:
        mark = "[green]ok  [/]" if check.holds else "[bold red]FAIL[/]"
        console.print(f" {mark} {check.claim}: {check.found}")
    good = finished and all(check.holds for check in checks)
    if good:
        console.print("[bold green]verdict: everything ran exactly as often as it should have, nothing is left.[/]")
        return 0
    console.print(
        f"[bold red]verdict: FAILED{'' if finished else ', not all tasks finished'}.[/] The worker's last lines:"
    )
    console.print("\n".join(job.log.read_text(errors="replace").splitlines()[-30:]), markup=False)
    return 1


def _table(journal: Any) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold underline")
    for name, justify in (
        ("task", "left"),
        ("sent", "right"),
        ("runs", "right"),
        ("started", "right"),
        ("waited", "right"),
        ("retries", "right"),
        ("outcome", "left"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)
    begin = min((at for task in journal.tasks.values() for at in task.sent), default=0.0)
    for name in dict.fromkeys(task.name for task in journal.tasks.values()):
        table.add_row(*_row(name, journal.named(name), begin))
    return table


def _row(name: str, tasks: list[Any], begin: float) -> Iterator[str]:
    starts = sorted(task.started[0] - begin for task in tasks if task.started)
    waits = [task.waited for task in tasks if task.waited is not None]
    yield name.rpartition(".")[2]
    yield str(len(tasks))
    yield str(sum(len(task.started) for task in tasks))
    yield "" if not starts else f"{starts[0]:.1f} s" if len(starts) == 1 else f"{starts[0]:.1f}..{starts[-1]:.1f} s"
    yield f"{median(waits):.2f} s" if waits else ""
    yield str(sum(task.ended.count("RETRY") for task in tasks) or "")
    yield _outcome(tasks)


def _outcome(tasks: list[Any]) -> str:
    states = Counter(task.ended[-1] if task.ended else "never ended" for task in tasks)
    killed = sum(len(task.started) - len(task.ended) for task in tasks)
    words = [state.lower() if number == len(tasks) else f"{number} {state.lower()}" for state, number in states.items()]
    return ", ".join(words) + (f" ({killed} killed)" if killed > 0 else "")


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.exit(main())
