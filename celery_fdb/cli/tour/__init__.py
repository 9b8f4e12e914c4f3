"""``tour``: a shop that is open, flooded, loses a worker, loses its payment service, and is whole; with a verdict.

Everything is real: two Celery workers with two processes each, the dashboard, and one file as broker, or a FoundationDB
node. The shop (``shop.py``) is an ordinary Celery application.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self

import click
from rich.console import Console
from rich.prompt import Prompt
from rich.table import Table

from celery_fdb.cli.terminal import Answer, Invocation, Refused, command
from kombu_fdb import Broker

# -- processes ---------------------------------------------------------------------------------------------------------


DEADLINE_S = 120.0
#: A guard between the tour and a process: the process ends with the tour, even if the tour is killed.
GUARD = '"$@" </dev/null & read _; kill $!; wait'
#: Removes the tour's folder when the last process that holds its pipe has ended, however that was.
SWEEPER = 'cat; rm -rf "$1"'


def wait(what: str, condition: Callable[[], Any], log: Path | None = None) -> Any:
    """Wait until the call returns something true. Returns that. Raises ``Refused``."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        if time.monotonic() > deadline:
            last = None if log is None else " | ".join(log.read_text(errors="replace").splitlines()[-15:])
            raise Refused("waited in vain", tour=what, seconds=DEADLINE_S, log=last)
        time.sleep(0.05)
    return value


class Processes:
    """The processes of the tour; the end of the ``with`` block ends them, and removes their folder."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        ends, self._held = os.pipe()
        command = ["sh", "-c", SWEEPER, "sweeper", str(self._home)]
        self._sweeper = subprocess.Popen(command, stdin=ends, start_new_session=True)
        os.close(ends)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in self._running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                self._kill(process)
        os.close(self._held)
        self._sweeper.wait()

    def worker(self, name: str) -> None:
        """Start a worker with two processes for tasks. Returns when it is ready."""
        log = self._start(name, "worker", "--concurrency=2", "--loglevel=INFO", f"--hostname={name}@shop")
        wait(f"worker {name}", lambda: " ready." in log.read_text(errors="replace"), log)

    def dashboard(self, port: int) -> str:
        """Start the dashboard. Returns its address."""
        log = self._start("web", "fdb", "web", "--write", "--port", str(port))
        found = wait("the dashboard", lambda: re.search(r"http://[\d.]+:\d+", log.read_text(errors="replace")), log)
        return str(found[0])

    def kill(self, name: str) -> int:
        """Kill a worker, as the kernel does when memory is short. Returns the id of its process group."""
        process = self._running.pop(name)
        self._kill(process)
        return process.pid

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        with process:  # this closes the process's pipe, and waits
            os.killpg(process.pid, signal.SIGKILL)

    def _start(self, name: str, *command: str) -> Path:
        log = self._home / f"{name}.log"
        celery = ("sh", "-c", GUARD, "guard", sys.executable, "-m", "celery", "-A", "celery_fdb.cli.tour.shop")
        environ = {**os.environ, "TMPDIR": str(self._home)}  # what a killed process leaves goes with it
        with log.open("wb") as output:
            self._running[name] = subprocess.Popen(
                [*celery, *command],
                cwd=self._home,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(self._held,),
            )
        return log


# -- the verdict -------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A line of the journal."""

    what: str
    #: Seconds after it was sent, or after its ETA.
    waited_s: float
    #: The process group of the task's worker.
    worker: int


def entries(journal: str) -> list[Entry]:
    lines = (line.split("\t") for line in journal.splitlines())
    return [Entry(what, float(waited_s), int(worker)) for what, waited_s, worker in lines]


def lost(sent: Iterable[str], ran: Iterable[Entry]) -> int:
    return len(set(sent) - {each.what for each in ran})


def rows(sent: Sequence[str], ran: Sequence[Entry]) -> Iterator[tuple[str, str, str, str, str]]:
    """By task: how many were sent, ended once and more than once, and their median time in seconds."""
    ends = Counter(each.what for each in ran)
    for task in dict.fromkeys(each.split()[0] for each in sent):
        mine = [ends[each] for each in sent if each.split()[0] == task]
        waited = [each.waited_s for each in ran if each.what.split()[0] == task]
        often = sum(each > 1 for each in mine)
        yield task, f"{len(mine):,}", f"{mine.count(1):,}", f"{often:,}", f"{median(waited or [0]):.2f}"


