"""A tour of celery-fdb in five acts: a shop is open, flooded, loses a worker, loses its payment service, and is whole.

    python examples/tour/run.py                      # stops after each act, for a look at the dashboard
    python examples/tour/run.py --go-on              # does not stop
    python examples/tour/run.py --pictures FOLDER    # does not stop, and takes the documentation's pictures

Everything is real: two Celery workers with two processes each, the dashboard, and one file as broker, or with
``--store fdb`` a FoundationDB node that is started for it. Exit code 0 if every task ran, 1 if not, 2 if the tour could
not be made.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from pictures import PHONE, Camera
from processes import Processes, TourFailed, wait
from rich.console import Console
from rich.prompt import Prompt
from rich.table import Table

from kombu_fdb import Broker

PHOTOS = 1_500
ORDERS = 12
SHELVES = 8
QUEUE = "shop"

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


class Tour:
    """What was sent, and what is at hand."""

    def __init__(
        self, shop: Any, broker: Broker, processes: Processes, camera: Camera, address: str, *, stops: bool
    ) -> None:
        self.shop = shop
        self.broker = broker
        self.processes = processes
        self.camera = camera
        self.address = address
        self._stops = stops
        #: What the journal is to say in the end.
        self.sent: list[str] = []
        #: The id of the newest order's first task.
        self.payment = ""
        self._orders = 0

    def act(self, number: int, title: str) -> None:
        console.print(f"\n[bold]{number}. {title}[/]")

    def look(self, page: str, why: str) -> None:
        """Time for the dashboard."""
        console.print(f"   [cyan]{self.address}{page}[/]  {why}")
        if self._stops:
            Prompt.ask("   [dim]Enter goes on[/]", default="", show_default=False)

    def buy(self, orders: int = ORDERS) -> list[str]:
        """Some customers buy something; what the journal will say of it."""
        sent = []
        for _ in range(orders):
            self.payment, entries = self.shop.order(self._orders)
            sent += entries
            self._orders += 1
        self.sent += sent
        return sent

    def journal(self) -> list[tuple[str, float]]:
        """What ran, and how many seconds after it was sent."""
        try:
            lines = self.shop.JOURNAL.read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(what, float(waited_s)) for what, _, waited_s in (line.partition("\t") for line in lines)]

    def begun(self) -> list[str]:
        """The stocktakings that were begun, each time."""
        return [what for what, _ in self.journal() if what.startswith("begin")]

    def wait_for(self, what: str, sent: Sequence[str]) -> dict[str, float]:
        """Until each of these ran; how many seconds after it was sent."""
        wanted = set(sent)
        return wait(what, lambda: done if wanted <= (done := dict(self.journal())).keys() else None)

    def replay(self) -> int:
        return self.broker.queue(QUEUE).dead_letters.replay()


def opening(tour: Tour) -> None:
    tour.act(1, "The shop is open")
    sent = tour.buy()
    done = tour.wait_for("the first orders", sent)
    console.print(
        f"   {ORDERS} orders: each is paid, then packed while a mail is sent. The last was done "
        f"{max(done[each] for each in sent):.1f} s after it was sent."
    )
    tour.camera.watch("/")
    tour.camera.take("dashboard-workflow", f"/workflow?id={tour.payment}", "shop.mail", dark=True, size=(1280, 480))
    tour.look("/workflows", "shows each order as a tree.")


def flood(tour: Tour) -> None:
    tour.act(2, "One customer floods it")
    now_s = time.time()
    for photo in range(PHOTOS):
        tour.shop.resize.delay("acme", photo, now_s)
        tour.sent.append(f"resize {photo}")
    console.print(f"   acme has uploaded {PHOTOS:,} photos. Now the other customers buy something.")
    sent = tour.buy()
    tour.camera.take("dashboard-keys", f"/keys?queue={QUEUE}", "acme", size=(1280, 480))
    waited_s = tour.wait_for("the orders beside the flood", sent)
    left = PHOTOS - sum(what.startswith("resize") for what, _ in tour.journal())
    console.print(
        f"   Their orders were done after {max(waited_s[each] for each in sent):.1f} s, with {left:,} photos still "
        "waiting: each customer has a turn in each round."
    )
    tour.look(f"/keys?queue={QUEUE}", "shows the customers' backlogs, limits and weights.")


def killing(tour: Tour) -> None:
    tour.act(3, "A worker is killed")
    sent = [f"stocktaking {shelf}" for shelf in range(SHELVES)]
    for shelf in range(SHELVES):
        tour.shop.stocktaking.apply_async((shelf, time.time()), priority=9)
    tour.sent += sent
    wait("stocktakings under way", lambda: len(tour.begun()) > 2)
    pid = tour.processes.kill("north")
    console.print(f"   kill -9 {pid}: worker north is gone, with two stocktakings half done and others in its hand.")
    tour.look("/sessions", "shows its heartbeat getting old. After session_ttl, here 4 s, south takes over.")
    done = tour.wait_for("the stocktaking", sent)
    console.print(f"   All {SHELVES} shelves are counted; the last one {max(done[each] for each in sent):.1f} s later.")
    tour.processes.worker("north")


def outage(tour: Tour) -> None:
    tour.act(4, "The payment service breaks")
    tour.shop.OUT_OF_ORDER.touch()
    sent = tour.buy()
    letters = tour.broker.queue(QUEUE).dead_letters
    wait("the dead letters", lambda: letters.count().total() == ORDERS)
    console.print(f"   Each payment was retried twice, after 1 s and 2 s. Now {ORDERS} of them are dead letters.")
    causes = f"/dead?queue={QUEUE}.dead"
    tour.camera.take("dashboard-causes", causes, "PaymentServiceDown", size=(1280, 380))
    tour.camera.take_watched("dashboard-overview", f"{ORDERS}\nto replay", size=(1280, 700))
    tour.camera.take("dashboard-phone", "/", QUEUE, dark=True, size=PHONE)
    tour.look(causes, "groups them by task and error, and can replay them. Leave them, or do it once it works again.")
    tour.shop.OUT_OF_ORDER.unlink()
    console.print(f"   The service works again: {tour.replay()} replayed, each with what its workflow still has to do.")
    tour.wait_for("the replayed orders", sent)


def closing_time(tour: Tour) -> int:
    tour.act(5, "Closing time")
    tour.wait_for("the photos", tour.sent)
    ran = Counter(what for what, _ in tour.journal())
    lost = len(set(tour.sent) - ran.keys())
    console.print(_table(tour.sent, ran))
    console.print(
        f"   [bold]{len(tour.sent):,} sent, {lost} lost.[/] The killed worker had begun "
        f"{len(tour.begun()) - SHELVES} that were begun again; nothing else ran twice."
    )
    tour.camera.take("dashboard-tasks", "/tasks", "shop.stocktaking", size=(1280, 480))
    tour.look("/tasks", "shows how often each task ran, how long, and how often in vain.")
    return 1 if lost else 0


def _table(sent: Sequence[str], ran: Counter[str]) -> Table:
    """By task, how many were sent, and how many of them ended once and more than once."""
    shown = Table("task", "sent", "ended once", "more than once", box=None, padding=(0, 2, 0, 3))
    for name in dict.fromkeys(each.split()[0] for each in sent):
        ends = [ran[each] for each in sent if each.split()[0] == name]
        shown.add_row(name, f"{len(ends):,}", f"{ends.count(1):,}", f"{sum(each > 1 for each in ends):,}")
    return shown


def main() -> int:
    given = _arguments()
    try:
        with ExitStack() as stack:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="celery-fdb-tour-")))
            return _run(given, home, stack.enter_context(_broker(given.store, home)), stack)
    except TourFailed as error:
        console.print(f"[bold red]the tour ends here:[/] {error}")
        return 2


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=("sqlite", "fdb"), default="sqlite", help="where messages are kept")
    parser.add_argument("--port", type=int, default=0, help="of the dashboard; 0 picks a free one")
    parser.add_argument("--go-on", action="store_true", help="stop nowhere")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="take pictures of the dashboard")
    return parser.parse_args()


@contextmanager
def _broker(store: str, home: Path) -> Iterator[str]:
    if store == "sqlite":
        yield f"fdb+sqlite:///{home}/broker.db"
        return
    from kombu_fdb.testing.fdbserver import SingleNodeCluster, fdb_unavailable_reason

    reason = fdb_unavailable_reason()
    if reason:
        raise TourFailed(f"{reason} Install FoundationDB's server and client, or use --store sqlite.")
    with SingleNodeCluster() as cluster:
        yield f"fdb:///{cluster.cluster_file}"


def _run(given: argparse.Namespace, home: Path, url: str, stack: ExitStack) -> int:
    os.environ.update(TOUR_HOME=str(home), TOUR_BROKER=url)
    import shop  # reads the environment; the workers import it the same way

    console.print(f"[bold]broker[/] {url}")
    camera = stack.enter_context(closing(Camera(given.pictures)))
    processes = stack.enter_context(Processes(home))
    for name in ("north", "south"):
        processes.worker(name)
    address = camera.address = processes.dashboard(given.port)
    console.print(f"[bold]dashboard[/] [cyan]{address}[/]")
    broker = stack.enter_context(Broker.open(url))
    stops = not given.go_on and given.pictures is None and sys.stdin.isatty()
    tour = Tour(shop, broker, processes, camera, address, stops=stops)
    for each in (opening, flood, killing, outage):
        each(tour)
    return closing_time(tour)


if __name__ == "__main__":
    sys.exit(main())
