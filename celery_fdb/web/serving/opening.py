"""The broker as the dashboard uses it: opened when first asked for, once per process, and again after it has failed.

It never consumes, so it has no session. A file that is not there is not made: its path may be a typo.
"""

from __future__ import annotations

import os
from threading import Lock
from typing import Any

from celery_fdb.brokers.address import open_existing
from celery_fdb.web.settings import Settings
from kombu_fdb import Broker

__all__ = ["Opening"]


class Opening:
    """Thread-safe; a forked child opens its own."""

    def __init__(self, settings: Settings) -> None:
        self._url = settings.url
        self._options: dict[str, Any] = {"connect_timeout": settings.connect_timeout_s, **settings.options}
        self._lock = Lock()
        self._open: dict[int, Broker] = {}

    def broker(self) -> Broker:
        """The open broker. Raises ``OptionError``, or within ``connect_timeout_s`` a ``StoreError``."""
        with self._lock:
            found = self._open.get(os.getpid())
            if found is None:
                found = self._open[os.getpid()] = open_existing(self._url, **self._options)
            return found

    def forget(self) -> None:
        """After an error: the next page opens it anew. It closes when nobody uses it any more."""
        with self._lock:
            self._open.pop(os.getpid(), None)
