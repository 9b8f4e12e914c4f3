"""A Celery application like any other: nothing in it knows which broker and result backend it has, but for one URL.

Fetch, parse and count are a chain for each text; the chains of all texts are a chord, whose callback adds up the words.
Beside them run the tasks that brokers find hard: one that fails twice, one for later, one whose process is killed.
"""

from __future__ import annotations

import os
import re
import signal
from datetime import datetime
from pathlib import Path
from typing import Any

import journal
from celery import Celery, Task, signals

TEXTS = Path(__file__).parent / "texts"
HOME = Path(os.environ.get("WORDCOUNT_HOME", "."))
JOURNAL = HOME / "journal"

BROKER = os.environ.get("WORDCOUNT_BROKER", "fdb+sqlite://")

# Tasks and results in one store. With another broker, for comparison, the results alone are in a file of ours.
app = Celery(
    "wordcount", broker=BROKER, backend=BROKER if BROKER.startswith("fdb") else f"fdb+sqlite:///{HOME}/results.db"
)
app.conf.broker_connection_retry_on_startup = True


@app.task
def fetch(name: str) -> dict[str, Any]:
    return {"name": name, "text": (TEXTS / name).read_text()}


@app.task
def parse(document: dict[str, Any]) -> dict[str, Any]:
    return {"name": document["name"], "words": words_of(document["text"])}


@app.task
def count(document: dict[str, Any]) -> dict[str, int]:
    journal.append(JOURNAL, "indexed", file=document["name"], words=len(document["words"]))
    counts: dict[str, int] = {}
    for word in document["words"]:
        counts[word] = counts.get(word, 0) + 1
    return counts


@app.task
def add_up(counts: list[dict[str, int]]) -> dict[str, int]:
    """The chord's callback: one index of all texts."""
    total: dict[str, int] = {}
    for each in counts:
        for word, number in each.items():
            total[word] = total.get(word, 0) + number
    return total


@app.task(bind=True, autoretry_for=(ConnectionError,), retry_backoff=1, retry_jitter=False)
def look_up_errata(self: Task) -> str:
    """A service that is down for a while: retried after 1 s and after 2 s."""
    if self.request.retries < 2:
        raise ConnectionRefusedError("the errata service does not answer")
    return "no errata"


@app.task
def send_report() -> str:
    """To be run at a given time."""
    return "sent"


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)
def scan_archive(self: Task) -> str:
    """Its process is killed the first time, as by the kernel when memory runs out."""
    mark = HOME / f"killed-{self.request.id}"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "scanned"


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+(?:'[a-z]+)*", text.lower())


# -- writing down what happens, for the table at the end ----------------------------------------------------------


@signals.after_task_publish.connect
def _on_publish(sender: str, headers: dict[str, Any], **_: Any) -> None:
    eta = headers.get("eta")
    due = datetime.fromisoformat(eta).timestamp() if eta else 0
    journal.append(JOURNAL, "sent", task=sender, id=headers["id"], due=due)


@signals.task_prerun.connect
def _on_start(task_id: str, task: Task, **_: Any) -> None:
    journal.append(JOURNAL, "started", task=task.name, id=task_id)


@signals.task_postrun.connect
def _on_end(task_id: str, task: Task, state: str, **_: Any) -> None:
    journal.append(JOURNAL, "ended", task=task.name, id=task_id, state=state)


@signals.worker_ready.connect
def _on_ready(**_: Any) -> None:
    journal.append(JOURNAL, "ready")