def verdict(
    sent: Sequence[str], ran: Sequence[Entry], *, killed: int, articles: int, counted: object
) -> list[dict[str, Any]]:
    """Judge by all there is: what was sent, what ran, the worker that was killed, and the chord's result.

    Returns each claim, whether it ``holds``, and what was ``found``.
    """
    whole = "all that was sent has run", not lost(sent, ran), f"{len(sent):,} sent, {lost(sent, ran)} lost"
    chord = (
        "the chord ran once, with all results",
        counted == articles and sum(each.what == "inventory 0" for each in ran) == 1,
        f"{counted} articles",
    )
    late = [each.waited_s for each in ran if each.what.startswith("survey ")]
    first_s = min(late, default=-1)
    surveys = "nothing ran before its ETA", first_s >= 0, f"the first survey {first_s:.2f} s after it"
    judged = (whole, _twice(sent, ran, killed), chord, _retries(ran), surveys)
    return [dict(zip(("claim", "holds", "found"), each, strict=True)) for each in judged]


def _twice(sent: Iterable[str], ran: Sequence[Entry], killed: int) -> tuple[str, bool, str]:
    """A worker may be killed between a task's end and its ack: such a task runs again, and no other does."""
    ends = Counter(each.what for each in ran)
    at_killed = {each.what for each in ran if each.worker == killed}
    wrong = sorted(what for what in set(sent) - at_killed if ends[what] > 1)
    again = sum(number - 1 for what, number in ends.items() if what.startswith("begin "))
    found = _listed(wrong) or f"{again} stocktakings were begun again"
    return "only what a killed process had begun ran again", not wrong and again > 0, found


def _retries(ran: Iterable[Entry]) -> tuple[str, bool, str]:
    tries: dict[str, list[float]] = {}
    for each in ran:
        if each.what.startswith("try "):
            tries.setdefault(each.what, []).append(each.waited_s)
    wrong = [what for what, (first, *later) in tries.items() if not _apart(first, later)]
    found = _listed(wrong) or f"{len(tries)} payments"
    return "what failed was tried again after 1 s and 2 s", bool(tries) and not wrong, found


def _apart(first_s: float, later_s: Sequence[float]) -> bool:
    return len(later_s) >= 2 and later_s[0] - first_s >= 1 and later_s[1] - later_s[0] >= 2


def _listed(wrong: Iterable[str]) -> str:
    return f"wrong: {', '.join(wrong)}" if wrong else ""


# -- acts --------------------------------------------------------------------------------------------------------------


PHOTOS = 1_500
ORDERS = 12
SHELVES = 8
QUEUE = "shop"


