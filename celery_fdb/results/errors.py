"""Errors of the result backend."""

from __future__ import annotations

from kombu.exceptions import EncodeError

__all__ = ["ResultTooLarge"]


class ResultTooLarge(EncodeError):
    """The encoded result is over the maximum; it was not stored, the task's state is FAILURE with this error.

    An ``EncodeError``, because Celery makes a failure of one, as it does of a result that can't be encoded.
    """
