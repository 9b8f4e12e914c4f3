"""What all pages have in common: the guard around them, access, threads, forms, and the answer to an error.

Model of a request. The host must be one of ours, and another site's page may only link here. An unknown visitor is
asked to log in; requests for anything but a page get a 401. A form's origin is checked. Then the view runs in one of
the dashboard's threads, with an open broker, and renders its page there, because a template may be the first to read
what is stored. For any stored data and any request, a page answers, or gives one of these:

* 404: the target is not there (``HTTPException``); 405: not by this method;
* 422: the store answered, but refused, or holds bytes that can't be read;
* 503: the store is away or too slow, and the next request opens it anew; or all threads are busy.

The host is checked against DNS rebinding (``inspection/overview.py``). Another site's page can load nothing from here.
It could not see the answer, to an image's request say, but the answer would cost the store and the workers a question.
Headers tell the browser what a page may do. Scripts and styles come from our own files only; nothing inline runs, so
text from a message that slipped through the templates' escaping would still be text.

A form that another site sends in a person's name is refused. It must pass two checks. The browser says where a form
comes from (``Origin``): this must be our host, and a form without the header is accepted only if ``Sec-Fetch-Site``
does not contradict. And the form repeats the value of a cookie, which another site can neither read nor set.

Calls of the broker block, and the event loop must not: they run in a few threads, each answer within a time limit. A
call whose time is over goes on in its thread, at most until the broker's own timeouts end it; so a store that hangs
costs these threads and no more, and a visitor who asks meanwhile is told so in time. A call that has not begun by then
is dropped: it does not show that the store is slow, only that there are too many calls.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Generic, TypeVar
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match, Route

from celery_fdb import brokers
from celery_fdb.web.authentication import Authentication
from celery_fdb.web.request_context import FORM_COOKIE, READ_ONLY, RequestContext, fields_of
from kombu_fdb import Broker
from kombu_fdb.errors import (
    ForkedError,
    KombuFDBError,
    LimitExceeded,
    OptionError,
    StoreError,
    StoreUnavailable,
)
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.masking import masked_text

logger = logging.getLogger(__name__)

# -- around every answer -----------------------------------------------------------------------------------------------


#: The default headers of each answer.
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
    # Nothing of the store stays in a browser's cache.
    "cache-control": "no-store",
}


def other_site(headers: Headers) -> Response | None:
    """The refusal of a request that another site's page made; None for our own pages, and for a link."""
    if headers.get("sec-fetch-site", "none") in {"same-origin", "none"}:
        return None
    if headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest", "document") == "document":
        return None
    return PlainTextResponse("Pages of other sites can't use this dashboard; open it in a tab of its own.\n", 403)


# -- threads -----------------------------------------------------------------------------------------------------------


T = TypeVar("T")


BUSY = "nothing was done, as all threads are busy: too many pages are asked for at once, or the store hangs. Reload"


class ThreadPool:
    """The threads of one dashboard, for all of its event loops."""

    def __init__(self, number: int, timeout_s: float) -> None:
        self._number = number
        self._timeout_s = timeout_s
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def _pool(self) -> ThreadPoolExecutor:
        """The pool of this process. A pool inherited through a fork has no threads, but counts them as running."""
        found = self._pools.get(os.getpid())
        if found is None:
            made = ThreadPoolExecutor(self._number, thread_name_prefix="celery-fdb-web")
            found = self._pools.setdefault(os.getpid(), made)
        return found

    async def run(self, call: Callable[[], T]) -> T:
        """What the call returns or raises.

        Raises ``StoreUnavailable`` if the time is over, and ``KombuFDBError`` if the call never began.
        """
        begun = self._pool().submit(call)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(begun)
        except TimeoutError as error:
            if begun.cancelled():
                raise KombuFDBError(BUSY) from None
            raise StoreUnavailable(
                "the store did not answer in time",
                timeout_s=self._timeout_s,
                fix="Look at the store and at its load; what was asked for may still be going on.",
            ) from error

    def close(self) -> None:
        """Drop the calls that have not begun. The others end by themselves."""
        self._pool().shutdown(wait=False, cancel_futures=True)


class Shared(Generic[T]):
    """An answer that is asked for once for all visitors who come within some seconds. Thread-safe.

    ``waits``: a visitor who comes while another's question is open waits for its answer. Otherwise such a visitor gets
    the last answer, if there is one: so a store that hangs blocks one thread only.
    """

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self._lock = Lock()
        self._answer: T | None = None
        self._until_s = 0.0

    def get(self, ask: Callable[[], T], clock: Clock, seconds: float) -> T:
        """The last answer, or a new one if that is older than so many seconds. Raises what ``ask`` raises."""
        if self._lock.acquire(blocking=self._waits or self._answer is None):
            try:
                if self._answer is None or clock.monotonic() >= self._until_s:
                    self._answer = ask()
                    self._until_s = clock.monotonic() + seconds
            finally:
                self._lock.release()
        assert self._answer is not None
        return self._answer


# -- pages -------------------------------------------------------------------------------------------------------------


View = Callable[[RequestContext, Broker], Response]
#: Errors that mean that the broker can't be used. After any other error the store has answered.
AWAY = (StoreError, OptionError, ForkedError)
#: Errors that code raises when it reads bytes that our version would not have written.
UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, struct.error)
#: The most bytes of a form, and of a form from an unknown visitor. A form has :data:`FORM_S` to arrive.
MOST_BYTES, MOST_OF_STRANGERS = 1_000_000, 10_000
MOST_FIELDS = 2_000
#: Methods that change nothing.
READING = frozenset({"GET", "HEAD"})
FORM_S = 20.0


