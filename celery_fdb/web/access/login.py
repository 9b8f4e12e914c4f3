"""The token and the cookie that stands for it.

Model. Who types the token gets a cookie that says until when it holds, signed with the token. Nothing is kept on the
server: the cookie is good in every process that knows the token, and another token ends all of them. It is sent to
this site's own pages only (``SameSite=Strict``), and scripts can't read it.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64encode

__all__ = ["COOKIE", "HOLDS_S", "KNOWN_COOKIE", "KNOWN_S", "holds", "is_token", "ticket"]

COOKIE = "celery_fdb_session"
#: How long nobody is asked for the token again.
HOLDS_S = 12 * 3600
#: Says that somebody has logged in in this browser before, and opens nothing.
KNOWN_COOKIE = "celery_fdb_known"
KNOWN_S = 90 * 86_400
_PURPOSE = b"celery-fdb dashboard, logged in until "
_KNOWN = b"celery-fdb dashboard, known until "


def is_token(token: str, given: str) -> bool:
    """In a time that does not tell how much of it is right."""
    return hmac.compare_digest(_digest(token), _digest(given))


def ticket(token: str, now_ms: int, *, known: bool = False) -> str:
    """The cookie's value; ``known``: of the one that says who has logged in here before."""
    until = str(now_ms // 1000 + (KNOWN_S if known else HOLDS_S))
    return f"{until}.{_signature(token, until, known=known)}"


def holds(token: str, value: str, now_ms: int, *, known: bool = False) -> bool:
    """Whether the cookie was given for this token and is not over."""
    until, _, signature = value.partition(".")
    if not hmac.compare_digest(_digest(signature), _digest(_signature(token, until, known=known))):
        return False
    return int(until) * 1000 > now_ms


def _signature(token: str, until: str, *, known: bool) -> str:
    purpose = _KNOWN if known else _PURPOSE
    made = hmac.digest(token.encode(), purpose + until.encode(errors="replace"), "sha256")
    return urlsafe_b64encode(made).decode().rstrip("=")


def _digest(text: str) -> bytes:
    """Of equal lengths, whatever was given."""
    return hashlib.sha256(text.encode(errors="replace")).digest()
