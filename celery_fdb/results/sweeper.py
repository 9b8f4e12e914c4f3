"""What workers do for the result store besides storing: delete what has expired, publish abandoned chords.

Model. Each worker's main process has one daemon thread from the moment the worker is ready until it shuts down. No
caller is elected: who deletes or takes over first wins by a conflict, and a look that finds nothing costs two small
reads. Children sweep a little after a task now and then, so that it is done also where no worker of Celery's own runs.
"""

from __future__ import annotations

import os
import random
import threading
from time import monotonic
from typing import Any, Protocol

from celery.signals import worker_ready, worker_shutting_down
from celery.utils.log import get_logger

from celery_fdb.results.store import ResultStore
from kombu_fdb.errors import KombuFDBError

logger = get_logger(__name__)

#: Seconds between two looks, with jitter.
INTERVAL_S = 5.0
#: Transactions of one look, so that a large heap of expired results is cleared in turns.
SWEEP_PARTS = 20


class Results(Protocol):
    """What the sweeper needs of the backend."""

    app: Any

    @property
    def store(self) -> ResultStore:
        """Raises ``StoreUnavailable``."""

    def publish_abandoned(self) -> None:
        """Publish the chords whose publisher has died. Raises a ``StoreError``."""


class Sweeper:
    """Of one backend."""

    def __init__(self, backend: Results) -> None:
        self._backend = backend
        self._pid = 0
        self._stopped = threading.Event()
        self._next = monotonic() + INTERVAL_S
        # Before 5.7, Celery takes a method of two objects for the same receiver, unless each is named.
        name = object()
        worker_ready.connect(self._on_ready, dispatch_uid=name)
        worker_shutting_down.connect(self._on_shutdown, dispatch_uid=name)

    def _on_ready(self, sender: Any = None, **_: Any) -> None:
        if getattr(sender, "app", None) is self._backend.app:
            self.start()

    def _on_shutdown(self, **_: Any) -> None:
        self._stopped.set()

    def start(self) -> None:
        """Idempotent."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, args=(self._stopped,), name="celery-fdb-sweeper", daemon=True).start()

    def _run(self, stopped: threading.Event) -> None:
        failing = False
        while not stopped.wait(INTERVAL_S * random.uniform(0.8, 1.2)):
            try:
                self.look()
                failing = False
            except Exception as error:  # whatever it is, the next look may succeed
                if not failing:
                    unexpected = not isinstance(error, KombuFDBError)
                    logger.warning("the cleanup of the results failed: %s", error, exc_info=unexpected)
                failing = True

    def look(self) -> None:
        """Do what is due. Raises a ``StoreError``."""
        self._backend.publish_abandoned()
        self._backend.store.sweep(parts=SWEEP_PARTS)

    def now_and_then(self) -> None:
        """After a task: sweep one part, at most each :data:`INTERVAL_S`. Raises nothing."""
        if monotonic() < self._next:
            return
        self._next = monotonic() + INTERVAL_S * random.uniform(0.8, 1.2)
        try:
            self._backend.store.sweep(parts=1)
        except KombuFDBError as error:
            logger.debug("expired results were not swept: %s", error)
