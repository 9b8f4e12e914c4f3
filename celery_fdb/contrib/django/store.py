"""The store as a web process uses it: opened when first asked for, once per process, and again after it has failed.

The same client serves the tasks this process publishes, if the options agree, so a page costs no connection of its own.
It never consumes, so it has no session.
"""

from __future__ import annotations

from typing import Any

from django.core.signals import setting_changed

from celery_fdb.brokers.address import open_existing
from celery_fdb.brokers.lazy import Holding
from celery_fdb.contrib.django import conf
from kombu_fdb import Broker


def _open() -> Broker:
    """Raises ``OptionError``, or within ``CONNECT_TIMEOUT`` seconds a ``StoreError``."""
    settings = conf.read()
    url, options = conf.broker_of(settings)
    return open_existing(url, **{"connect_timeout": settings.connect_timeout, **options})


holding = Holding(_open)


def _on_change(*, setting: str, **_: Any) -> None:
    if setting.startswith("CELERY"):
        holding.close()


def follow_settings() -> None:
    """Tests change settings while they run (``override_settings``)."""
    setting_changed.connect(_on_change, dispatch_uid="celery_fdb")
