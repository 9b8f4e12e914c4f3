"""The broker as the dashboard uses it: opened when first asked for, once per process, and again after it has failed.

It never consumes, so it has no session. A file that is not there is not made: its path may be a typo.
"""

from __future__ import annotations

from celery_fdb.brokers.address import open_existing
from celery_fdb.brokers.holding import Holding
from celery_fdb.web.settings import Settings


def opening(settings: Settings) -> Holding:
    """Opens it within ``connect_timeout_s``."""
    timeout_s = settings.connect_timeout_s
    return Holding(lambda: open_existing(settings.url, **{"connect_timeout": timeout_s, **settings.options}))
