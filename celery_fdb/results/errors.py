"""Errors of the result backend."""

from __future__ import annotations

from typing import Any

from celery.exceptions import ChordError
from kombu.exceptions import EncodeError


class ResultTooLarge(EncodeError):
    """The encoded result is over the maximum; it was not stored, the task's state is FAILURE with this error.

    An ``EncodeError``, because Celery makes a failure of one, as it does of a result that can't be encoded.
    """


def chord_error(message: str, *, cause: Any) -> ChordError:
    """With what a part raised as its cause, as Celery has it since 5.6. A part's result may also be no exception."""
    error = ChordError(message)
    if isinstance(cause, Exception):
        error.__cause__ = cause
    return error
