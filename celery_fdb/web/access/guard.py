"""Around every answer: the host has to be one of ours, and headers tell the browser what a page may do.

The host is checked against DNS rebinding: a page of another site whose name was made to lead to this machine is
refused, since the browser still sends that site's name. Another site's page may lead here by a link, and load nothing
from here: it can't see the answer to an image's request, but making it costs the store, and the workers, a question.
Scripts and styles come from our own files only; nothing inline runs, so text from a message that slipped through the
templates' escaping would still be text.
"""

from __future__ import annotations

from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["LOOPBACK", "Guard"]

#: How a browser on this machine calls it.
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
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
        """``hosts``: names without ports; None: any, as whatever it is mounted into has looked already.

        An IP address is always ours: only a name can be made to lead elsewhere.
        """
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
        app = self._app if self._is_ours(headers.get("host", "")) else _misdirected
        app = _foreign if _is_of_another_site(headers) else app
        await app(scope, receive, send_guarded)

    def _is_ours(self, host: str) -> bool:
        if self._hosts is None:
            return True
        head, _, port = host.lower().rpartition(":")
        name = head if head and port.isdigit() else host.lower()
        return name in self._hosts or _is_address(name)


def _is_of_another_site(headers: Headers) -> bool:
    """Whether a page from elsewhere asks, and no person who follows a link. Forms have a check of their own."""
    if headers.get("sec-fetch-site", "none") in {"same-origin", "none"}:
        return False
    return headers.get("sec-fetch-mode") != "navigate" or headers.get("sec-fetch-dest", "document") != "document"


def _is_address(name: str) -> bool:
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


_foreign = PlainTextResponse("Pages of other sites can't use this dashboard; open it in a tab of its own.\n", 403)
_misdirected = PlainTextResponse(
    "This dashboard is not known by that name. Open it as http://127.0.0.1, start it with --allow-host NAME, or pass "
    "hosts=[...] to dashboard().\n",
    status_code=421,
)
