"""Text from the store, made fit for a page and for Django's database.

A header in JSON may hold what UTF-8 can't write (lone surrogates) and what PostgreSQL can't store (NUL). Each such
character becomes U+FFFD, so that it is seen.
"""

from __future__ import annotations

import re

__all__ = ["fit"]

_UNFIT = re.compile("[\x00\ud800-\udfff]")


def fit(text: str) -> str:
    """Without them."""
    return _UNFIT.sub("\ufffd", text)
