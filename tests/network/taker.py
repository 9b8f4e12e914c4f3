"""``python -m tests.network.taker``: takes by the Broker API, and consumes a queue by Kombu."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from kombu import Connection, Consumer, Exchange, Queue
from kombu.exceptions import OperationalError

from kombu_fdb.errors import KombuFDBError, QueueError, StoreError

from .app import OPTIONS, URL, recorder
from .producer import opened
from .programs import work

TIMEOUT_S = 0.5
TASK_S = 0.03
REFUSALS = (QueueError,)
DOUBTS = (StoreError,)


def take(over: threading.Event, queue: str) -> None:
    settling = "release" if queue == "poison" else "ack"
    with opened(over) as broker:
        while not over.is_set():
            answer = recorder.call(
                "take",
                lambda: broker.queue(queue).take(TIMEOUT_S),
                refusals=REFUSALS,
                doubts=DOUBTS,
                tell=lambda job: {"message": job and job.payload.decode()},
                queue=queue,
                deadline=TIMEOUT_S + OPTIONS["operation_timeout"],
            )
            job = answer.value if answer.kind == "ok" else None
            if job is None:
                continue
            threading.Event().wait(TASK_S)
            recorder.call(
                settling,
                getattr(job, settling),
                refusals=REFUSALS,
                doubts=DOUBTS,
                take=answer.call,
                message=job.payload.decode(),
                deadline=OPTIONS["operation_timeout"],
            )


def consume(over: threading.Event) -> None:
    def receive(name: str, message: Any) -> None:
        recorder.note("start", message=name)
        recorder.note("end", message=name, how="done")
        message.ack()

    while not over.is_set():
        try:
            with Connection(URL, transport_options=OPTIONS) as connection:
                channel = connection.channel()
                channel.basic_qos(0, 2, False)
                line = Queue("line", Exchange(""), "line", queue_arguments={"x-single-active-consumer": True})
                with Consumer(channel, [line], callbacks=[receive]):
                    while not over.is_set():
                        with suppress(TimeoutError):
                            connection.drain_events(timeout=TIMEOUT_S)
        except (OperationalError, KombuFDBError, OSError) as error:
            recorder.note("disconnected", pool="kombu", error=str(error))


def main() -> None:
    queues = ["fair", "fair", "rated", "poison", "deduped", "sink"]
    work(recorder, [consume, *(lambda over, queue=queue: take(over, queue) for queue in queues)])


if __name__ == "__main__":
    main()