class Tour:
    """One tour: its processes, its broker, and what was sent."""

    def __init__(self, console: Console, pause: Callable[[Tour, str], None]) -> None:
        """``pause``: called with the page of the dashboard that is worth a look now."""
        self.console = console
        self.shop: Any
        self.broker: Broker
        self.processes: Processes
        #: The dashboard's address.
        self.address = ""
        #: The id of the newest order's first task.
        self.payment = ""
        self._pause = pause
        #: The lines that the journal has to have in the end.
        self._sent: list[str] = []
        self._orders = 0

    def run(self, home: Path, url: str, port: int) -> tuple[list[dict[str, Any]], str]:
        """Play all acts, on a broker that is empty. Returns the verdict, and its sum. Raises ``Refused``."""
        os.environ.update(TOUR_HOME=str(home), TOUR_BROKER=url)
        from celery_fdb.cli.tour import shop  # the module reads the environment, also in the workers

        self.shop = shop
        with ExitStack() as stack:
            self.console.print(f"[bold]broker[/] {url}")
            self.processes = stack.enter_context(Processes(home))
            for name in ("north", "south"):
                self.processes.worker(name)
            self.address = self.processes.dashboard(port)
            self.console.print(f"[bold]dashboard[/] [cyan]{self.address}[/]")
            self.broker = stack.enter_context(Broker.open(url))
            self._opening()
            self._flood()
            killed, counted = self._killing()
            self._outage()
            return self._closing_time(killed, counted)

    def _act(self, number: int, title: str) -> None:
        self.console.print(f"\n[bold]{number}. {title}[/]")

    def _say(self, text: str) -> None:
        self.console.print(f"   {text}", soft_wrap=True)

    def _look(self, page: str, why: str) -> None:
        """Leave time for a look at the dashboard."""
        self._say(f"[cyan]{self.address}{page}[/]  {why}")
        self._pause(self, page)

    def _buy(self) -> list[str]:
        """Let some customers buy something. Returns the lines that the journal will have of it."""
        sent = []
        for _ in range(ORDERS):
            self.payment, ends = self.shop.order(self._orders)
            sent += ends
            self._orders += 1
        self._sent += sent
        return sent

    def _journal(self) -> list[Entry]:
        return entries(self.shop.JOURNAL.read_text() if self.shop.JOURNAL.exists() else "")

    def _begun(self) -> int:
        """How often a stocktaking was begun."""
        return sum(each.what.startswith("begin") for each in self._journal())

    def _wait_for(self, what: str, sent: Sequence[str]) -> float:
        """Wait until each of these ran. Returns how many seconds after it was sent the last one ran."""

        def waited_s() -> float | None:
            done = {each.what: each.waited_s for each in self._journal()}
            return max(done[each] for each in sent) if set(sent) <= done.keys() else None

        return float(wait(what, waited_s))

    def _opening(self) -> None:
        self._act(1, "The shop is open")
        waited_s = self._wait_for("the first orders", self._buy())
        self._say(
            f"{ORDERS} orders: each is paid, then packed while a mail is sent, and a survey follows "
            f"{self.shop.SURVEY_S} s later. The last was done {waited_s:.1f} s after it was due."
        )
        self._look("/workflows", "shows each order as a tree.")

    def _flood(self) -> None:
        self._act(2, "One customer floods it")
        self._sent += self.shop.upload("acme", PHOTOS)
        self._say(f"acme has uploaded {PHOTOS:,} photos. Now the other customers buy something.")
        sent = set(self._buy())
        self._look(f"/keys?queue={QUEUE}", "shows the customers' backlogs, limits and weights.")
        orders = {each for each in sent if not each.startswith("survey")}
        waited_s = self._wait_for("the orders beside the flood", sorted(orders))
        ran = [each.what for each in self._journal()]
        last = max(ran.index(each) for each in orders)
        left = PHOTOS - sum(what.startswith("resize") for what in ran[:last])
        self._say(
            f"Their orders were done after {waited_s:.1f} s, with {left:,} photos still waiting: each customer has a "
            "turn in each round."
        )

    def _killing(self) -> tuple[int, object]:
        """Kill a worker. Returns its process group, and the chord's result."""
        self._act(3, "A worker is killed")
        result, sent = self.shop.count_shelves(SHELVES)
        self._sent += sent
        wait("stocktakings under way", lambda: self.shop.KILLED.exists() and self._begun() > 2)
        killed = self.processes.kill("north")
        self._say(
            f"A chord counts {SHELVES} shelves. The process of the first one was killed, as when memory is short."
        )
        self._say("Now kill -9: worker north is gone, with shelves half counted and others in its hand.")
        self._look("/sessions", "shows its heartbeat getting old. After session_ttl, here 4 s, south takes over.")
        waited_s = self._wait_for("the stocktaking", sent)
        wait("the chord's result", result.ready)
        self._say(f"All shelves are counted, the last one after {waited_s:.1f} s.")
        self.processes.worker("north")
        return killed, result.get(propagate=False)

    def _outage(self) -> None:
        self._act(4, "The payment service breaks")
        self.shop.OUT_OF_ORDER.touch()
        sent = self._buy()
        letters = self.broker.queue(QUEUE).dead_letters
        wait("the dead letters", lambda: letters.count().total() == ORDERS)
        self._say(f"Each payment was retried twice, after 1 s and 2 s. Now {ORDERS} of them are dead letters.")
        why = "groups them by task and error, and can replay them. Leave them, or do it once it works again."
        self._look(f"/dead?queue={QUEUE}.dead", why)
        self.shop.OUT_OF_ORDER.unlink()
        replayed = letters.replay()
        self._say(f"The service works again: {replayed} replayed, each with what its workflow still has to do.")
        self._wait_for("the replayed orders", sent)

    def _closing_time(self, killed: int, counted: object) -> tuple[list[dict[str, Any]], str]:
        self._act(5, "Closing time")
        self._wait_for("the photos", self._sent)
        wait("an empty store", self._is_empty)
        ran, articles = self._journal(), sum(map(self.shop.articles, range(SHELVES)))
        headings = ("task", "sent", "ended once", "more than once", "median wait, s")
        table = Table(*headings, box=None, padding=(0, 2, 0, 3))
        for row in rows(self._sent, ran):
            table.add_row(*row)
        self.console.print(table)
        checks = verdict(self._sent, ran, killed=killed, articles=articles, counted=counted)
        for check in checks:
            mark = "[green]ok  [/]" if check["holds"] else "[bold red]FAIL[/]"
            self._say(f"{mark} {check['claim']}: {check['found']}")
        self._look("/tasks", "shows how often each task ran, how long, and how often in vain.")
        return checks, f"{len(self._sent):,} sent, {lost(self._sent, ran)} lost."

    def _is_empty(self) -> bool:
        counts = self.broker.queues()[QUEUE]
        dead = self.broker.queue(QUEUE).dead_letters.count().total()
        return not counts.ready + counts.delayed + counts.leased + dead


