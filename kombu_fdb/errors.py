"""Every error of ``kombu_fdb``: one root, static text, attributes for what varies.

::

    KombuFDBError
    ├── InvalidArgument (ValueError)   a value that no call takes: correct the call
    │   └── OptionError                an unknown, malformed or contradictory option or URL: correct the settings
    ├── StoreError                     the transaction could not be carried out
    │   ├── Conflict                   another transaction won: call again
    │   ├── TransactionTooOld          it took longer than the store's 5 s: call again, with less
    │   ├── CommitUnknown              committed or not, the store could not say: call again (below)
    │   ├── StoreUnavailable           unreachable, stalled, read-only, or closed: see ``fix``, call again later
    │   │   └── StoreFull              the disk has no space for this transaction: likewise
    │   ├── ClientUnusable             FoundationDB's client is missing or unfit: install what ``fix`` says
    │   └── LimitExceeded              key, value or transaction over the store's limits: pass less at once
    ├── QueueError                     the store works, but this can't be done: see ``fix``
    │   ├── QueueNotFound              declare it, or name another one (AMQP 404)
    │   ├── ExchangeNotFound           likewise
    │   ├── NotEquivalent              declared with other properties: delete it first, or declare the same (AMQP 406)
    │   ├── LeaseLost                  the message is no longer held here: stop working on it, don't settle it again
    │   ├── SessionLost                this process was declared dead: as above, for every message it held
    │   ├── AlreadySettled             by the same handle, before: settle each job once
    │   ├── MessageTooLarge            store the data elsewhere and send a reference, or raise ``max_message_size``
    │   └── CapacityExceeded           a key, or a queue, takes no more: put it again later, or raise the capacity
    ├── ForkedError                    an object of the parent process in its child: open a broker there
    └── FormatError                    a newer or broken process wrote these bytes: upgrade, or run the doctor

The message is the class's ``text``; what varies is in keyword attributes, which follow it in ``str()``. The attribute
``fix`` names the next step where the error knows a better one than this table. All of them survive ``pickle`` (Celery
sends exceptions through pipes).

The engine retries what is retryable until its deadline (``operation_timeout``, ``publish_timeout``) before it raises a
``StoreError``, so wait a moment before the next call. After ``CommitUnknown``, the same process may repeat a
publication within five minutes, and it is stored once. A settlement may always be repeated: the second one finds
nothing left to do and raises ``LeaseLost``.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AlreadySettled",
    "CapacityExceeded",
    "ClientUnusable",
    "CommitUnknown",
    "Conflict",
    "ExchangeNotFound",
    "ForkedError",
    "FormatError",
    "InvalidArgument",
    "KombuFDBError",
    "LeaseLost",
    "LimitExceeded",
    "MessageTooLarge",
    "NotEquivalent",
    "OptionError",
    "QueueError",
    "QueueNotFound",
    "SessionLost",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "TransactionTooOld",
]


class KombuFDBError(Exception):
    """Root of all errors raised by this package."""

    text = "celery-fdb failed"
    #: Attributes that are not printed: they may be large, or private.
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

    @property
    def diagnosis(self) -> str:
        """What happened, in one line, without the next step (``fix``)."""
        shown = {k: v for k, v in self.attributes.items() if k not in self._unprinted | {"fix"} and v is not None}
        details = ", ".join(f"{name.replace('_', ' ')}: {_plain(value)}" for name, value in shown.items())
        return f"{self.text} ({details})" if details else self.text

    def __str__(self) -> str:
        fix = self.attributes.get("fix")
        return f"{self.diagnosis}. {fix}" if fix else self.diagnosis

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.text, self.attributes)


def _plain(value: Any) -> str:
    """Text as it is, unless a reader could not tell where it ends or would not see what is in it."""
    is_plain = isinstance(value, str) and value.isprintable() and value == value.strip(" '\"") and value
    return value if is_plain and not set(value) & set(",()") else repr(value)


def _rebuild(cls: type[KombuFDBError], text: str, attributes: dict[str, Any]) -> KombuFDBError:
    return cls(text, **attributes)


class InvalidArgument(KombuFDBError, ValueError):
    """A value out of its range, of the wrong type or contradictory. Nothing was changed; the same call fails again."""

    text = "unusable argument"


class OptionError(InvalidArgument):
    """An option or a URL is unknown, malformed, or contradicts another."""

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


class Outrun(StoreError):
    """A competing consumer was faster, or others wait, and this claim was told to give way. Nothing has happened."""

    text = "a competing consumer was faster"


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


class ClientUnusable(StoreError):
    """FoundationDB's binding or client library is missing, or they don't fit: calling again is no use."""

    text = "the FoundationDB client can't be used"


class StoreFull(StoreUnavailable):
    """The disk has no space for this transaction. Others that need less of it, or clear something, may go on.

    ``fills``, ``moves``: what the transaction has declared (:meth:`~kombu_fdb.store.protocol.Transaction.fill`).
    """

    text = "the disk is full"
    fills = False
    moves = False


class LimitExceeded(StoreError):
    """A key, a value or the transaction is larger than the store allows."""

    text = "over a limit of the store"


class QueueError(KombuFDBError):
    """A queue operation that can't be done as asked; the store itself works."""

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
    """The message is no longer held: its time to run has passed, it was deleted, or its process was silent too long.

    Another consumer may have it by now. Stop working on it; what was done stays done.
    """

    text = "the lease on this message is lost"


class SessionLost(QueueError):
    """The session was ended by others because its process was silent for longer than ``session_ttl``.

    Everything it held was released. The next ``take`` opens another session.
    """

    text = "the session was ended by another process"


class AlreadySettled(QueueError):
    """This handle has acknowledged, released or buried its message before. ``how``: which of them."""

    text = "this message was settled before"


class MessageTooLarge(QueueError):
    """The message is over ``max_message_size``; nothing was stored."""

    text = "the message is too large"


class CapacityExceeded(QueueError):
    """The key or queue is full; nothing was stored. Carries ``current_size`` and ``capacity``.

    From :meth:`kombu_fdb.api.queue.Queue.put` also ``item``: the payload that was refused.
    """

    text = "the queue is full"


class ForkedError(KombuFDBError):
    """An object opened by the parent process was used in a forked child."""

    text = "opened before the process forked"

    def __init__(self, text: str | None = None, **attributes: Any) -> None:
        attributes.setdefault("fix", "Open another one in this process")
        super().__init__(text, **attributes)


class FormatError(KombuFDBError):
    """Bytes in the store that this version can't read."""

    text = "unreadable bytes in the store"
