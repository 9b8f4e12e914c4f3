"""One noisy tenant and nine quiet ones, in a queue without keys and in one with them.

    python examples/fair_tenants.py                    # a file, removed at the end
    python examples/fair_tenants.py --broker fdb://    # any broker of celery-fdb

The noisy tenant sends 300 tasks, then each quiet one sends 5, all of it twice: to the queue ``plain`` without keys, and
to ``fair`` with the tenant as the key. Then a real worker starts. The table shows as which one each tenant's last task
ran.

Exit code 0 if no quiet tenant waited for the noisy one in ``fair``, 1 if one did.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from celery import Celery
from rich.console import Console
from rich.table import Table

NOISY, NOISY_TASKS = "noisy", 300
QUIET, QUIET_TASKS = [f"quiet{number}" for number in range(1, 10)], 5
QUEUES = ("plain", "fair")
TOTAL = NOISY_TASKS + len(QUIET) * QUIET_TASKS
#: With ten keys in turn a quiet tenant's fifth task is among the first fifty.
MOST = QUIET_TASKS * (len(QUIET) + 1)
DEADLINE_S = 60.0

app = Celery("fair_tenants", broker=os.environ.get("TENANTS_BROKER"))
app.conf.update(task_acks_late=True, task_ignore_result=True, worker_prefetch_multiplier=1)
JOURNAL = Path(os.environ.get("TENANTS_JOURNAL", "journal"))


@app.task
def work(queue: str, tenant: str) -> None:
    with JOURNAL.open("a") as journal:
        journal.write(f"{queue} {tenant}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broker", metavar="URL", help="its queues `plain` and `fair` should be empty")
    with tempfile.TemporaryDirectory(prefix="fair-tenants-") as folder:
        url = parser.parse_args().broker or f"fdb+sqlite:///{folder}/broker.db"
        journal = Path(folder) / "journal"
        app.conf.broker_url = url
        publish()
        run_worker(url, journal)
        return report({queue: order(journal, queue) for queue in QUEUES})


def publish() -> None:
    tenants = [NOISY] * NOISY_TASKS + QUIET * QUIET_TASKS
    with app.producer_pool.acquire(block=True) as producer:
        for tenant in tenants:
            work.apply_async(("plain", tenant), queue="plain", producer=producer)
            work.apply_async(("fair", tenant), queue="fair", producer=producer, headers={"fair_key": tenant})


def run_worker(url: str, journal: Path) -> None:
    """``celery worker`` until everything has run, or the time is up."""
    environ = {**os.environ, "TENANTS_BROKER": url, "TENANTS_JOURNAL": str(journal)}
    command = [sys.executable, "-m", "celery", "-A", "fair_tenants", "worker", "-P", "solo", "-Q", ",".join(QUEUES)]
    deadline = time.monotonic() + DEADLINE_S
    with subprocess.Popen(
        command, cwd=Path(__file__).parent, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as worker:
        while sum(len(order(journal, queue)) for queue in QUEUES) < TOTAL * len(QUEUES):
            if time.monotonic() > deadline or worker.poll() is not None:
                break
            time.sleep(0.1)
        worker.terminate()


def order(journal: Path, queue: str) -> list[str]:
    """The tenants of a queue's tasks, as they ran."""
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [tenant for name, _, tenant in (line.partition(" ") for line in lines) if name == queue]


def report(ran: dict[str, list[str]]) -> int:
    console = Console(highlight=False)
    table = Table("tenant", "tasks", "last one ran as, without keys", "with keys", box=None, header_style="bold")
    for tenant in (NOISY, *QUIET):
        sent = NOISY_TASKS if tenant == NOISY else QUIET_TASKS
        table.add_row(tenant, str(sent), *(f"{last(ran[queue], tenant)} of {TOTAL}" for queue in QUEUES))
    console.print(table)
    if any(len(tenants) != TOTAL for tenants in ran.values()):
        console.print("verdict: not all tasks ran in time")
        return 1
    slowest = max(last(ran["fair"], tenant) for tenant in QUIET)
    good = slowest <= MOST
    console.print(f"verdict: with keys every quiet tenant was done after {slowest} tasks", "" if good else "- too late")
    return 0 if good else 1


def last(tenants: Sequence[str], tenant: str) -> int:
    return max((place for place, each in enumerate(tenants, start=1) if each == tenant), default=0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import fair_tenants  # the tasks' names are those that the worker knows

    sys.exit(fair_tenants.main())
