"""What is told of an exception, by dead letters and by history: its class, its text and the end of its traceback.

A foreign class may fail in its ``__str__``, or end the program there. The error is told in spite of that, and its
message goes where it should.
"""

from __future__ import annotations

from kombu_fdb.primitives.ranges import last_lines

#: The longest text and traceback that are kept, in characters.
ERROR_LENGTH = 2_000
TRACEBACK_LENGTH = 4_096


def class_of(error: object) -> str:
    """Its class, with the module."""
    return f"{type(error).__module__}.{type(error).__qualname__}"


def text_of(error: object) -> str:
    """What it says of itself."""
    try:
        return str(error)[:ERROR_LENGTH]
    except (Exception, SystemExit, KeyboardInterrupt):  # noqa: BLE001 - a broken exception must not end the worker
        return "<unprintable>"


def details_of(error: object, traceback: str | None = None) -> dict[str, str]:
    """The details of a death; none for None. What is no exception has no class."""
    if error is None:
        return {}
    details = {"error": text_of(error)}
    if isinstance(error, BaseException):
        details["error_class"] = class_of(error)
    if traceback is not None:
        details["traceback"] = last_lines(traceback, TRACEBACK_LENGTH)
    return details
