"""Who looks at the dashboard, the token, and the cookie that stands for it.

Model. A visitor who types the token gets a cookie that says until when it holds, signed with the token. The cookie is
good in every process that knows the token, and another token ends all of them. It is sent to this site's own pages only
(``SameSite=Strict``), and scripts can't read it; but browsers send it to all ports of a host, so its name is one of its
token's own, and logging out ends it for every copy of it: each process keeps those that it was told to end.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from base64 import urlsafe_b64encode
from dataclasses import dataclass

# -- users -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class User:
    """``name`` stands in the audit. What the dashboard itself may not do, none of its users may.

    ``may_act_on_workers``: one who may act may also shut workers down, and resize them.
    """

    name: str
    may_act: bool = True
    may_see_bodies: bool = True
    may_act_on_workers: bool = True


# -- the token ---------------------------------------------------------------------------------------------------------


COOKIE = "celery_fdb_session"
#: How long a browser is not asked for the token again.
HOLDS_S = 12 * 3600
#: Says that a user has logged in in this browser before, and opens nothing.
KNOWN_COOKIE = "celery_fdb_known"
KNOWN_S = 90 * 86_400
#: Tickets that a process keeps as ended.
MOST_ENDED = 10_000


def is_token(token: str, given: str) -> bool:
    """In a time that does not tell how much of it is right."""
    return hmac.compare_digest(_digest(token), _digest(given))


def ticket(token: str, now_ms: int, *, known: bool = False) -> str:
    """The cookie's value; ``known``: of the one that says who has logged in here before."""
    until = f"{now_ms + 1000 * (KNOWN_S if known else HOLDS_S)}.{secrets.token_urlsafe(9)}"
    return f"{until}.{_signed(token, until, known=known)}"


def holds(token: str, value: str, now_ms: int, *, known: bool = False) -> bool:
    """Whether the cookie was given for this token and is not over."""
    until, _, signed = value.rpartition(".")
    if not hmac.compare_digest(_digest(signed), _digest(_signed(token, until, known=known))):
        return False
    return _until_ms(value) > now_ms


class Ended:
    """Tickets that were logged out. Of an event loop."""

    def __init__(self) -> None:
        self._tickets: set[str] = set()
        #: Whatever ends before then was given before the set was full, and has ended as well.
        self._until_ms = 0

    def add(self, ticket: str, now_ms: int) -> None:
        """One that holds."""
        self._tickets = {each for each in self._tickets if _until_ms(each) > now_ms}
        if len(self._tickets) == MOST_ENDED:
            self._tickets, self._until_ms = set(), now_ms + 1000 * HOLDS_S
        self._tickets.add(ticket)

    def __contains__(self, ticket: str) -> bool:
        return ticket in self._tickets or _until_ms(ticket) <= self._until_ms


def _until_ms(ticket: str) -> int:
    return int(ticket.partition(".")[0])


def cookie(name: str, token: str | None) -> str:
    """The cookie's name for the dashboard with this token."""
    return name if token is None else f"{name}_{signature(token, 'name of a cookie', '')[:8]}"


def _signed(token: str, until: str, *, known: bool) -> str:
    return signature(token, "known until" if known else "logged in until", until)


def signature(token: str, purpose: str, text: str) -> str:
    """Which only those can make who know the token."""
    what = f"celery-fdb dashboard, {purpose} {text}".encode(errors="replace")
    return urlsafe_b64encode(hmac.digest(token.encode(), what, "sha256")).decode().rstrip("=")


def _digest(text: str) -> bytes:
    """Of equal lengths, whatever was given."""
    return hashlib.sha256(text.encode(errors="replace")).digest()
