"""Around every answer: the host has to be one of ours, and headers tell the browser what a page may do.

The host is checked against DNS rebinding (``inspection/hosts.py``). Another site's page may lead here by a link, and
load nothing from here: it can't see the answer to an image's request, but making it costs the store, and the workers, a
question.
Scripts and styles come from our own files only; nothing inline runs, so text from a message that slipped through the
templates' escaping would still be text.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from celery_fdb.inspection.hosts import is_ours

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