class Pages:
    """The endpoints of views."""

    def __init__(self, authentication: Authentication, lazy_broker: brokers.LazyBroker, threads: ThreadPool) -> None:
        self._authentication = authentication
        self._lazy_broker = lazy_broker
        self._threads = threads

    async def enter(self, view: Callable[[RequestContext], Response], request: Request) -> Response:
        """A form that needs no store, for visitors who are not known yet."""
        context, _ = await self._authentication.context(request)
        refusal = await _take_form(context, MOST_OF_STRANGERS)
        return view(context) if refusal is None else refusal

    async def act(self, view: View, request: Request) -> Response:
        """A form, and the question that it leads to, for users who may act."""
        context, refusal = await self._authentication.context(request)
        if refusal is not None:
            return refusal
        if not context.may_act:
            return context.page("error", 403, title="Not allowed", text=READ_ONLY)
        if request.method in READING:
            context.fields = fields_of(request.query_params.multi_items())
        else:
            refusal = await _take_form(context)
        return await self._run(view, self._threads, context) if refusal is None else refusal

    async def show(self, view: View, request: Request, *, threads: ThreadPool | None = None) -> Response:
        """A page that changes nothing. ``threads``: the page's own."""
        context, refusal = await self._authentication.context(request)
        return refusal if refusal is not None else await self._run(view, threads or self._threads, context)

    async def nowhere(self, request: Request, _: Exception) -> Response:
        """The answer for an address that does not exist."""
        return await self._error(request, 404, "Not here", "There is no such page.")

    async def otherwise(self, request: Request, _: Exception) -> Response:
        """The answer for a method that an address does not take."""
        routes = [each for each in request.app.routes if each.matches(request.scope)[0] != Match.NONE]
        takes = {method for each in routes if isinstance(each, Route) for method in each.methods or ()}
        allow = ", ".join(sorted(takes))
        made = await self._error(request, 405, "Method not allowed", f"This address takes {allow} only.")
        made.headers["allow"] = allow
        return made

    async def broken(self, request: Request, _: Exception) -> Response:
        """The answer after an error that no code here expects, and the server logs."""
        return await self._error(request, 500, "Internal error", "The server's log has the details.")

    async def _error(self, request: Request, status: int, title: str, text: str) -> Response:
        context, refusal = await self._authentication.context(request)
        return refusal or context.page("error", status, title=title, text=text)

    async def _run(self, view: View, threads: ThreadPool, context: RequestContext) -> Response:
        try:
            made = await threads.run(partial(answer, view, context, self._lazy_broker))
        except StoreUnavailable as error:  # the time is over
            self._lazy_broker.forget()
            made = _unavailable(context, error)
        except KombuFDBError as error:
            made = context.page("error", 503, title="Busy", text=str(error))
        self._authentication.remember(context, made)
        return made


# -- forms -------------------------------------------------------------------------------------------------------------


FORGED = (
    "The form did not come from a page of this dashboard, or that page is too old. Reload the page and try again. "
    "Behind a proxy, make it pass the Host header on."
)


async def _take_form(context: RequestContext, most: int = MOST_BYTES) -> Response | None:
    """Read the form into the context's fields. Returns a refusal, or None if the form is accepted."""
    request = context.request
    fields = await form(request, most)
    if fields is None:
        text = "The form holds more than is taken at once, or came too slowly."
        return context.page("error", 413, title="Too much", text=text)
    context.fields = fields_of(fields)
    if _is_forged(request.headers, context.kept(FORM_COOKIE), context.sent(context.form_field)):
        return context.page("error", 403, title="Refused", text=FORGED)
    return None


async def form(request: Request, most: int) -> list[tuple[str, str]] | None:
    """The fields of the form; None if it is larger than ``most`` bytes, has too many fields, or is incomplete."""
    body = bytearray()
    try:
        async with asyncio.timeout(FORM_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    return None
        text = bytes(body).decode("latin-1")
        return parse_qsl(text, keep_blank_values=True, errors="replace", max_num_fields=MOST_FIELDS)
    except (ValueError, ClientDisconnect, TimeoutError):
        return None


_SHORTEST = 32


def _is_forged(headers: Headers, cookie: str, field: str) -> bool:
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


# -- what a view answers -----------------------------------------------------------------------------------------------


def answer(view: View, context: RequestContext, lazy_broker: brokers.LazyBroker) -> Response:
    """The view's page, or a page that says why there is none. Blocks."""
    try:
        return view(context, lazy_broker.broker())
    except HTTPException as error:
        return context.page("error", error.status_code, title="Not here", text=error.detail)
    except KombuFDBError as error:
        if isinstance(error, AWAY) and not isinstance(error, LimitExceeded):
            lazy_broker.forget()
            return _unavailable(context, error)
        return _unreadable(context, str(error))
    except UNREADABLE as error:
        logger.exception("a page of the broker can't be shown")
        return _unreadable(context, masked_text(f"{type(error).__name__}: {error}"))  # a repr may hold the bytes


def _unreadable(context: RequestContext, reason: str) -> Response:
    return context.page("unreadable", 422, title="Unreadable", reason=reason, acted=context.request.method == "POST")


def _unavailable(context: RequestContext, error: KombuFDBError) -> Response:
    title, text, fix = "The store is away", error.diagnosis, error.attributes.get("fix")
    if isinstance(error, brokers.NoBrokerYet):
        title, text = "Nothing here yet", f"{error.text.capitalize()} at {error.attributes['path']}"
    return context.page("unavailable", 503, title=title, text=text, fix=fix, acted=context.request.method == "POST")
