"""The one place that says as which of its own errors kombu sees each of ours.

Kombu and Celery react by class. A *connection error* makes them drop the connection, connect again and go on; a
*channel error* means that this one operation was wrong, and that the connection is sound. AMQP's 404 and 406 have
classes of their own, which callers of passive declarations catch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from functools import partial

from amqp import exceptions as amqp
from amqp.exceptions import NotFound, PreconditionFailed, RecoverableConnectionError
from kombu.exceptions import ChannelError as KombuChannelError
from kombu.exceptions import ConnectionError as KombuConnectionError
from kombu.exceptions import OperationalError

from kombu_fdb.errors import (
    CapacityExceeded,
    CommitUnknown,
    Conflict,
    ExchangeNotFound,
    ForkedError,
    FormatError,
    InvalidArgument,
    KombuFDBError,
    LimitExceeded,
    MessageTooLarge,
    NotEquivalent,
    QueueError,
    QueueNotFound,
    StoreUnavailable,
    TransactionTooOld,
)


class ExchangeVanished(NotFound, OperationalError):
    """An exchange is gone, with others perhaps, though kombu may believe that it has declared it: declare it anew.

    As it is recoverable, kombu would turn it into its base class ``OperationalError`` alone after the last retry.
    """


class MessageNacked(CapacityExceeded, amqp.MessageNacked):
    """py-amqp's error for a message that a full queue has refused, with the attributes of ``CapacityExceeded``."""


class Unanswered(StoreUnavailable, OperationalError):
    """The store did not answer in time; ``__cause__`` is its error. Programs that use Celery catch the base class."""


class OutcomeUnknown(CommitUnknown, OperationalError):
    """The store may have carried out the call, or may still do so."""


#: Errors after which a retry may help. ``StoreError`` itself is not here: ``LimitExceeded`` is one too.
UNANSWERED = (StoreUnavailable, CommitUnknown, Conflict, TransactionTooOld)
#: Errors after which a new connection may help.
RECOVERABLE_CONNECTION_ERRORS: tuple[type[BaseException], ...] = (RecoverableConnectionError, *UNANSWERED, ForkedError)
CONNECTION_ERRORS: tuple[type[BaseException], ...] = (KombuConnectionError, *RECOVERABLE_CONNECTION_ERRORS)
CHANNEL_ERRORS: tuple[type[BaseException], ...] = (
    KombuChannelError,
    QueueError,
    FormatError,
    LimitExceeded,
)


class _Raising(ContextDecorator):
    """Hands an error of ours to what may raise another in its place.

    Since Python 3.12 a ``contextmanager`` would keep it, with all its frames, until Python looks for garbage:
    https://github.com/python/cpython/issues/129280.
    """

    def __init__(self, translate: Callable[[KombuFDBError], None]) -> None:
        self._translate = translate

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, KombuFDBError):
            self._translate(error)


def amqp_errors(method: str) -> _Raising:
    """Raise an error that has an AMQP code as AMQP's class, and a missing answer as an ``OperationalError``.

    ``method``: AMQP's name, such as ``queue_declare``.
    """
    return _Raising(partial(raise_as_amqp, method=method))


def operational_errors() -> _Raising:
    """Raise the error of a store that did not answer as an ``OperationalError``."""
    return _Raising(raise_as_operational)


def raise_as_amqp(error: KombuFDBError, method: str) -> None:
    """:func:`amqp_errors` for hot paths. Returns if the error is to be raised as it is."""
    if isinstance(error, QueueNotFound | ExchangeNotFound):
        raise not_found(str(error), method) from error
    if isinstance(error, CapacityExceeded):
        raise MessageNacked(error.text, **error.attributes) from error
    # Kombu's callers expect a ValueError for an invalid argument.
    is_refused = isinstance(error, InvalidArgument) and method in ("queue_declare", "exchange_declare")
    if is_refused or isinstance(error, NotEquivalent | MessageTooLarge | LimitExceeded):
        raise PreconditionFailed(f"PRECONDITION_FAILED - {error}", (50, 10), f"Channel.{method}") from error
    raise_as_operational(error)


def raise_as_operational(error: KombuFDBError) -> None:
    if isinstance(error, UNANSWERED):
        kind = OutcomeUnknown if isinstance(error, CommitUnknown) else Unanswered
        raise kind(error.text, **error.attributes) from error


def not_found(what: str, method: str, kind: type[NotFound] = NotFound) -> NotFound:
    return kind(f"NOT_FOUND - {what}", (50, 10), f"Channel.{method}")
