"""A context: one request of one person, its fields and rights, and the templates that answer it.

Names of queues and keys are in the query of an address, which may hold any text. In a path, browsers and proxies treat
"..", "%2F" and empty parts in ways of their own.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, unquote_to_bytes, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from celery_fdb.history.run import LOST
from celery_fdb.inspection import formats
from celery_fdb.operations.action import Action, Audit
from celery_fdb.web.settings import DashboardSettings, User
from kombu_fdb.model import Spot
from kombu_fdb.primitives.masking import plain

# -- addresses ---------------------------------------------------------------------------------------------------------


#: By page, its address: the first one's, or the page's name.
PATHS = {"overview": "/"} | {
    name: f"/{name}"
    for name in (
        *("events", "queues", "queue", "keys", "messages", "message", "dead", "causes", "tasks", "runs", "task"),
        *("workflows", "workflow", "schedules", "sessions", "workers", "act", "login", "logout", "static"),
    )
}
#: The links in the bar on top of each page.
NAVIGATION = (
    ("overview", "Overview"),
    ("queues", "Queues"),
    ("causes", "Dead letters"),
    ("tasks", "Tasks"),
    ("workflows", "Workflows"),
    ("schedules", "Schedules"),
    ("sessions", "Sessions"),
    ("workers", "Workers"),
    ("task", "Find"),
)


# -- forms -------------------------------------------------------------------------------------------------------------


#: The suffix of a field's name whose value is quoted, as in an address.
QUOTED = ".quoted"


def carried(name: str, value: str) -> tuple[str, str]:
    """The name and value of a hidden form field whose value a browser sends back unchanged.

    Browsers replace NUL and lone surrogates, and write line breaks as CRLF, so a value with one of them is quoted, and
    its field's name says so. Otherwise an action would change a queue or key of another name.
    """
    if value.isprintable():
        return name, value
    return name + QUOTED, quote(value, safe="", errors="surrogatepass")


def _received(name: str, value: str) -> tuple[str, str]:
    """The name and value of a field that :func:`carried` has made."""
    if not name.endswith(QUOTED):
        return name, value
    raw = unquote_to_bytes(value)
    try:
        return name.removesuffix(QUOTED), raw.decode(errors="surrogatepass")
    except UnicodeDecodeError:  # the field is not of one of our forms
        return name.removesuffix(QUOTED), raw.decode(errors="replace")


def fields_of(given: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The fields of a form or an address, with quoted values as they were."""
    found: dict[str, list[str]] = {}
    for quoted_name, quoted in given:
        name, value = _received(quoted_name, quoted)
        found.setdefault(name, []).append(value)
    return found


# -- templates ---------------------------------------------------------------------------------------------------------


HERE = Path(__file__).parent
#: A dash.
NOTHING = "\N{EN DASH}"
#: Formats of a moment: in full, and as the label of an axis.
FORMS = {"": "%Y-%m-%d %H:%M:%S UTC", "seconds": "%H:%M:%S", "minute": "%H:%M", "day": "%b %d"}
TONES = {
    **dict.fromkeys(("SUCCESS", "alive"), "good"),
    **dict.fromkeys(("FAILURE", "LOST", "dead", "REJECTED"), "bad"),
    **dict.fromkeys(("RETRY", "STARTED", "leased"), "busy"),
}


