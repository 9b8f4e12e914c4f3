"""How much of our code a message passes: `make bench` measures what it costs, this keeps it from growing unnoticed."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection

import kombu_fdb

ROOT = f"{Path(kombu_fdb.__file__).parent}{os.sep}"
HEADERS = {"id": "1", "task": "shop.pay", "lang": "py", "argsrepr": "()", "kwargsrepr": "{}", "retries": 0, "eta": None}
#: Calls into our functions, and files that these stand in. A change that passes fewer lowers them.
CALLS, FILES = 78, 26


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"fdb+sqlite:///{tmp_path}/b.db"


def test_what_a_published_task_passes(connection: Connection) -> None:
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            calls[frame.f_code.co_filename] += 1

    producer = connection.Producer()
    connection.default_channel.queue_declare("q")

    def publish() -> None:
        producer.publish([[], {}, {}], routing_key="q", headers=HEADERS, correlation_id="1")

    publish()
    found = []
    for _ in range(5):  # once a second the totals are stored, and the queue's declaration is read again
        calls.clear()
        sys.setprofile(count)
        try:
            publish()
        finally:
            sys.setprofile(None)
        found.append((calls.total(), len(calls)))
    assert min(found) == (CALLS, FILES)
