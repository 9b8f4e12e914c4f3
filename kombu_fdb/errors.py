"""Every error of ``kombu_fdb``: one root, static text, attributes for what varies.

::

    KombuFDBError
    ├── OptionError (ValueError)       an unknown, malformed or contradictory option
    ├── StoreError                     the transaction could not be carried out
    │   ├── Conflict                   another transaction won; retryable
    │   ├── TransactionTooOld          the read version fell out of the 5 s window; retryable
    │   ├── CommitUnknown              committed or not, the store could not say
    │   ├── StoreUnavailable           unreachable, stalled, full, read-only, or its library is missing
    │   └── LimitExceeded              key, value or transaction over the store's limits
    ├── QueueError
    │   ├── QueueNotFound
    │   ├── ExchangeNotFound
    │   ├── NotEquivalent              redeclared with other properties (AMQP 406)
    │   ├── LeaseLost                  somebody else may hold the message by now
    │   ├── AlreadySettled             by the same handle, before
    │   ├── MessageTooLarge
    │   └── CapacityExceeded           a key, or a queue, takes no more
    ├── ForkedError                    an object of the parent process was used in its child
    └── FormatError                    stored bytes of a newer or a broken writer

The message is the class's ``text``; what varies is in keyword attributes, which follow it in ``str()``. All of
them survive ``pickle`` (Celery sends exceptions through pipes).
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AlreadySettled",
    "CapacityExceeded",
    "CommitUnknown",
    "Conflict",
    "ExchangeNotFound",
    "ForkedError",
    "FormatError",
    "KombuFDBError",
    "LeaseLost",
    "LimitExceeded",
    "MessageTooLarge",
    "NotEquivalent",
    "OptionError",
    "QueueError",
    "QueueNotFound",
    "StoreError",
    "StoreUnavailable",
    "TransactionTooOld",
]


class KombuFDBError(Exception):
    """Root of all errors raised by this package."""

    text = "celery-fdb failed"
    #: Name of the attribute that says how to mend it; printed last, as a sentence of its own.
    _advice = "fix"
    #: Attributes that are not printed: they may be large, or nobody else's business.
    _unprinted = frozenset({"item"})

    def __init__(self, text: str | None = None, **attributes: Any) -> None:
        self.text = text or type(self).text
        self.attributes = attributes
        super().__init__(self.text)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["attributes"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __str__(self) -> str:
        shown = {
            k: v for k, v in self.attributes.items() if k not in self._unprinted | {self._advice} and v is not None
        }
        details = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        line = f"{self.text} ({details})" if details else self.text
        advice = self.attributes.get(self._advice)
        return f"{line}. {advice}" if advice else line

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.text, self.attributes)


def _rebuild(cls: type[KombuFDBError], text: str, attributes: dict[str, Any]) -> KombuFDBError:
    return cls(text, **attributes)


class OptionError(KombuFDBError, ValueError):
    """An option is unknown, has the wrong type, or contradicts another."""

    text = "unusable option"


class StoreError(KombuFDBError):
    """The store did not carry out a transaction.

    ``retryable``: a fresh attempt may succeed, within ``retry_s`` seconds of the first.
    """

    text = "the store failed"
    retryable = False
    retry_s = float("inf")


class Conflict(StoreError):
    """A key this transaction read was changed by another one that committed first."""

    text = "the transaction conflicted with another one"
    retryable = True


class TransactionTooOld(StoreError):
    """The transaction lived longer than the store keeps old versions (5 s)."""

    text = "the transaction is too old"
    retryable = True


class CommitUnknown(StoreError):
    """The commit's answer was lost: it may have happened, or not.

    ``in_flight``: the commit may even still happen later, so nothing can be concluded from reading the store now.
    """

    text = "the outcome of the commit is unknown"
    retryable = True

    def __init__(self, text: str | None = None, *, in_flight: bool = False, **attributes: Any) -> None:
        super().__init__(text, in_flight=in_flight, **attributes)


class StoreUnavailable(StoreError):
    """The store can't be reached, did not answer within the deadline, or refuses writes."""

    text = "the store is not available"


class LimitExceeded(StoreError):
    """A key, a value or the transaction is larger than the store allows."""

    text = "over a limit of the store"


class QueueError(KombuFDBError):
    """A queue operation that can't be done as asked; the store itself is well."""

    text = "the queue operation failed"


class QueueNotFound(QueueError):
    """No such queue (AMQP 404)."""

    text = "no such queue"


class ExchangeNotFound(QueueError):
    """No such exchange (AMQP 404)."""

    text = "no such exchange"


class NotEquivalent(QueueError):
    """Declared before with other properties (AMQP 406)."""

    text = "already declared with other properties"


class LeaseLost(QueueError):
    """The message is no longer held by this session: its lease was swept, or it was settled before."""

    text = "the lease on this message is lost"


class AlreadySettled(QueueError):
    """This handle has acknowledged, released or buried its message before. ``how``: which of them."""

    text = "this message was settled before"


class MessageTooLarge(QueueError):
    """The message is over ``max_message_size``; nothing was stored."""

    text = "the message is too large"


class CapacityExceeded(QueueError):
    """The key or queue is full; nothing was stored. Carries ``current_size`` and ``capacity``.

    From :meth:`kombu_fdb.api.broker.Queue.put` also ``item``: the payload that was refused.
    """

    text = "the queue is full"


class ForkedError(KombuFDBError):
    """An object opened by the parent process was used in a forked child."""

    text = "opened before the process forked"


class FormatError(KombuFDBError):
    """Bytes in the store that this version can't read."""

    text = "unreadable bytes in the store"
