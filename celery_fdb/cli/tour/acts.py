"""What happens to the shop: it is open, flooded, loses a worker, loses its payment service, and is whole.

Everything is real: two Celery workers with two processes each, the dashboard, and one file as broker, or a FoundationDB
node.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from celery_fdb.cli.tour.processes import Processes, wait
from celery_fdb.cli.tour.verdict import Entry, Outcome, entries
from kombu_fdb import Broker

PHOTOS = 1_500
ORDERS = 12
SHELVES = 8
QUEUE = "shop"


class Tour:
    """What was sent, and what is at hand."""

    def __init__(self, console: Console, pause: Callable[[Tour, str], None]) -> None:
        """``pause``: called with the page of the dashboard that is worth a look now."""
        self.console = console
        self.shop: Any
        self.broker: Broker
        self.processes: Processes
        #: The dashboard's.
        self.address = ""
        #: The id of the newest order's first task.
        self.payment = ""
        self._pause = pause
        #: What the journal is to say in the end.
        self._sent: list[str] = []
        self._orders = 0

    def run(self, home: Path, url: str, port: int) -> Outcome:
        """All acts, on that broker, which is empty. Raises ``Refused``."""
        os.environ.update(TOUR_HOME=str(home), TOUR_BROKER=url)
        from celery_fdb.cli.tour import shop  # reads the environment; the workers import it the same way

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
        """Time for the dashboard."""
        self._say(f"[cyan]{self.address}{page}[/]  {why}")
        self._pause(self, page)

    def _buy(self) -> list[str]:
        """Some customers buy something; what the journal will say of it."""
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
        """How often a stocktaking was."""
        return sum(each.what.startswith("begin") for each in self._journal())

    def _wait_for(self, what: str, sent: Sequence[str]) -> float:
        """Until each of these ran; how many seconds after it was sent the last did."""

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
        now_s = time.time()
        for photo in range(PHOTOS):
            self.shop.resize.delay("acme", photo, now_s)
        photos = [f"resize {photo}" for photo in range(PHOTOS)]
        self._sent += photos
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
        """The process group of the worker that was killed, and what the chord came to."""
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

    def _closing_time(self, killed: int, counted: object) -> Outcome:
        self._act(5, "Closing time")
        self._wait_for("the photos", self._sent)
        wait("an empty store", self._is_empty)
        articles = sum(map(self.shop.articles, range(SHELVES)))
        outcome = Outcome(self._sent, self._journal(), killed, articles, counted)
        headings = ("task", "sent", "ended once", "more than once", "median wait, s")
        table = Table(*headings, box=None, padding=(0, 2, 0, 3))
        for row in outcome.rows():
            table.add_row(*row)
        self.console.print(table)
        for check in outcome.checks():
            mark = "[green]ok  [/]" if check.holds else "[bold red]FAIL[/]"
            self._say(f"{mark} {check.claim}: {check.found}")
        self._look("/tasks", "shows how often each task ran, how long, and how often in vain.")
        return outcome

    def _is_empty(self) -> bool:
        counts = self.broker.queues()[QUEUE]
        dead = self.broker.queue(QUEUE).dead_letters.count().total()
        return not counts.ready + counts.delayed + counts.leased + dead
