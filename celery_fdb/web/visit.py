"""One request as a page sees it: who asks, what was asked for, and the addresses and answers it may give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, tzinfo
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from celery_fdb.inspection.time_formats import moment
from celery_fdb.operations.action import QUOTED, received
from celery_fdb.operations.audit import Audit
from celery_fdb.web import addresses
from celery_fdb.web.access import guard, login
from celery_fdb.web.access.login import User
from celery_fdb.web.rendering import files_version, html
from celery_fdb.web.settings import Settings

#: What there is to do for those who may not act.
READ_ONLY = (
    "This dashboard only shows, at least to you. To act, start it with --write or read_only=False; in Django, your "
    "user needs the permission celery_fdb.manage_queue."
)
#: Rows of a table, and choices of a form; a page says how many there are.
MOST_SHOWN = 500


@dataclass(slots=True)
class Visit:
    """``fields``: of the form that was sent. ``form_token``: what a form of this page repeats, as ``form_field``.

    ``notice``: a line from the page before, and ``said``: one for the next page. ``zone``: of moments that name none.
    ``around``: links to the site that the pages are a part of, by label; ``log_of``: where its log of a queue is.
    """

    request: Request
    settings: Settings
    user: User
    audit: Audit
    form_token: str = ""
    fields: Mapping[str, list[str]] = field(default_factory=dict)
    notice: str = ""
    said: str = ""
    form_field: str = guard.FIELD
    zone: tzinfo = UTC
    streams: bool = True
    around: Mapping[str, str] = field(default_factory=dict)
    log_of: Callable[[str], str] | None = None

    @property
    def root(self) -> str:
        return str(self.request.scope.get("root_path", ""))

    @property
    def is_part(self) -> bool:
        """A script asked, for a part of a page that is shown already."""
        return self.request.headers.get("hx-request") == "true"

    @property
    def may_act(self) -> bool:
        return not self.settings.read_only and self.user.may_act

    @property
    def may_see_bodies(self) -> bool:
        return self.settings.show_bodies and self.user.may_see_bodies

    def url(self, page: str, /, **query: object) -> str:
        return addresses.url(self.root, page, **query)

    def asked(self, name: str, default: str = "") -> str:
        """Of the query."""
        query = self.request.query_params
        if name not in query and name + QUOTED in query:
            return received(name + QUOTED, query[name + QUOTED])[1]
        return query.get(name, default)

    def sent(self, name: str, default: str = "") -> str:
        """Of the form."""
        return self.fields.get(name, [default])[0]

    def page(self, template: str, status: int = 200, **context: Any) -> Response:
        """A page, rendered."""
        common = {
            "visit": self,
            "url": self.url,
            "static": f"{addresses.url(self.root, 'static')}/",
            "version": files_version(),
            "form_field": self.form_field,
            "navigation": addresses.NAVIGATION,
            "part": self.is_part,
            "read_at": moment(self.settings.clock.wall_ms()),
            "read_only": READ_ONLY,
        }
        return Response(html(template, {**common, **context}), status, media_type="text/html")

    def way_back(self, target: str) -> str:
        """``target`` if it is a page of this dashboard, else the first one."""
        return addresses.local_path(self.root, target)

    def redirect(self, target: str) -> Response:
        return RedirectResponse(target, 303)

    def back(self, text: str) -> Response:
        """Where the person came from, with one line about what was done."""
        self.said = text
        return self.redirect(self.way_back(self.sent("back")))

    @property
    def cookie_path(self) -> str:
        return self.root.rstrip("/") + "/"

    def kept(self, name: str) -> str:
        """The cookie's value; "" for none."""
        return self.request.cookies.get(login.cookie(name, self.settings.token), "")

    def drop(self, answer: Response, name: str) -> None:
        answer.delete_cookie(login.cookie(name, self.settings.token), path=self.cookie_path)

    def keep(self, answer: Response, name: str, value: str, seconds: int | None) -> None:
        """A cookie that only this dashboard's own pages send, and no script reads."""
        answer.set_cookie(
            login.cookie(name, self.settings.token),
            value,
            max_age=seconds,
            path=self.cookie_path,
            secure=self.request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