# -- the command -------------------------------------------------------------------------------------------------------


@command()
@click.option("--store", type=click.Choice(["sqlite", "fdb"]), default="sqlite", help="fdb starts a FoundationDB node.")
@click.option("--port", type=click.IntRange(0, 65_535), default=0, help="The dashboard's. By default a free one.")
@click.option("--go-on", is_flag=True, help="Stop nowhere, as without a terminal.")
def tour(invocation: Invocation, store: str, port: int, *, go_on: bool) -> Answer:
    """Show a shop with two workers on a broker of its own: a flood, a killed worker, an outage; ends with a verdict."""
    try:
        import celery_fdb.cli.connections
        import celery_fdb.web  # noqa: F401 - told now, and not by the process of the dashboard
    except ImportError as error:
        raise Refused(
            "the tour shows the dashboard, whose libraries are not installed",
            missing=error.name,
            fix="Run: pip install 'celery-fdb[web]'",
        ) from error
    stops = sys.stdin.isatty() and sys.stdout.isatty() and not (go_on or invocation.as_json)
    # As in other commands, but with markup: all text is the tour's own.
    console = Console(
        highlight=False,
        quiet=invocation.as_json,
        no_color=invocation.no_color or None,
        width=None if stops else 110,
    )

    def pause(_: Tour, __: str) -> None:
        if stops:
            Prompt.ask("   [dim]Enter goes on[/]", default="", show_default=False, console=console)

    with tempfile.TemporaryDirectory(prefix="celery-fdb-tour-") as home, broker(store, Path(home)) as url:
        checks, shown = Tour(console, pause).run(Path(home), url, port)
    holds = all(check["holds"] for check in checks)
    return Answer(checks, [f"\n{shown}" + ("" if holds else " The verdict: FAILED.")], ok=holds)


@contextmanager
def broker(store: str, home: Path) -> Iterator[str]:
    """The URL of a new broker. Raises ``Refused``."""
    if store == "sqlite":
        yield f"fdb+sqlite:///{home}/broker.db"
        return
    from kombu_fdb.testing.fdbserver import Cluster, fdb_unavailable_reason

    fix = "Install FoundationDB's server and client of one version, or leave out --store fdb."
    if (reason := fdb_unavailable_reason()) is not None:
        raise Refused("no FoundationDB node can be started", reason=reason, fix=fix)
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(Cluster())
        except RuntimeError as error:
            raise Refused("no FoundationDB node can be started", reason=str(error), fix=fix) from error
        yield f"fdb:///{cluster.cluster_file}"
