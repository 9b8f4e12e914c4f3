"""The user of a request, known by the login page's cookie or by ``user=``, or anonymous; and the login page.

``request_context.py`` says what a known user may do, and ``page.py`` checks both before each page. In Django, the
project's own users and permissions apply (``contrib/django/pages.py``).

An unknown visitor is sent to the login page, or to ``login_url``; requests for anything but a page get a 401.

Model of the cookie. A visitor who types the token gets a cookie with the time of its expiry, signed with the token. The
cookie is valid in every process that knows the token, and a new token invalidates all cookies. It is sent to this
site's own pages only (``SameSite=Strict``), and scripts can't read it; but browsers send it to all ports of a host, so
its name is one of its token's own, and logging out ends it for every copy of it: each process keeps those that it was
told to end.

Guessing the token is slowed down without locking out the rightful user.

Model of the attempts. Each address has :data:`FREE` attempts, and one more every :data:`AGAIN_S` seconds. A further
attempt is refused unseen, and does not prolong the wait. A browser in which a user has logged in before (a cookie says
so) has attempts of its own, which others behind the same proxy can't use up. A login gives all attempts back.

Each process remembers :data:`MOST` addresses. A new one replaces the one that was quiet for longest, which has all its
attempts again. So an attacker with very many addresses is not slowed down: what keeps the dashboard shut is the
length of the token.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import math
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import OrderedDict
from ipaddress import IPv6Address, IPv6Network, ip_address
from threading import Lock

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from celery_fdb.operations.action import log, log_audit
from celery_fdb.web.request_context import FORM_COOKIE, RequestContext, signature
from celery_fdb.web.settings import DashboardSettings, User

#: The users with the token, every visitor without a login, and a visitor who is not known.
BY_TOKEN, ANONYMOUS, UNKNOWN = User("token"), User("anybody"), User("", may_act=False, may_see_bodies=False)
#: The cookie that carries one line from an action to the page behind it.
NOTICE = "celery_fdb_notice"
LONGEST_NOTICE = 2_000


class Authentication:
    """The users of one dashboard: who a visitor is, the login page, and the attempts to pass it."""

    def __init__(self, settings: DashboardSettings) -> None:
        self._settings = settings
        #: By address or browser, when each will have all its attempts again (a token bucket, as GCRA keeps it).
        self._full_s: OrderedDict[str, float] = OrderedDict()
        self._lock = Lock()
        #: The tickets that were logged out. For one event loop.
        self._ended: set[str] = set()
        #: Tickets that expire by then count as logged out, too: they were issued before the set was full.
        self._ended_until_ms = 0

    async def context(self, request: Request) -> tuple[RequestContext, Response | None]:
        """The context, and what to answer instead of the page if the visitor is not known."""
        context = RequestContext(request, self._settings, UNKNOWN, log_audit(""))
        user = await self._user(context)
        cookie = context.kept(FORM_COOKIE)
        context.form_token = cookie if len(cookie) >= 32 and cookie.isascii() else secrets.token_urlsafe(32)
        context.user, context.notice = user or UNKNOWN, _notice(context)
        context.audit = log_audit(context.user.name)
        return context, self._stranger(context) if user is None else None

    async def _user(self, context: RequestContext) -> User | None:
        settings = self._settings
        if settings.token is not None:
            return BY_TOKEN if self._is_logged_in(context, settings.token) else None
        if settings.user is None:
            return ANONYMOUS
        found = settings.user(context.request)
        known = await found if inspect.isawaitable(found) else found
        user = User(known) if isinstance(known, str) else known
        if not user:
            return None
        if not isinstance(user, User):
            raise TypeError(f"user= must return a User, a name, or None for a stranger, not {type(user).__name__}")
        return user if user.name else None

    def _is_logged_in(self, context: RequestContext, token: str) -> bool:
        ticket = context.kept(COOKIE)
        return holds(token, ticket, self._settings.clock.wall_ms()) and not self.has_ended(ticket)

    def has_ended(self, ticket: str) -> bool:
        """Whether the ticket was logged out."""
        return ticket in self._ended or _until_ms(ticket) <= self._ended_until_ms

    def end(self, ticket: str) -> None:
        """Log out a ticket that still holds."""
        now_ms = self._settings.clock.wall_ms()
        self._ended = {each for each in self._ended if _until_ms(each) > now_ms}
        if len(self._ended) == MOST_ENDED:
            self._ended, self._ended_until_ms = set(), now_ms + 1000 * HOLDS_S
        self._ended.add(ticket)

    def _stranger(self, context: RequestContext) -> Response:
        request, target = context.request, self._settings.login_url
        if "text/html" not in request.headers.get("accept", "") or context.is_part:
            return PlainTextResponse("log in first\n", 401)
        if request.method != "GET":
            return self._too_late(context)
        if self._settings.token is not None:
            path = context.url("overview").rstrip("/") + request.scope["path"].removeprefix(context.root)
            query = f"?{request.url.query}" if request.url.query else ""
            return RedirectResponse(context.url("login", next=path + query), 303)
        if target is not None:
            return RedirectResponse(target, 303)
        return context.page("error", 403, title="Not allowed", text="You are not logged in. Log in, and come back.")

    def _too_late(self, context: RequestContext) -> Response:
        """The answer to a form whose user's login expired while the page was open."""
        if self._settings.token is None:
            return context.page("error", 401, title="Log in first", text="You are not logged in. Nothing was changed.")
        answer = context.page("login", 401, next="", problem="You are logged out. Nothing was changed.")
        self.remember(context, answer)
        return answer

    def remember(self, context: RequestContext, answer: Response) -> None:
        """Set the cookies with the value that the page's forms repeat, and with one line for the next page."""
        if context.kept(FORM_COOKIE) != context.form_token:
            context.keep(answer, FORM_COOKIE, context.form_token, None)
        if context.said:
            _notify(context, answer, context.said)
        elif context.notice and answer.media_type == "text/html":
            context.drop(answer, NOTICE)

    # -- the login page ------------------------------------------------------------------------------------------------

    async def greet(self, request: Request) -> Response:
        """The login page."""
        context, _ = await self.context(request)
        answer = context.page("login", next=context.asked("next"), problem="")
        self.remember(context, answer)
        return answer

    def admit(self, context: RequestContext) -> Response:
        """Take the login page's form, whose origin was checked."""
        token, now_ms = self._settings.token, self._settings.clock.wall_ms()
        host = context.request.client.host if context.request.client else "?"
        who = self._who(context, host)
        wait_s = self.take_attempt(who)
        if wait_s:
            return _too_many(context, wait_s)
        if token is None or not is_token(token, context.sent("token").strip()):
            log().warning("a wrong token from %s", ascii(host)[1:-1])
            return context.page("login", 403, next=context.sent("next"), problem="That is not the token.")
        with self._lock:
            self._full_s.pop(who, None)
        log().info("logged in from %s", ascii(host)[1:-1])
        answer = context.redirect(context.way_back(context.sent("next")))
        context.keep(answer, COOKIE, new_ticket(token, now_ms), HOLDS_S)
        context.keep(answer, KNOWN_COOKIE, new_ticket(token, now_ms, known=True), KNOWN_S)
        return answer

    def _who(self, context: RequestContext, host: str) -> str:
        """Whose attempts to count: the browser's if a user has logged in there before, else the address's."""
        token, cookie = self._settings.token, context.kept(KNOWN_COOKIE)
        now_ms = self._settings.clock.wall_ms()
        is_known = token is not None and holds(token, cookie, now_ms, known=True)
        return f"browser {_digest(cookie).hex()}" if is_known else address_of(host)

    def take_attempt(self, who: str) -> float:
        """Use up one attempt and return 0; or, without one left, return the seconds until the next. Thread-safe."""
        with self._lock:
            now_s = self._settings.clock.monotonic()
            full_s = max(self._full_s.get(who, now_s), now_s) + AGAIN_S
            wait_s = full_s - now_s - FREE * AGAIN_S
            if wait_s > 0:
                return wait_s
            self._full_s[who] = full_s
            self._full_s.move_to_end(who)
            if len(self._full_s) > MOST:
                self._full_s.popitem(last=False)
            return 0.0

    def dismiss(self, context: RequestContext) -> Response:
        """Log out. Every copy of this browser's cookie ends with it."""
        token, answer = self._settings.token, context.redirect(context.url("login"))
        if token is not None and self._is_logged_in(context, token):
            self.end(context.kept(COOKIE))
        context.drop(answer, COOKIE)
        return answer


