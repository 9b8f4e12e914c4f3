"""What ``doctor`` says of the history."""

from __future__ import annotations

from celery_fdb.history.views.runs import history_of
from kombu_fdb import Broker
from kombu_fdb.doctor import Finding
from kombu_fdb.primitives.plural import plural

WHAT = "history"


def check_history(broker: Broker) -> Finding:
    """Whether it is on, how much there is, and whether runs had to be dropped. Raises a ``StoreError``."""
    history = history_of(broker)
    settings = history.settings()
    if settings is None:
        return Finding("ok", WHAT, "off; celery_fdb.install(app, history=True) turns it on")
    dropped = history.dropped()
    kept = plural(history.kept(), "run")
    found = f"{kept} of at most {settings.get('runs')}; {plural(dropped, 'run')} dropped so far"
    if not dropped:
        return Finding("ok", WHAT, found)
    fix = "The store did not answer in time. Watch celery_fdb_history_dropped_total: does the number grow?"
    return Finding("warn", WHAT, found, fix)
