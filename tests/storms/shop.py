"""``python -m tests.storms.shop COUNT``: commits orders with a task each in the outbox, and tells which."""

from __future__ import annotations

import sys
import time
from contextlib import closing

from celery_fdb.contrib.outbox import Outbox

from .app import WHO, app, connect, step, tell

BATCH = 5


def main(count: int) -> None:
    box = Outbox(app, connect)
    with closing(connect()) as database:
        for _ in range(0, count, BATCH):
            started = time.monotonic()
            cursor = database.cursor()
            names = [box.add(cursor, step.s()).id for _ in range(BATCH)]
            database.commit()
            for name in names:
                tell("confirmed", name, time.monotonic() - started)
    tell("published", WHO)


if __name__ == "__main__":
    main(int(sys.argv[1]))