@cache
def environment() -> Environment:
    """The templates. Everything that one shows is text, never markup, unless the template itself says so."""
    made = Environment(
        loader=PackageLoader("celery_fdb.web", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "number": number,
        "age_s": partial(formats.age, nothing=NOTHING),
        "took": partial(formats.took, nothing=NOTHING),
        "rate": partial(formats.rate, nothing=NOTHING),
        "shown": shown,
        "limit": formats.limit,
        "clock": clock,
        "tone": tone,
        "state": state_name,
        "moment": moment_of,
        "picked": picked,
        "plain": plain,
    }
    made.globals["carried"] = carried
    return made


@cache
def files_version() -> str:
    """A version that changes with any of the static files, so that browsers may keep them."""
    digest = hashlib.sha256()
    for path in sorted((HERE / "static").rglob("*")):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def html(template: str, context: dict[str, Any]) -> bytes:
    """The bytes of a page. A lone surrogate, which UTF-8 can't encode, becomes a question mark."""
    return environment().get_template(f"{template}.html").render(context).encode(errors="replace")


# -- filters -----------------------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """A number with thin separators; a dash for None."""
    return NOTHING if value is None else f"{value:,}".replace(",", "\u202f")


def moment_of(seconds: float) -> datetime:
    """Seconds since 1970."""
    return formats.moment(seconds * 1000)


def picked(text: str, zone: tzinfo) -> datetime | None:
    """The moment that a person picked, in ``zone``, also assumed for a text without one; None for no moment."""
    try:
        return formats.read(text, zone).astimezone(zone)
    except (ValueError, OverflowError):
        return None


def clock(moment: Any, form: str = "") -> str:
    """A moment for a page, in UTC; a script shows it in the reader's time zone."""
    return NOTHING if moment is None else moment.strftime(FORMS[form])


def shown(value: float | None, kind: str) -> str:
    """A value of a chart, by its kind: rate, number or took."""
    if kind == "took":
        return formats.took(value, NOTHING)
    if kind == "rate":
        return formats.rate(value, NOTHING)
    return number(None if value is None else int(value) if value == int(value) else value)


def state_name(state: str) -> str:
    """A run's state in a person's words. LOST would mislead: the message of a dead worker's task is released."""
    return "worker died" if state == LOST else state.lower()


def tone(state: str) -> str:
    """The class of a tag that shows the state."""
    return TONES.get(state, "plain")


# -- the context -------------------------------------------------------------------------------------------------------


#: The next step for a user who may not act.
READ_ONLY = (
    "This dashboard is read-only, at least for you. To act, start it with --write or read_only=False; in Django, your "
    "user needs the permission celery_fdb.manage_queue."
)
#: Rows of a table, and choices of a form; a page says how many there are.
MOST_SHOWN = 500
#: The field that each form repeats, and the cookie that has the same value.
FORM_FIELD, FORM_COOKIE = "form_token", "celery_fdb_form"


@dataclass(slots=True)
class RequestContext:
    """``fields``: the sent form's fields. ``form_token``: the value that this page's forms repeat, as ``form_field``.

    ``notice``: a line from the previous page; ``said``: a line for the next one. ``zone``: that of moments which name
    none. ``around``: links into the surrounding site, by label; ``log_of``: the address of its log of a queue.
    """

    request: Request
    settings: DashboardSettings
    user: User
    audit: Audit
    form_token: str = ""
    fields: Mapping[str, list[str]] = field(default_factory=dict)
    notice: str = ""
    said: str = ""
    form_field: str = FORM_FIELD
    zone: tzinfo = UTC
    streams: bool = True
    around: Mapping[str, str] = field(default_factory=dict)
    log_of: Callable[[str], str] | None = None

    @property
    def root(self) -> str:
        return str(self.request.scope.get("root_path", ""))

    @property
    def is_part(self) -> bool:
        """Whether a script asked for a part of a page that the browser shows already."""
        return self.request.headers.get("hx-request") == "true"

    @property
    def may_act(self) -> bool:
        return not self.settings.read_only and self.user.may_act

    @property
    def may_see_bodies(self) -> bool:
        return self.settings.show_bodies and self.user.may_see_bodies

    def url(self, page: str, /, **query: object) -> str:
        """The address of a page, under the prefix of the dashboard. Leaves out fields that are None."""
        given = {name: value for name, value in query.items() if value is not None}
        path = self.root.rstrip("/") + PATHS[page]
        return f"{path}?{urlencode(given, errors='replace')}" if given else path

    def asked(self, name: str, default: str = "") -> str:
        """A field of the query."""
        query = self.request.query_params
        if name not in query and name + QUOTED in query:
            return _received(name + QUOTED, query[name + QUOTED])[1]
        return query.get(name, default)

    def asked_arguments(self) -> str:
        """The arguments to search for; "" for none. Raises ``HTTPException`` if the user may not see arguments."""
        asked = self.asked("arguments").strip()
        if asked and not self.may_see_bodies:
            raise HTTPException(404, "Arguments are hidden here, so there is no search for them.")
        return asked

    def sent(self, name: str) -> str:
        """A field of the form."""
        return self.fields.get(name, [""])[0]

    def page(self, template: str, status: int = 200, **context: Any) -> Response:
        """The answer with this page."""
        common = {
            "context": self,
            "url": self.url,
            "static": f"{self.url('static')}/",
            "version": files_version(),
            "form_field": self.form_field,
            "navigation": NAVIGATION,
            "part": self.is_part,
            "read_at": formats.moment(self.settings.clock.wall_ms()),
            "read_only": READ_ONLY,
        }
        return Response(html(template, {**common, **context}), status, media_type="text/html")

    def way_back(self, target: str) -> str:
        """``target`` if it is an address of this dashboard, else the first page: no redirect leaves this site."""
        first = self.url("overview")
        parts = unquote(target.split("?", 1)[0]).split("/")  # browsers read %2e as a dot
        is_plain = target.isprintable() and "\\" not in target and not {".", ".."} & set(parts)
        return target if target.startswith(first) and not target.startswith("//") and is_plain else first

    def redirect(self, target: str) -> Response:
        return RedirectResponse(target, 303)

    def back(self, text: str) -> Response:
        """A redirect to the page that the user came from, with one line about what was done."""
        self.said = text
        return self.redirect(self.way_back(self.sent("back")))

    @property
    def cookie_path(self) -> str:
        return self.root.rstrip("/") + "/"

    def allowed(self, actions: list[Action]) -> list[Action]:
        """The actions, without those whose forms show arguments that this user may not see."""
        return [each for each in actions if self.may_see_bodies or not each.shows_body]

    def tasks(self, *others: str) -> list[str]:
        """Names of tasks to choose from: the app's, and others."""
        app = self.settings.app
        own = () if app is None else (each for each in app.tasks if not each.startswith("celery."))
        return known((*own, *others))[:MOST_SHOWN]

    def kept(self, name: str) -> str:
        """The value of a cookie; "" for none."""
        return self.request.cookies.get(cookie_name(name, self.settings.token), "")

    def drop(self, answer: Response, name: str) -> None:
        answer.delete_cookie(cookie_name(name, self.settings.token), path=self.cookie_path)

    def keep(self, answer: Response, name: str, value: str, seconds: int | None) -> None:
        """Set a cookie that is sent to this dashboard's pages only, and that no script can read."""
        answer.set_cookie(
            cookie_name(name, self.settings.token),
            value,
            max_age=seconds,
            path=self.cookie_path,
            secure=self.request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )


def known(names: Iterable[str]) -> list[str]:
    """Names as choices of an input, without those that an input would change."""
    return sorted({each for each in names if each and each.isprintable()})


def spot_of(token: str) -> Spot:
    """The spot of this text. Raises ``HTTPException``."""
    try:
        return Spot.parse(token)
    except ValueError:
        raise HTTPException(404, "There is no such message.") from None


def cookie_name(name: str, token: str | None) -> str:
    """The cookie's name for the dashboard with this token."""
    return name if token is None else f"{name}_{signature(token, 'name of a cookie', '')[:8]}"


def signature(token: str, purpose: str, text: str) -> str:
    """A signature that only a process with the token can make."""
    what = f"celery-fdb dashboard, {purpose} {text}".encode(errors="replace")
    return urlsafe_b64encode(hmac.digest(token.encode(), what, "sha256")).decode().rstrip("=")
