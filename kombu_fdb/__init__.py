"""A queue on FoundationDB or one SQLite file: a broker for Celery and Kombu, and for Python without them.

Importing this loads nothing; each name is loaded when it is first used. :mod:`kombu_fdb.aio` has the same for asyncio.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kombu_fdb.api.broker import Broker as Broker
    from kombu_fdb.api.consumer import Consumer as Consumer
    from kombu_fdb.api.dead_letters import DeadLetters as DeadLetters
    from kombu_fdb.api.job import Job as Job
    from kombu_fdb.api.queue import Queue as Queue
    from kombu_fdb.errors import AlreadySettled as AlreadySettled
    from kombu_fdb.errors import CapacityExceeded as CapacityExceeded
    from kombu_fdb.errors import ClientUnusable as ClientUnusable
    from kombu_fdb.errors import CommitUnknown as CommitUnknown
    from kombu_fdb.errors import Conflict as Conflict
    from kombu_fdb.errors import ExchangeNotFound as ExchangeNotFound
    from kombu_fdb.errors import ForkedError as ForkedError
    from kombu_fdb.errors import FormatError as FormatError
    from kombu_fdb.errors import InvalidArgument as InvalidArgument
    from kombu_fdb.errors import KombuFDBError as KombuFDBError
    from kombu_fdb.errors import LeaseLost as LeaseLost
    from kombu_fdb.errors import LimitExceeded as LimitExceeded
    from kombu_fdb.errors import MessageTooLarge as MessageTooLarge
    from kombu_fdb.errors import NotEquivalent as NotEquivalent
    from kombu_fdb.errors import OptionError as OptionError
    from kombu_fdb.errors import QueueError as QueueError
    from kombu_fdb.errors import QueueNotFound as QueueNotFound
    from kombu_fdb.errors import SessionLost as SessionLost
    from kombu_fdb.errors import StoreError as StoreError
    from kombu_fdb.errors import StoreFull as StoreFull
    from kombu_fdb.errors import StoreUnavailable as StoreUnavailable
    from kombu_fdb.errors import TransactionTooOld as TransactionTooOld
    from kombu_fdb.model import Death as Death
    from kombu_fdb.model import KeyCounts as KeyCounts
    from kombu_fdb.model import KeyLimits as KeyLimits
    from kombu_fdb.model import Listed as Listed
    from kombu_fdb.model import Page as Page
    from kombu_fdb.model import Peeked as Peeked
    from kombu_fdb.model import QueueControl as QueueControl
    from kombu_fdb.model import QueueCounts as QueueCounts
    from kombu_fdb.model import RoundSnapshot as RoundSnapshot
    from kombu_fdb.model import Spot as Spot

    __version__: str

_NAMES = {
    "api.broker": ("Broker",),
    "api.dead_letters": ("DeadLetters",),
    "api.job": ("Job",),
    "api.queue": ("Queue",),
    "api.consumer": ("Consumer",),
    "errors": (
        *("AlreadySettled", "CapacityExceeded", "ClientUnusable", "CommitUnknown", "Conflict", "ExchangeNotFound"),
        *("ForkedError", "FormatError", "InvalidArgument", "KombuFDBError", "LeaseLost", "LimitExceeded"),
        *("MessageTooLarge", "NotEquivalent", "OptionError", "QueueError", "QueueNotFound", "SessionLost"),
        *("StoreError", "StoreFull", "StoreUnavailable", "TransactionTooOld"),
    ),
    "model": (
        *("Death", "KeyCounts", "KeyLimits", "Listed", "Page", "Peeked", "QueueControl", "QueueCounts"),
        *("RoundSnapshot", "Spot"),
    ),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - the names stand above, once


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = _version()
    elif name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _version() -> str:
    """That of the installed distribution; "0" of a checkout that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("celery-fdb")
    except PackageNotFoundError:
        return "0"


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "__version__"})
