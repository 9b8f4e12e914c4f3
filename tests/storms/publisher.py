"""``python -m tests.storms.publisher FIRST COUNT BYTES QUEUE``: publishes messages, and tells which are confirmed.

What is refused is told, and is published again under the next name: the storm counts names, not attempts.
"""

from __future__ import annotations

import sys
import time

from kombu.exceptions import OperationalError

from .app import WHO, app, step, tell


def main(first: int, count: int, size: int, queue: str) -> None:
    for number in range(first, first + count):
        publish(f"{WHO}-{number}", "x" * size, queue)
    tell("published", WHO)
    app.pool.force_close_all()


def publish(name: str, padding: str, queue: str) -> None:
    started = time.monotonic()
    try:
        step.apply_async((padding,), task_id=name, queue=queue)
    except OperationalError:  # any other error ends this process, and is a complaint
        tell("refused", name, time.monotonic() - started)
    else:
        tell("confirmed", name, time.monotonic() - started)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4])
