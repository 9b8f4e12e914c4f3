"""What all pages have in common: who may see them, the store, and what is shown if something fails.

Model of a request. An unknown visitor is asked to log in (401 for what is no page). A form's origin is
checked. Then the view runs in one of the dashboard's threads, with an open broker, and its page is rendered there, as
a template may be the first to look at what is stored. Whatever is stored and whatever is asked for, a page answers:

* 404: what was asked for is not there (:class:`NotThere`); 405: not by this method;
* 422: the store answered, but refused, or holds bytes that can't be read;
* 503: the store is away or too slow, and the next request opens it anew; or all threads are busy.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from urllib.parse import parse_qs

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from celery_fdb.brokers import Holding, NoBrokerYet
from celery_fdb.operations.action import received
from celery_fdb.web import guard
from celery_fdb.web.authentication import Authentication
from celery_fdb.web.threads import Busy, Threads
from celery_fdb.web.visit import READ_ONLY, Visit
from kombu_fdb import Broker
from kombu_fdb.errors import ForkedError, KombuFDBError, LimitExceeded, OptionError, StoreError
from kombu_fdb.primitives.masking import masked_text

logger = logging.getLogger(__name__)

View = Callable[[Visit, Broker], Response]
Endpoint = Callable[[Request], Awaitable[Response]]
#: Else the store has answered, and something in it, or in the request, is not as it should be.
AWAY = (StoreError, OptionError, ForkedError)
#: What reading bytes of another shape than ours ends in, wherever that happens.
UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, struct.error)
#: Of a form, and of one whose sender is not known yet; seconds in which it has to be there.
MOST_BYTES, MOST_OF_STRANGERS = 1_000_000, 10_000
MOST_FIELDS = 2_000
#: Methods that change nothing.
READING = frozenset({"GET", "HEAD"})
FORM_S = 20.0


class NotThere(Exception):
    """404. Its text is shown."""


class Pages:
    """Makes endpoints of views."""

    def __init__(self, authentication: Authentication, holding: Holding, threads: Threads) -> None:
        self._authentication = authentication
        self._holding = holding
        self._threads = threads

    def shows(self, view: View, threads: Threads | None = None) -> Endpoint:
        """A page that changes nothing. ``threads``: of its own."""
        return partial(self._answer, view, threads or self._threads)

    def acts(self, view: View) -> Endpoint:
        """A form's target, and the question that it leads to, for those who may act."""
        return partial(self._act, view)

    def enters(self, view: Callable[[Visit], Response]) -> Endpoint:
        """A form's target that needs no store, for visitors who are not known yet."""
        return partial(self._enter, view)

    async def _enter(self, view: Callable[[Visit], Response], request: Request) -> Response:
        visit, _ = await self._authentication.visit(request)
        refusal = await _take_form(visit, MOST_OF_STRANGERS)
        return view(visit) if refusal is None else refusal

    async def _act(self, view: View, request: Request) -> Response:
        visit, refusal = await self._authentication.visit(request)
        if refusal is not None:
            return refusal
        if not visit.may_act:
            return visit.page("error", 403, title="Not allowed", text=READ_ONLY)
        if request.method in READING:
            visit.fields = asked_of(request)
        else:
            refusal = await _take_form(visit)
        return await self._run(view, self._threads, visit) if refusal is None else refusal

    async def _answer(self, view: View, threads: Threads, request: Request) -> Response:
        visit, refusal = await self._authentication.visit(request)
        return refusal if refusal is not None else await self._run(view, threads, visit)

    async def nowhere(self, request: Request) -> Response:
        """An address that there is not."""
        visit, refusal = await self._authentication.visit(request)
        if refusal is not None:
            return refusal
        return visit.page("error", 404, title="Not here", text="There is no such page.")

    async def otherwise(self, request: Request, methods: Collection[str]) -> Response:
        """An address that answers to these methods, and not to this one."""
        visit, refusal = await self._authentication.visit(request)
        allow = ", ".join(sorted(methods))
        made = refusal or visit.page("error", 405, title="Method not allowed", text=f"This address takes {allow} only.")
        made.headers["allow"] = allow
        return made

    async def broken(self, request: Request) -> Response:
        """An error that nothing here expects."""
        visit, refusal = await self._authentication.visit(request)
        if refusal is not None:
            return refusal
        return visit.page("error", 500, title="A mistake of ours", text="The server's log has the details.")

    async def _run(self, view: View, threads: Threads, visit: Visit) -> Response:
        try:
            made = await threads.run(partial(answer, view, visit, self._holding))
        except Busy as error:
            made = visit.page("error", 503, title="Busy", text=str(error))
        except KombuFDBError as error:  # the time is over
            self._holding.forget()
            made = _unavailable(visit, error)
        self._authentication.remember(visit, made)
        return made


FORGED = (
    "The form did not come from a page of this dashboard, or that page is too old. Reload the page and try again. "
    "Behind a proxy, make it pass the Host header on."
)


async def _take_form(visit: Visit, most: int = MOST_BYTES) -> Response | None:
    """Its fields are the visit's then; or what to answer instead."""
    request = visit.request
    fields = await form(request, most)
    if fields is None:
        text = "The form holds more than is taken at once, or came too slowly."
        return visit.page("error", 413, title="Too much", text=text)
    visit.fields = fields_of(fields)
    if guard.is_forged(request.headers, visit.kept(guard.COOKIE), visit.sent(guard.FIELD)):
        return visit.page("error", 403, title="Refused", text=FORGED)
    return None


def fields_of(form: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Of a form as it was sent, with what had to be quoted as it was."""
    return {received(name, "")[0]: [received(name, each)[1] for each in given] for name, given in form.items()}


def asked_of(request: Request) -> dict[str, list[str]]:
    """The same of an address."""
    found: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        found.setdefault(name, []).append(value)
    return fields_of(found)


async def form(request: Request, most: int) -> dict[str, list[str]] | None:
    """What was sent; None for more than a form of ours sends, or for a part of it."""
    body = bytearray()
    try:
        async with asyncio.timeout(FORM_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    return None
        text = bytes(body).decode("latin-1")
        return parse_qs(text, keep_blank_values=True, errors="replace", max_num_fields=MOST_FIELDS)
    except (ValueError, ClientDisconnect, TimeoutError):
        return None


def answer(view: View, visit: Visit, holding: Holding) -> Response:
    """The page that a view makes, or one that says why there is none. Blocks."""
    try:
        return view(visit, holding.broker())
    except NotThere as error:
        return visit.page("error", 404, title="Not here", text=str(error))
    except KombuFDBError as error:
        if isinstance(error, AWAY) and not isinstance(error, LimitExceeded):
            holding.forget()
            return _unavailable(visit, error)
        return _unreadable(visit, str(error))
    except UNREADABLE as error:
        logger.exception("a page of the broker can't be shown")
        return _unreadable(visit, masked_text(f"{type(error).__name__}: {error}"))  # a repr may hold the bytes


def _unreadable(visit: Visit, reason: str) -> Response:
    return visit.page("unreadable", 422, title="Unreadable", reason=reason, acted=visit.request.method == "POST")


def _unavailable(visit: Visit, error: KombuFDBError) -> Response:
    fix = error.attributes.get("fix")
    text = str(error).removesuffix(str(fix)).rstrip(". ") if fix else str(error)
    title = "The store is away"
    if isinstance(error, NoBrokerYet):
        title, text = "Nothing here yet", f"{error.text.capitalize()} at {error.attributes['path']}"
    return visit.page("unavailable", 503, title=title, text=text, fix=fix, acted=visit.request.method == "POST")