def _too_many(context: RequestContext, wait_s: float) -> Response:
    seconds = str(math.ceil(wait_s))
    answer = context.page("login", 429, next=context.sent("next"), problem=f"Too many attempts. Wait {seconds} s.")
    answer.headers["retry-after"] = seconds
    return answer


# -- the token ---------------------------------------------------------------------------------------------------------


COOKIE = "celery_fdb_session"
#: How long a browser is not asked for the token again.
HOLDS_S = 12 * 3600
#: Marks a browser in which a user has logged in before. It gives no access.
KNOWN_COOKIE = "celery_fdb_known"
KNOWN_S = 90 * 86_400
#: Logged-out tickets that a process remembers.
MOST_ENDED = 10_000


def is_token(token: str, given: str) -> bool:
    """Whether ``given`` is the token. The time that this takes does not tell how much of it is right."""
    return hmac.compare_digest(_digest(token), _digest(given))


def new_ticket(token: str, now_ms: int, *, known: bool = False) -> str:
    """The value of the login cookie; with ``known``, of the cookie that marks a browser with an earlier login."""
    until = f"{now_ms + 1000 * (KNOWN_S if known else HOLDS_S)}.{secrets.token_urlsafe(9)}"
    return f"{until}.{_signed(token, until, known=known)}"


