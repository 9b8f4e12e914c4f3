"""From a broker to its history."""

from __future__ import annotations

from celery_fdb.history.store import HistoryStore
from kombu_fdb import Broker, KombuFDBError
from kombu_fdb.primitives.clock import SystemClock

FIX = "Call celery_fdb.install(app, history=True) where the app is made, and restart the workers."


class HistoryOff(KombuFDBError):
    """No worker of this broker has ever kept a history."""

    text = "history is off"


def history_of(broker: Broker) -> HistoryStore:
    """Whether or not there is one."""
    timeout_s = broker.options.operation_timeout
    return HistoryStore(broker.database, broker.location.namespace, clock=SystemClock(), timeout_s=timeout_s)


def kept_by(broker: Broker) -> HistoryStore:
    """Raises :class:`HistoryOff`."""
    store = history_of(broker)
    if store.settings() is None:
        raise HistoryOff(fix=FIX)
    return store
