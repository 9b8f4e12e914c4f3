"""``python -m tests.storms.consumer QUEUE``: one consumer of Kombu's, which has one message at a time."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from kombu import Connection, Consumer, Exchange, Queue

import kombu_fdb.transport  # noqa: F401 - a source tree has no entry point

from .ledger import teller

tell = teller(os.environ["STORM_LEDGER"], os.environ["STORM_WHO"])


def work(name: str, message: Any) -> None:
    tell("begun", name)
    message.ack()
    tell("ended", name)


def main(queue: str) -> None:
    options = json.loads(os.environ["STORM_OPTIONS"])
    with Connection(os.environ["STORM_BROKER"], transport_options=options) as connection:
        channel = connection.channel()
        channel.basic_qos(0, 1, False)
        with Consumer(channel, [Queue(queue, Exchange(""), queue)], callbacks=[work]):
            tell("ready", "-")
            while True:
                connection.drain_events()


if __name__ == "__main__":
    main(sys.argv[1])
