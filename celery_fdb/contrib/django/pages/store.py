"""The store as a web process uses it: opened when first asked for, once per process, and again after it has failed.

A forked web server's children open their own (``kombu_fdb.process.client``). The same client serves the tasks this
process publishes, if the options agree, so a page costs no connection of its own. It never consumes, so it has no
session.
"""

from __future__ import annotations

import os
from threading import Lock
from typing import Any

from django.core.signals import setting_changed

from celery_fdb.contrib.django import conf
from kombu_fdb import Broker

__all__ = ["broker", "follow_settings", "forget"]

_lock = Lock()
_open: dict[tuple[int, str, str], Broker] = {}


def broker() -> Broker:
    """The open broker. Raises ``OptionError``, or within ``CONNECT_TIMEOUT`` seconds a ``StoreError``."""
    settings = conf.read()
    url, options = conf.broker_of(settings)
    key = (os.getpid(), url, repr(sorted(options.items())))
    with _lock:
        found = _open.get(key)
        if found is None:
            found = _open[key] = Broker.open(url, **{"connect_timeout": settings.connect_timeout, **options})
        return found


def forget() -> None:
    """Close what is open, after an error: the next page opens it anew, and so learns whether it answers again."""
    with _lock:
        brokers = [each for (pid, _, _), each in _open.items() if pid == os.getpid()]
        _open.clear()
    for each in brokers:
        each.close()


def _on_change(*, setting: str, **_: Any) -> None:
    if setting.startswith("CELERY"):
        forget()


def follow_settings() -> None:
    """Tests change settings while they run (``override_settings``)."""
    setting_changed.connect(_on_change, dispatch_uid="celery_fdb")
