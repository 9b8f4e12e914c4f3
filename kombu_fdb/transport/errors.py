"""Maps our errors to kombu's; the only place that does.

Kombu and Celery react by class. A *connection error* makes them drop the connection, connect again and continue; a
*channel error* means that this operation was wrong, but the connection is sound. AMQP's 404 and 406 have classes of
their own, which callers of passive declarations catch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import ParamSpec, TypeVar

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

P = ParamSpec("P")
R = TypeVar("R")


class ExchangeVanished(NotFound, OperationalError):
    """An exchange has vanished, perhaps with others, although kombu may believe it declared: declare it again.

    As it is recoverable, kombu would turn it into its base class ``OperationalError`` alone after the last retry.
    """


class MessageNacked(CapacityExceeded, amqp.MessageNacked):
    """py-amqp's error for a message that a full queue has refused, with the attributes of ``CapacityExceeded``."""


class Unanswered(StoreUnavailable, OperationalError):
    """The store did not answer in time; ``__cause__`` is its error. Programs that use Celery catch the base class."""


class OutcomeUnknown(CommitUnknown, OperationalError):
    """The store may have carried out the call, or may still do so."""


#: Errors after which a retry may help. ``StoreError`` itself is not one: it includes ``LimitExceeded``.
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


def amqp_errors(method: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function raise errors with AMQP codes as AMQP's classes, and a missing answer as an ``OperationalError``.

    ``method``: AMQP's name, such as ``queue_declare``.
    """
    return partial(_raising, partial(raise_as_amqp, method=method))


def operational_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function raise the error of a store that did not answer as an ``OperationalError``."""
    return _raising(raise_as_operational, function)


def _raising(translate: Callable[[KombuFDBError], None], function: Callable[P, R]) -> Callable[P, R]:
    """``translate`` may raise another error instead."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except KombuFDBError as error:
            translate(error)
            raise

    return call


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


def raise_as_operational(error: BaseException) -> None:
    """:func:`operational_errors` for an error at hand. Returns if it is to be raised as it is."""
    if isinstance(error, UNANSWERED):
        kind = OutcomeUnknown if isinstance(error, CommitUnknown) else Unanswered
        raise kind(error.text, **error.attributes) from error


def not_found(what: str, method: str, kind: type[NotFound] = NotFound) -> NotFound:
    return kind(f"NOT_FOUND - {what}", (50, 10), f"Channel.{method}")
