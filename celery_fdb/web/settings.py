"""The dashboard's settings and its users. Mistakes raise when the dashboard is made, not when a page is opened."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from celery import Celery
from starlette.requests import Request

from celery_fdb import brokers
from kombu_fdb.errors import OptionError
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.ranges import FLAG, TEXT, Kind, refused


@dataclass(frozen=True, slots=True)
class User:
    """``name``: for the audit. A right counts only if the dashboard itself has it.

    ``may_act_on_workers``: with ``may_act``, the user may also shut workers down, and resize them.
    """

    name: str
    may_act: bool = True
    may_see_bodies: bool = True
    may_act_on_workers: bool = True


#: Returns the user of a request: a name, a :class:`User`, or None for a user who may not see anything.
Login = Callable[[Request], "User | str | Awaitable[User | str | None] | None"]
#: How to name an app, so that the results of cancelled tasks are updated.
FIX_APP = "Start the dashboard with an app (celery -A proj fdb web, or dashboard(app)) so that results become REVOKED."
#: The fewest characters of a token.
SHORTEST_TOKEN = 16
_NAMES = Kind(
    'a list of names, such as ["tools.example.com"]',
    lambda value: (
        isinstance(value, Collection) and not isinstance(value, str) and all(isinstance(each, str) for each in value)
    ),
)
#: What the arguments take.
KINDS = {
    "read_only": FLAG,
    "show_bodies": FLAG,
    "anonymous": FLAG,
    "token": TEXT.or_none(),
    "user": Kind("a function that is given the request", callable).or_none(),
    "login_url": TEXT.or_none(),
    "hosts": _NAMES.or_none(),
    "page_size": brokers.PAGE_SIZE,
    "interval_s": Kind.number("0.2 to 60 seconds", 0.2, 60),
    "most_streams": Kind.whole("1 to 10000 clients", 1, 10_000),
    "timeout_s": Kind.number("0.1 to 60 seconds", 0.1, 60),
    "connect_timeout_s": brokers.CONNECT_TIMEOUT,
    "threads": Kind.whole("1 to 64 threads", 1, 64),
}


@dataclass(frozen=True, slots=True)
class DashboardSettings:
    """The arguments of :func:`celery_fdb.web.dashboard`, which describes them; its ``repr`` holds no secret."""

    url: str = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    app: Celery | None = None
    read_only: bool = True
    show_bodies: bool = False
    token: str | None = field(default=None, repr=False)
    user: Login | None = None
    anonymous: bool = False
    login_url: str | None = None
    hosts: Collection[str] | None = None
    page_size: int = 50
    interval_s: float = 2.0
    most_streams: int = 100
    timeout_s: float = 10.0
    connect_timeout_s: float = 3.0
    threads: int = 8
    fix_app: str = FIX_APP
    clock: Clock = field(default_factory=Clock)

    @classmethod
    def of(cls, url: str, **given: Any) -> DashboardSettings:
        """The settings with these arguments. Raises ``OptionError``."""
        unknown = given.keys() - {each.name for each in dataclasses.fields(cls)}
        if unknown:
            raise OptionError("unknown argument of the dashboard", given=sorted(unknown))
        for name, _, kind in refused(KINDS, given):
            raise OptionError("unusable value for the dashboard", option=name, fix=f"Use {kind.what}.")
        settings = cls(url, **given)
        _check_access(settings)
        return settings


def _check_access(settings: DashboardSettings) -> None:
    if settings.token is not None and len(settings.token) < SHORTEST_TOKEN:
        fix = "Make one with: python -c 'import secrets; print(secrets.token_urlsafe())'"
        raise OptionError(f"the token has fewer than {SHORTEST_TOKEN} characters", fix=fix)
    ways = sum((settings.token is not None, settings.user is not None, settings.anonymous))
    if ways != 1:
        raise OptionError(
            "nothing says who may open the dashboard" if not ways else "there is more than one way to log in",
            fix="Pass one of token='...', user=a function that knows your users, or anonymous=True for all visitors.",
        )