def holds(token: str, value: str, now_ms: int, *, known: bool = False) -> bool:
    """Whether the cookie was signed with this token and has not expired."""
    until, _, signed = value.rpartition(".")
    if not hmac.compare_digest(_digest(signed), _digest(_signed(token, until, known=known))):
        return False
    return _until_ms(value) > now_ms


def _until_ms(ticket: str) -> int:
    return int(ticket.partition(".")[0])


def _signed(token: str, until: str, *, known: bool) -> str:
    return signature(token, "known until" if known else "logged in until", until)


def _digest(text: str) -> bytes:
    """A digest, for comparisons: all digests have the same length."""
    return hashlib.sha256(text.encode(errors="replace")).digest()


# -- attempts ----------------------------------------------------------------------------------------------------------


FREE, AGAIN_S = 10, 5.0
MOST = 1_000
#: The attempts that one subscriber has.
IPV6_PREFIX = 64


def address_of(host: str) -> str:
    """The visitor's address; for IPv6 the network, because one subscriber has a whole network."""
    try:
        found = ip_address(host)
    except ValueError:
        return host[:100]
    if isinstance(found, IPv6Address):
        return str(found.ipv4_mapped or IPv6Network((found, IPV6_PREFIX), strict=False))
    return str(found)


# -- one line from an action to the next page --------------------------------------------------------------------------


def _notify(context: RequestContext, answer: Response, text: str) -> None:
    """Have the next page show this line."""
    value = urlsafe_b64encode(text[:LONGEST_NOTICE].encode(errors="replace")[:LONGEST_NOTICE]).decode()
    context.keep(answer, NOTICE, f"{value}.{_seal(context, value)}", 60)


def _notice(context: RequestContext) -> str:
    """The line for this page; "" for a forged one, as browsers also send cookies of other ports of this host."""
    value, _, seal = context.kept(NOTICE).rpartition(".")
    if not is_token(_seal(context, value), seal):
        return ""
    return urlsafe_b64decode(value.encode()).decode(errors="replace")


def _seal(context: RequestContext, value: str) -> str:
    """The seal of a line. Without a token, anyone who can set a cookie can forge it."""
    return signature(context.settings.token or "", "notice", value)
