"""What a number or a name may be: the one place. Code that takes one from outside checks it here, at once.

The ranges are those that everything behind the edge can hold, with room to spare: a key's integer (below 2**64 - 1), a
record's (64 bits), JSON's (2**53 - 1), a thread's wait (292 years), and the dates that people are shown (year 9999).
So what was let in is stored, read, waited for and shown. Decoders accept more than this where an older celery-fdb let
more in.

===================== ===========================================================================
moment                wall clock, milliseconds since 1970, up to :data:`LATEST_MS`
duration              up to :data:`LONGEST_MS`, a hundred years
whole number          up to :data:`MOST`: limits, counts, arguments of queues
name                  UTF-8 up to :data:`~kombu_fdb.model.LONGEST_NAME` bytes: queue, exchange, routing key
key, id               UTF-8 up to :data:`~kombu_fdb.model.LONGEST_KEY` or ``LONGEST_TASK_ID`` bytes
===================== ===========================================================================

What is out of range is an ``InvalidArgument`` that names the field and what it takes; a text that is too long is a
``QueueError``, as ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from kombu_fdb.errors import InvalidArgument, QueueError
from kombu_fdb.model import (
    LEAST_LIMITS,
    LONGEST_KEY,
    LONGEST_NAME,
    LONGEST_TASK_ID,
    NEWCOMERS,
    NO_PRIORITY,
    URGENT,
    KeyLimits,
    Publication,
    QueueControl,
)
from kombu_fdb.primitives.masking import plain

#: The largest whole number that JSON carries everywhere.
MOST = 2**53 - 1
#: The end of the year 9999, UTC: the last moment that a date can show.
LATEST_MS = 253_402_300_799_999
#: A hundred years.
LONGEST_MS = 100 * 366 * 86_400_000
LONGEST_S = LONGEST_MS // 1_000
#: As many characters as every text may have.
_SHORT = min(LONGEST_NAME, LONGEST_KEY, LONGEST_TASK_ID)
#: The slowest rate, in messages per second: one in a hundred years.
SLOWEST = 1 / LONGEST_S


def is_whole(value: object, least: int, most: int = MOST) -> bool:
    """Whether it is a whole number in this range; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object, least: float, most: float) -> bool:
    """Whether it is a number in this range; nan is in no range."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def number(name: str, value: Any, unit: str, *, most: float, least: float = 0) -> float:
    """The number that ``value`` is or spells: for fields that others write as texts. Raises ``InvalidArgument``."""
    found = _spelled(value)
    if not least <= found <= most:
        from_least = f"from {least:,.10g} " if least >= 0 else ""
        raise InvalidArgument(
            f"{name} must be a number of {unit}", given=shown(value), fix=f"Allowed: {from_least}up to {most:,.10g}."
        )
    return found


def _spelled(value: Any) -> float:
    """Nan if it is not a number."""
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
            f"{name} is a number of seconds, 0 or more",
            given=shown(seconds),
            fix=f"Use at most {LONGEST_S:,}, which is 100 years.",
        )
    return -int(-seconds * 1000 // 1)


def moment(name: str, value: int) -> int:
    """A moment in milliseconds. Raises ``InvalidArgument``."""
    if not is_whole(value, 0, LATEST_MS):
        raise InvalidArgument(
            f"{name} is not a time that can be stored",
            given=shown(value),
            fix="The last possible time is in the year 9999.",
        )
    return value


# -- kinds of fields ---------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """What a field takes: in words, and as a check of it. ``fix``: advice if something else was given."""

    what: str
    accepts: Callable[[Any], bool]
    fix: str = ""


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))


def whole(what: str, least: int, most: int = MOST, *, fix: str = "") -> Kind:
    """A whole number in this range."""
    return Kind(what, lambda value: is_whole(value, least, most), fix)


def number_in(what: str, least: float, most: float, *, fix: str = "") -> Kind:
    """A number in this range."""
    return Kind(what, lambda value: is_number(value, least, most), fix)


def maybe(kind: Kind) -> Kind:
    """The same, or None."""
    return Kind(f"{kind.what}, or None", lambda value: value is None or kind.accepts(value), kind.fix)


def refused(schema: Mapping[str, Kind], values: Mapping[str, Any]) -> Iterator[tuple[str, Any, Kind]]:
    """Name and value of each that its kind does not take, and the kind. Names that are not in the schema pass."""
    for name, value in values.items():
        kind = schema.get(name)
        if kind is not None and not kind.accepts(value):
            yield name, value, kind


def check_fields(schema: Mapping[str, Kind], of: object) -> None:
    """Check these attributes of a value. Raises ``InvalidArgument`` for the first that its kind does not take."""
    for name, value, kind in refused(schema, {name: getattr(of, name) for name in schema}):
        fix = {"fix": kind.fix} if kind.fix else {}
        raise InvalidArgument(f"{name} must be {kind.what}", given=shown(value), **fix)


# -- names -------------------------------------------------------------------------------------------------------------


def check_text(name: str, value: object, longest: int) -> None:
    """Raises ``InvalidArgument`` for what is no text in UTF-8, ``QueueError`` for one of more than so many bytes."""
    if utf8_bytes(name, value) > longest:
        raise QueueError(f"the {name} is too long", given=shown(value), fix=f"At most {longest} bytes of UTF-8.")


def utf8_bytes(name: str, value: object) -> int:
    """How many bytes a text takes. Raises as :func:`utf8`."""
    return len(utf8(name, value))


def utf8(name: str, value: object) -> bytes:
    """A text's bytes. Raises ``InvalidArgument`` for what is none, or has no UTF-8 form."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} must be a string", given=shown(value), fix=f"Try str({name}).")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"{name} can't be encoded as UTF-8", given=shown(value), fix="Remove its lone surrogates."
        ) from None


