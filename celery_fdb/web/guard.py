"""The guard around every page: hosts, security headers, and forms that another site sends.

A form that another site sends in a person's name is refused.

Two checks, and both must pass. The browser says where a form comes from (``Origin``): it has to be this host, and a
form without one is taken only if ``Sec-Fetch-Site`` does not contradict. And the form repeats a value that stands in a
cookie, which another site can neither read nor set.

Around every answer: the host has to be one of ours, and headers tell the browser what a page may do.

The host is checked against DNS rebinding (``inspection/overview.py``). Another site's page may lead here by a link, and
load nothing from here: it can't see the answer to an image's request, but making it costs the store, and the workers, a
question.
Scripts and styles come from our own files only; nothing inline runs, so text from a message that slipped through the
templates' escaping would still be text.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from celery_fdb.inspection.overview import is_ours

# -- forms -------------------------------------------------------------------------------------------------------------


COOKIE = "celery_fdb_form"
FIELD = "form_token"
_SHORTEST = 32


def is_forged(headers: Headers, cookie: str, field: str) -> bool:
    """Whether to refuse a POST with this cookie and this field."""
    if not _comes_from_here(headers):
        return True
    if len(cookie) < _SHORTEST:
        return True
    return not hmac.compare_digest(cookie.encode(errors="replace"), field.encode(errors="replace"))


def _comes_from_here(headers: Headers) -> bool:
    origin = headers.get("origin")
    if origin is None:
        return headers.get("sec-fetch-site", "same-origin") in {"same-origin", "none"}
    try:
        return urlsplit(origin).netloc.lower() == headers.get("host", "").lower() != ""
    except ValueError:
        return False


# -- every answer ------------------------------------------------------------------------------------------------------


HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # With "no-referrer" browsers would send forms with the origin "null".
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
#: Of what is in the store nothing stays in a browser's cache.
KEEP_NOTHING = "no-store"


class Guard:
    """See the module."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...] | None) -> None:
        """``hosts``: names without ports; None: any, as whatever it is mounted into has looked already."""
        self._app = app
        self._hosts = None if hosts is None else {each.lower() for each in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("cache-control", KEEP_NOTHING)
            await send(message)

        headers = Headers(scope=scope)
        is_ours_ = self._hosts is None or is_ours(headers.get("host", ""), self._hosts)
        app = foreign if is_of_another_site(headers) else self._app if is_ours_ else _misdirected
        await app(scope, receive, send_guarded)


def is_of_another_site(headers: Headers) -> bool:
    """Whether a page from elsewhere asks, and no person who follows a link. Forms have a check of their own."""
    if headers.get("sec-fetch-site", "none") in {"same-origin", "none"}:
        return False
    return headers.get("sec-fetch-mode") != "navigate" or headers.get("sec-fetch-dest", "document") != "document"


foreign = PlainTextResponse("Pages of other sites can't use this dashboard; open it in a tab of its own.\n", 403)
_misdirected = PlainTextResponse(
    "This dashboard is not known by that name. Open it as http://127.0.0.1, start it with --allow-host NAME, or pass "
    "hosts=[...] to dashboard().\n",
    status_code=421,
)
