"""Keyword arguments that several verbs share, for type checkers and editors (PEP 692).

What is unknown or out of range is refused where it is used, with what there is; ``tests/kombu_fdb/api/test_faces.py``
keeps these in step with the values they stand for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypedDict

from kombu_fdb.errors import InvalidArgument
from kombu_fdb.model import Peeked
from kombu_fdb.primitives.ranges import LONGEST_S, MOST, Kind, is_number, shown, utf8

#: Called between two transactions of a long verb; True ends the verb there.
Stop = Callable[[], bool]


def never() -> bool:
    """The ``stop`` of a call that is not to be stopped."""
    return False


class Declaration(TypedDict, total=False):
    """:class:`~kombu_fdb.routing.tables.QueueDeclaration`'s fields; ``arguments`` with AMQP's names and units."""

    durable: bool
    exclusive: bool
    auto_delete: bool
    arguments: dict[str, Any]


class Conditions(TypedDict, total=False):
    """Which dead letters: all given conditions must hold. See :mod:`kombu_fdb.api.dead_letters`."""

    message_id: bytes
    reason: str | None
    queue: str | None
    key: str | None
    task: str | None
    error: str | None
    older_than: float | None
    younger_than: float | None
    where: Callable[[Peeked], bool] | None


class Named(Protocol):
    """A queue, of either face."""

    @property
    def name(self) -> str: ...


# -- checks ------------------------------------------------------------------------------------------------------------


def queue_names(queues: Iterable[Named | str]) -> list[str]:
    """Raises ``InvalidArgument``; one name alone would be taken for a queue of each of its letters."""
    if isinstance(queues, (str, bytes)) or not isinstance(queues, Iterable):
        raise InvalidArgument("queues are a list", given=shown(queues), fix="Pass [queue], with brackets.")
    return [check_name("queue's name", getattr(each, "name", each)) for each in queues]


def check_name(what: str, given: Any) -> str:
    """A text, as it is. Raises ``InvalidArgument``."""
    utf8(what, given)
    return str(given)


def check_limit(given: int | None, least: int = 0) -> None:
    """How many at most; None for as many as there are. Raises ``InvalidArgument``."""
    Kind.whole(f"a whole number, {least} or more", least, fix=f"At most {MOST:,}.").or_none().check("limit", given)


def seconds(what: str, given: float) -> float:
    """Seconds, at most a hundred years, which means no limit; may be negative. Raises ``InvalidArgument``."""
    if not is_number(given, -math.inf, math.inf):
        raise InvalidArgument(f"{what} is a number of seconds", given=shown(given), fix="Pass a number, such as 2.5.")
    return float(max(min(given, LONGEST_S), -LONGEST_S))