def check_publication(publication: Publication) -> None:
    """Check all but the payload's size. Raises ``InvalidArgument`` and ``QueueError``, which name the field."""
    # One look is enough if all fields are good, as nearly always; else each is looked at.
    exchange, routing_key, _, priority, due_ms, ttl_ms, expires_ms, key, ttr_ms, task_id = publication[:10]
    dedup_id, dedup_ms, once_id, once_ms, _ = publication[10:]
    try:
        texts = exchange + routing_key + key + task_id + dedup_id + once_id
    except TypeError:
        texts = None
    if not (
        type(texts) is str
        and type(priority) is type(due_ms) is type(expires_ms) is type(ttr_ms) is type(dedup_ms) is type(once_ms) is int
        and texts.isascii()
        and len(texts) <= _SHORT
        and NO_PRIORITY <= priority <= URGENT
        and 0 <= due_ms <= LATEST_MS
        and 0 <= expires_ms <= LATEST_MS
        and ttl_ms is None
        and 0 <= ttr_ms <= LONGEST_MS
        and 0 <= dedup_ms <= LONGEST_MS
        and 0 <= once_ms <= LONGEST_MS
    ):
        _check_each_field(publication)


def _check_each_field(publication: Publication) -> None:
    for name, (about, longest) in _TEXTS.items():
        check_text(about, getattr(publication, name), longest)
    for name in ("due_ms", "expires_ms"):
        moment(name, getattr(publication, name))
    check_fields(_NUMBERS, publication)


_DURATION = whole("in range", 0, LONGEST_MS, fix=f"Use 0 to {LONGEST_MS:,}, which is 100 years.")
_PRIORITY = whole("0 to 9", NO_PRIORITY, URGENT)
#: Of a publication.
_TEXTS = {
    "exchange": ("exchange", LONGEST_NAME),
    "routing_key": ("routing key", LONGEST_NAME),
    "key": ("fairness key", LONGEST_KEY),
    "task_id": ("task id", LONGEST_TASK_ID),
    "dedup_id": ("dedup id", LONGEST_KEY),
    "once_id": ("once id", LONGEST_KEY),
}
_NUMBERS = {
    "ttl_ms": maybe(_DURATION),
    "ttr_ms": _DURATION,
    "dedup_window_ms": _DURATION,
    "once_window_ms": _DURATION,
    "priority": _PRIORITY,
}


# -- limits ------------------------------------------------------------------------------------------------------------


def _count(least: int) -> Kind:
    return whole(f"a whole number of at least {least}", least, fix=f"At most {MOST:,}.")


_LIMITS = {
    "paused": FLAG,
    **{
        name: _count(least) if name in {"weight", "burst"} else maybe(_count(least))
        for name, least in LEAST_LIMITS.items()
    },
    "rate": maybe(
        number_in(
            "more than 0 messages per second",
            SLOWEST,
            MOST,
            fix=f"From one in a hundred years, {SLOWEST:.2g}, to {MOST:,}; None for no limit.",
        )
    ),
    "priority": maybe(_PRIORITY),
}
_CONTROL = {
    "paused": FLAG,
    "newcomer": Kind("one of next, current, first", lambda value: value in NEWCOMERS),
    "ageing": maybe(
        number_in("more than 0 seconds per priority", 0.001, LONGEST_S, fix=f"From 0.001 to {LONGEST_S:,}.")
    ),
}


def check_limits(limits: KeyLimits) -> None:
    """Raises ``InvalidArgument``."""
    check_fields(_LIMITS, limits)


def check_control(control: QueueControl) -> None:
    """Raises ``InvalidArgument``."""
    check_fields(_CONTROL, control)
    check_limits(control.every_key)


# -- what errors show --------------------------------------------------------------------------------------------------


class Shown(str):
    """What was given, as an error's attribute: a text that is quoted already, and not once more when it is printed."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def shown(value: object) -> Shown:
    """Short and on one line, whatever it is: a number of a million digits can't even be printed."""
    try:
        return Shown(plain(repr(value)[:80]))
    except Exception:  # noqa: BLE001 - a foreign __repr__
        return Shown(f"<{type(value).__name__}>")


def last_lines(text: str, most: int) -> str:
    """The end of a text, in whole lines: a line that is cut may show a secret without the name that tells it is one."""
    return text if len(text) <= most else text[-most:].partition("\n")[2]
