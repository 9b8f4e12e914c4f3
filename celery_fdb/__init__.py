"""The Celery side of the broker: options and tools beyond a plain ``broker_url``.

Importing this loads nothing; each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery_fdb.history.options import History as History
    from celery_fdb.installing import install as install
    from celery_fdb.tasks.publishing import enqueue as enqueue
    from celery_fdb.tasks.publishing import publish_many as publish_many
    from celery_fdb.tasks.task import FdbTask as FdbTask

_HOMES = {
    "History": "history.options",
    "install": "installing",
    "enqueue": "tasks.publishing",
    "publish_many": "tasks.publishing",
    "FdbTask": "tasks.task",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - the names stand above, once


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
