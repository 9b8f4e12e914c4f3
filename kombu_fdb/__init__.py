"""A queue on FoundationDB or one SQLite file: a broker for Celery and Kombu, and for Python without them.

Importing this loads nothing; each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kombu_fdb.api.broker import Broker as Broker
    from kombu_fdb.api.broker import Queue as Queue
    from kombu_fdb.api.job import Job as Job
    from kombu_fdb.errors import AlreadySettled as AlreadySettled
    from kombu_fdb.errors import CapacityExceeded as CapacityExceeded
    from kombu_fdb.errors import CommitUnknown as CommitUnknown
    from kombu_fdb.errors import KombuFDBError as KombuFDBError
    from kombu_fdb.errors import LeaseLost as LeaseLost
    from kombu_fdb.errors import MessageTooLarge as MessageTooLarge
    from kombu_fdb.errors import OptionError as OptionError
    from kombu_fdb.errors import QueueError as QueueError
    from kombu_fdb.errors import StoreError as StoreError
    from kombu_fdb.errors import StoreUnavailable as StoreUnavailable
    from kombu_fdb.model import Death as Death
    from kombu_fdb.model import KeyCounts as KeyCounts
    from kombu_fdb.model import KeyLimits as KeyLimits
    from kombu_fdb.model import Peeked as Peeked
    from kombu_fdb.model import QueueControl as QueueControl
    from kombu_fdb.model import QueueCounts as QueueCounts
    from kombu_fdb.model import RoundSnapshot as RoundSnapshot

_NAMES = {
    "api.broker": ("Broker", "Queue"),
    "api.job": ("Job",),
    "errors": (
        *("AlreadySettled", "CapacityExceeded", "CommitUnknown", "KombuFDBError", "LeaseLost", "MessageTooLarge"),
        *("OptionError", "QueueError", "StoreError", "StoreUnavailable"),
    ),
    "model": ("Death", "KeyCounts", "KeyLimits", "Peeked", "QueueControl", "QueueCounts", "RoundSnapshot"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - the names stand above, once


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
