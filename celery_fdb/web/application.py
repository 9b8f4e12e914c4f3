"""The dashboard as one ASGI application, whose addresses work under any prefix.

Its broker is opened when first used, once per process, and again after it has failed.

It never consumes, so it has no session. A broker file that does not exist is not created: its path may be a typo.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from celery import Celery
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from celery_fdb import brokers
from celery_fdb.inspection.overview import LOOPBACK, is_ours
from celery_fdb.web.authentication import Authentication
from celery_fdb.web.live import streaming
from celery_fdb.web.page import HEADERS, Pages, Shared, ThreadPool, other_site
from celery_fdb.web.pages import actions, messages, queues, schedules, tasks, workers
from celery_fdb.web.request_context import HERE, PATHS
from celery_fdb.web.settings import DashboardSettings, Login


def opening(settings: DashboardSettings) -> brokers.LazyBroker:
    """The dashboard's broker, not open yet: it opens within ``connect_timeout_s``."""
    options = {"connect_timeout": settings.connect_timeout_s, **settings.options}
    return brokers.LazyBroker(lambda: brokers.open_existing(settings.url, **options))


#: The view of each page that changes nothing, by the page's name in ``PATHS``.
SHOWN = {
    "overview": queues.overview,
    "queues": queues.queues,
    "queue": queues.queue,
    "keys": queues.keys,
    "messages": messages.messages,
    "message": messages.message,
    "dead": messages.dead,
    "causes": messages.causes,
    "tasks": tasks.tasks,
    "runs": tasks.runs,
    "task": tasks.task,
    "workflows": tasks.workflows,
    "workflow": tasks.workflow,
    "schedules": schedules.schedules,
    "sessions": workers.sessions,
}
FILES = StaticFiles(directory=HERE / "static")
#: Static files have the version in their address.
A_YEAR = "public, max-age=31536000, immutable"


def dashboard(
    broker: str | Celery,
    *,
    options: Mapping[str, Any] | None = None,
    app: Celery | None = None,
    token: str | None = None,
    user: Login | None = None,
    anonymous: bool = False,
    login_url: str | None = None,
    read_only: bool = True,
    show_bodies: bool = False,
    hosts: Sequence[str] | None = None,
    **further: Any,
) -> ASGIApp:
    """The application.

    ``broker``: a Celery app, whose broker it is, or a URL with ``options`` as ``broker_transport_options``. ``app``:
    with a URL, the Celery app whose results and workers belong to it.

    Who may open it, one of: ``token``, which the login page asks for; ``user``, a function (or coroutine) that is
    given the request and returns a name or a :class:`~celery_fdb.web.User`, or None for strangers, who are led to
    ``login_url`` if there is one; ``anonymous=True`` for all who can connect.

    ``read_only``: nothing can be changed. ``show_bodies``: False hides messages' bodies and arguments from all users.
    ``hosts``: by which names browsers may ask for it (``["tools.example.com"]``); None: by any, but with ``anonymous``
    only as localhost or by an address, as else any web page could ask in the name of a person at this machine.

    ``further``, rarely needed: ``page_size`` (rows of a page), ``interval_s`` (between live updates),
    ``most_streams`` (pages that are live at a time), ``timeout_s`` (for which a page waits), ``connect_timeout_s``
    (for the store to open), ``threads`` (for calls of the store).

    Raises ``OptionError``.
    """
    url, configured = brokers.broker_of(broker) if isinstance(broker, Celery) else (broker, {})
    configured.pop("connect_timeout", None)  # the workers'; pages wait for ``connect_timeout_s``
    settings = DashboardSettings.of(
        url,
        options={**configured, **(options or {})},
        app=app or (broker if isinstance(broker, Celery) else None),
        token=token.strip() if isinstance(token, str) else token,
        user=user,
        anonymous=anonymous,
        login_url=login_url,
        read_only=read_only,
        show_bodies=show_bodies,
        hosts=(LOOPBACK if anonymous else None) if hosts is None else hosts,
        **further,
    )
    return guarded(_assembled(settings), settings.hosts)


def guarded(app: ASGIApp, hosts: Collection[str] | None) -> ASGIApp:
    """The application with the guard around it: see ``page.py``.

    ``hosts``: names without ports; None: any name, as the application it is mounted into has checked already.
    """
    names = None if hosts is None else {each.lower() for each in hosts}

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        headers = Headers(scope=scope)
        is_known = names is None or is_ours(headers.get("host", ""), names)
        answer = other_site(headers) or (app if is_known else _misdirected)
        await answer(scope, receive, send_guarded)

    return guard


_misdirected = PlainTextResponse(
    "This dashboard is not known by that name. Open it as http://127.0.0.1, start it with --allow-host NAME, or pass "
    "hosts=[...] to dashboard().\n",
    status_code=421,
)


def _assembled(settings: DashboardSettings) -> Starlette:
    authentication, lazy_broker = Authentication(settings), opening(settings)
    threads, asking = ThreadPool(settings.threads, settings.timeout_s), ThreadPool(1, settings.timeout_s)
    pages = Pages(authentication, lazy_broker, threads)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        """For an application that runs by itself; a mounted one ends with the process."""
        yield
        lazy_broker.forget()
        threads.close()
        asking.close()

    stream = streaming(settings, authentication, lazy_broker, threads)
    asked = partial(workers.workers, Shared(waits=True))
    routes = [
        *(Route(PATHS[name], partial(pages.show, view), methods=["GET"]) for name, view in SHOWN.items()),
        Route(PATHS["act"], partial(pages.act, actions.act), methods=["GET", "POST"]),
        Route(PATHS["login"], authentication.greet, methods=["GET"]),
        Route(PATHS["login"], partial(pages.enter, authentication.admit), methods=["POST"]),
        Route(PATHS["logout"], partial(pages.enter, authentication.dismiss), methods=["POST"]),
        Route(f"{PATHS['static']}/{{path:path}}", _static, methods=["GET"]),
        Route(PATHS["events"], stream, methods=["GET"]),
        Route(PATHS["workers"], partial(pages.show, asked, threads=asking), methods=["GET"]),
    ]
    errors = {404: pages.nowhere, 405: pages.otherwise, 500: pages.broken}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=errors)


async def _static(request: Request) -> Response:
    answer = await FILES.get_response(request.path_params["path"], request.scope)
    answer.headers["cache-control"] = A_YEAR
    return answer
