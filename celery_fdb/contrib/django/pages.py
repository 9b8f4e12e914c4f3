"""The dashboard (:mod:`celery_fdb.web`) as a Django view, with Django's users, permissions, CSRF, messages and log.

The view blocks, so it serves under WSGI as under ASGI; numbers are polled, as nothing streams under WSGI. It needs the
libraries of ``pip install 'celery-fdb[django]'``, and is imported when a page is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import tzinfo
from functools import partial
from typing import Any

from django.apps import apps
from django.conf import settings as django_settings
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.middleware.csrf import get_token
from django.urls import get_script_prefix
from django.utils import timezone
from django.views.static import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from celery_fdb.contrib.django import conf, models
from celery_fdb.operations.action import Audit, log_audit
from celery_fdb.web.application import A_YEAR, SHOWN
from celery_fdb.web.live import LiveStats
from celery_fdb.web.page import HEADERS, READING, Shared, answer, other_site
from celery_fdb.web.pages import actions, workers
from celery_fdb.web.request_context import HERE, PATHS, READ_ONLY, RequestContext, fields_of
from celery_fdb.web.settings import DashboardSettings, User
from kombu_fdb import Broker
from kombu_fdb.errors import OptionError


def poll(stats: LiveStats, told: Shared[dict[str, Any]], context: RequestContext, broker: Broker) -> Response:
    """The same numbers for pages that poll, on servers that can't stream. One look serves all pages of a process."""
    settings = context.settings
    return JSONResponse(told.get(lambda: stats.look_at(broker), settings.clock, settings.interval_s / 2))


VIEWS = {PATHS[name]: view for name, view in SHOWN.items()}
VIEWS |= {
    PATHS["events"]: partial(poll, LiveStats(), Shared(waits=False)),
    PATHS["workers"]: partial(workers.workers, Shared(waits=True)),
    PATHS["act"]: actions.act,
}
STATIC = f"{PATHS['static']}/".lstrip("/")
#: Seconds between two looks of a page.
INTERVAL_S = 5.0
FIX_APP = "Set CELERY_FDB['APP'] so that results become REVOKED."


def page(
    request: HttpRequest,
    path: str,
    *,
    around: Mapping[str, str] | None = None,
    log_of: Callable[[str], str] | None = None,
) -> HttpResponseBase:
    """The dashboard's page of this path. ``around``, ``log_of``: fields of its ``RequestContext``.

    Raises ``PermissionDenied`` and ``Http404``.
    """
    if not models.allows(request, "view_queue"):
        raise PermissionDenied
    if path.startswith(STATIC) and request.method in READING:
        found = serve(request, path.removeprefix(STATIC), document_root=str(HERE / "static"))
        found["cache-control"] = A_YEAR
        return _guarded(found)
    view, is_act = VIEWS.get(f"/{path}"), f"/{path}" == PATHS["act"]
    if view is None:
        raise Http404("there is no such page")
    allowed = READING | {"POST"} if is_act else READING
    if request.method not in allowed:
        return HttpResponseNotAllowed(sorted(allowed))
    context = _context(request, path)
    context.around, context.log_of = around or {}, log_of
    if request.method in READING and (refusal := other_site(context.request.headers)) is not None:
        return _guarded(_djangos(refusal))
    if is_act and not context.may_act:
        made = context.page("error", 403, title="Not allowed", text=READ_ONLY)
    else:
        made = answer(view, context, conf.lazy_broker)
    if context.said:
        messages.info(request, context.said.encode(errors="replace").decode(), fail_silently=True)
    return _guarded(_djangos(made))


def _context(request: HttpRequest, path: str) -> RequestContext:
    here = get_script_prefix().rstrip("/") + request.path_info  # ASGI's request.path lacks FORCE_SCRIPT_NAME
    root = here.removesuffix(path).rstrip("/")
    asked = Request(
        {
            "type": "http",
            "method": request.method,
            "scheme": request.scheme,
            "path": here,
            "root_path": root,
            "query_string": request.GET.urlencode().encode(),
            "headers": [
                (name.lower().encode("latin-1", "replace"), value.encode("latin-1", "replace"))
                for name, value in request.headers.items()
            ],
        }
    )
    user = User(
        str(request.user.get_username()),
        may_act=models.allows(request, "manage_queue"),
        may_see_bodies=models.allows(request, "view_body"),
        may_act_on_workers=models.allows(request, "manage_worker"),
    )
    context = RequestContext(asked, _settings(), user, _audit(request), get_token(request), streams=False)
    context.form_field, context.zone = "csrfmiddlewaretoken", _zone()
    sent = [(name, str(each)) for name, given in request.POST.lists() for each in given]
    context.fields = fields_of(asked.query_params.multi_items() if request.method in READING else sent)
    if not context.is_part and path != PATHS["events"].lstrip("/"):
        context.notice = " ".join(str(each) for each in messages.get_messages(request))
    return context


def _settings() -> DashboardSettings:
    """The dashboard's settings. Unusable ones are reported when the broker is opened."""
    try:
        given = conf.read()
        url, options = conf.broker_of(given)
        app = conf.app_of_broker(given)
    except OptionError:
        return DashboardSettings("", anonymous=True)
    return DashboardSettings(
        url,
        options,
        app,
        read_only=False,
        show_bodies=given.show_bodies,
        anonymous=True,
        page_size=given.page_size,
        interval_s=INTERVAL_S,
        fix_app=FIX_APP,
    )


def _audit(request: HttpRequest) -> Audit:
    """Record actions in the admin's log or, without the admin, in the log ``celery_fdb.audit``."""
    if not apps.is_installed("django.contrib.admin"):
        return log_audit(str(request.user.get_username()))
    # Log entries can be imported only where the admin is installed.
    from django.contrib.admin.models import CHANGE, LogEntry
    from django.contrib.contenttypes.models import ContentType

    def begin(queue: str, text: str) -> Callable[[str], None]:
        entry = LogEntry.objects.create(
            user_id=request.user.pk,
            content_type_id=ContentType.objects.get_for_model(models.Queue, for_concrete_model=False).pk,
            object_id=models.fit(queue),
            object_repr=models.fit(queue)[:200],
            action_flag=CHANGE,
            change_message=models.fit(text),
        )

        def complete(text: str) -> None:
            entry.change_message = models.fit(text)
            entry.save(update_fields=["change_message"])

        return complete

    return begin


def _zone() -> tzinfo:
    """The time zone of moments that name none."""
    return timezone.get_current_timezone() if django_settings.USE_TZ else timezone.get_default_timezone()


def _djangos(made: Response) -> HttpResponse:
    """The page as a Django response. It has no cookies: the session is Django's."""
    answered = (
        HttpResponseRedirect(made.headers["location"])
        if "location" in made.headers
        else HttpResponse(bytes(made.body), status=made.status_code)
    )
    for name, value in made.headers.items():
        answered[name] = value
    return answered


def _guarded(answered: HttpResponseBase) -> HttpResponseBase:
    for name, value in HEADERS.items():
        answered.setdefault(name, value)
    return answered
