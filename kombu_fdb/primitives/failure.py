"""What dead letters and the history report of an exception: its class, its text and the end of its traceback.

A user-defined class may raise in its ``__str__`` or any other attribute, or exit the program there. The error is still
reported, and the message that caused it is handled as usual.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

#: The longest text and traceback that are kept, in characters.
ERROR_LENGTH = 2_000
TRACEBACK_LENGTH = 4_096
UNPRINTABLE = "<unprintable>"


def class_of(error: object) -> str:
    """The error's class, with the module."""
    return _guarded(lambda: f"{type(error).__module__}.{type(error).__qualname__}")[:ERROR_LENGTH]


def text_of(error: object) -> str:
    """The error's text."""
    return str.__getitem__(_guarded(lambda: str(error)), slice(ERROR_LENGTH))


def traceback_of(error: BaseException) -> str:
    """The error's traceback, as Python prints it."""
    return _guarded(lambda: "".join(traceback.format_exception(error)))


def _guarded(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit):  # noqa: BLE001 - it must not end the worker
        return UNPRINTABLE


def last_lines(text: str, most: int) -> str:
    """The end of a text, in whole lines: a cut line may show a secret without the name that reveals it as one."""
    return text if len(text) <= most else text[-most:].partition("\n")[2]


def details_of(error: object, stack: str | None = None) -> dict[str, str]:
    """The details of a death: the error's text, its class if it is an exception, and the traceback if one is given."""
    details = {"error": text_of(error)}
    if isinstance(error, BaseException):
        details["error_class"] = class_of(error)
    if stack is not None:
        details["traceback"] = last_lines(stack, TRACEBACK_LENGTH)
    return details
