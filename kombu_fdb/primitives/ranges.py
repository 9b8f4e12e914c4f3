"""The only place that says what a number, a rate or a name may be. Code that takes one from outside checks it here.

The ranges fit into everything inside, with room to spare: a key's integer (below 2**64 - 1), a record's (64 bits),
JSON's (2**53 - 1), a thread's wait (292 years), and the dates that people see (year 9999). So every accepted value can
be stored, read, waited for and shown. Decoders accept more if an older celery-fdb did.

===================== ===========================================================================
moment                wall clock, milliseconds since 1970, up to :data:`LATEST_MS`
duration              up to :data:`LONGEST_MS`, a hundred years
whole number          up to :data:`MOST`: limits, counts, arguments of queues
rate                  messages a second, also as Celery writes them, "10/m" (:func:`rate_of`)
name                  UTF-8 up to :data:`~kombu_fdb.model.LONGEST_NAME` bytes: queue, exchange, routing key
key, id               UTF-8 up to :data:`~kombu_fdb.model.LONGEST_KEY` or ``LONGEST_TASK_ID`` bytes
===================== ===========================================================================

A value out of range raises an ``InvalidArgument`` that names the field and its range; a text that is too long raises a
``QueueError``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple, Self

from kombu_fdb.errors import InvalidArgument, QueueError
from kombu_fdb.model import NO_PRIORITY, URGENT
from kombu_fdb.primitives.masking import plain

#: The largest whole number that every JSON parser preserves.
MOST = 2**53 - 1
#: The end of the year 9999, UTC: the last time that a date can represent.
LATEST_MS = 253_402_300_799_999
#: A hundred years.
LONGEST_MS = 100 * 366 * 86_400_000
LONGEST_S = LONGEST_MS // 1_000
#: The slowest rate, in messages per second: one in a hundred years.
SLOWEST = 1 / LONGEST_S
#: The shortest window of an id, in seconds.
SHORTEST_S = 0.001
#: Units as people write them.
LETTERS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def is_whole(value: object, least: int, most: int = MOST) -> bool:
    """Whether it is a whole number in this range; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object, least: float, most: float) -> bool:
    """Whether it is a number in this range; nan is in no range."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def number(name: str, value: Any, unit: str, *, most: float, least: float = 0) -> float:
    """The number that ``value`` is or spells, for fields that others write as text. Raises ``InvalidArgument``."""
    found = _spelled(value)
    if not least <= found <= most:
        from_least = f"from {least:,.10g} " if least >= 0 else ""
        raise InvalidArgument(
            f"{name} must be a number of {unit}", given=shown(value), fix=f"Allowed: {from_least}up to {most:,.10g}."
        )
    return found


def _spelled(value: Any) -> float:
    """The number that it spells; nan if none."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def milliseconds(name: str, seconds: Any) -> int:
    """A duration in seconds as whole milliseconds, rounded up, at least 1 unless it is 0.

    Raises ``InvalidArgument``.
    """
    if not is_number(seconds, 0, LONGEST_S):
        raise InvalidArgument(
            f"{name} must be a number of seconds, 0 or more",
            given=shown(seconds),
            fix=f"Use at most {LONGEST_S:,}, which is 100 years.",
        )
    return -int(-seconds * 1000 // 1)


def rate_of(text: str) -> float | None:
    """Messages a second, as Celery writes rates: 10, 10/s, 100/m, 1000/h. None for another text, or out of range."""
    number, _, unit = text.partition("/")
    try:
        rate = float(number) / LETTERS_S[unit or "s"]
    except (ValueError, KeyError):
        return None
    return rate if SLOWEST <= rate <= MOST else None  # nan is not


def moment(name: str, value: int) -> int:
    """A time in milliseconds since 1970. Raises ``InvalidArgument``."""
    if not is_whole(value, 0, LATEST_MS):
        raise InvalidArgument(
            f"{name} is not a time that can be stored",
            given=shown(value),
            fix="The last possible time is in the year 9999.",
        )
    return value


# -- kinds of fields ---------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """What a field accepts: in words, and as a check. ``fix``: advice for any other value."""

    what: str
    accepts: Callable[[Any], bool]
    fix: str = ""

    @classmethod
    def whole(cls, what: str, least: int, most: int = MOST, *, fix: str = "") -> Self:
        """A whole number in this range."""
        return cls(what, lambda value: is_whole(value, least, most), fix)

    @classmethod
    def number(cls, what: str, least: float, most: float, *, fix: str = "") -> Self:
        """A number in this range."""
        return cls(what, lambda value: is_number(value, least, most), fix)

    def or_none(self) -> Kind:
        """The kind, or None."""
        return Kind(f"{self.what}, or None", lambda value: value is None or self.accepts(value), self.fix)

    def check(self, name: str, value: Any) -> None:
        """Raises ``InvalidArgument`` for a value that it does not accept."""
        if not self.accepts(value):
            fix = {"fix": self.fix} if self.fix else {}
            raise InvalidArgument(f"{name} must be {self.what}", given=shown(value), **fix)


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
PRIORITY = Kind.whole("0 to 9", NO_PRIORITY, URGENT)


def refused(schema: Mapping[str, Kind], values: Mapping[str, Any]) -> Iterator[tuple[str, Any, Kind]]:
    """Name, value and kind of each value that its kind does not accept. Names that are not in the schema pass."""
    for name, value in values.items():
        kind = schema.get(name)
        if kind is not None and not kind.accepts(value):
            yield name, value, kind


def check_fields(schema: Mapping[str, Kind], of: object) -> None:
    """Check these attributes of a value. Raises ``InvalidArgument`` for the first that its kind does not accept."""
    for name, kind in schema.items():
        kind.check(name, getattr(of, name))


# -- names -------------------------------------------------------------------------------------------------------------


def check_text(name: str, value: object, longest: int) -> None:
    """Raises ``InvalidArgument`` unless it is UTF-8 text, ``QueueError`` if that is over ``longest`` bytes."""
    if len(utf8(name, value)) > longest:
        raise QueueError(f"the {name} is too long", given=shown(value), fix=f"At most {longest} bytes of UTF-8.")


def utf8(name: str, value: object) -> bytes:
    """A text's bytes. Raises ``InvalidArgument`` unless it is text that UTF-8 can encode."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} must be a string", given=shown(value), fix=f"Try str({name}).")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"{name} can't be encoded as UTF-8", given=shown(value), fix="Remove its lone surrogates."
        ) from None


# -- what errors show --------------------------------------------------------------------------------------------------


class Shown(str):
    """A given value as an error's attribute: text that is already quoted, and is not quoted again when printed."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def shown(value: object) -> Shown:
    """The value, short and on one line: a number of a million digits can't even be printed."""
    try:
        return Shown(plain(repr(value)[:80]))
    except Exception:  # noqa: BLE001 - a foreign __repr__
        return Shown(f"<{type(value).__name__}>")
