"""Which broker a command is about: the one named on the command line, else the app's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from kombu_fdb import Broker, OptionError
from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.settings.location import SCHEMES, Location, SqliteLocation, locate, parse_url
from kombu_fdb.settings.options import parse_options

__all__ = ["Where", "urls_of"]

SET_IT = (
    "Set its broker_url (in Django: CELERY_BROKER_URL, and import the app in the project's __init__.py), "
    "or name a broker with --broker fdb+sqlite:////path/broker.db."
)
NAME_IT = "Name it with --broker fdb+sqlite:////path/broker.db, or use celery -A with an app whose broker_url it is."


@dataclass
class Where:
    """``app``: a Celery app, or None."""

    app: Any = None
    url: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    no_color: bool = False

    def resolve(self) -> tuple[str, dict[str, Any]]:
        """URL and options. Raises ``OptionError``."""
        if self.url is not None:
            return self.url, dict(self.options)
        if self.app is None:
            raise OptionError("no broker named", fix=NAME_IT)
        configured = dict(self.app.conf.broker_transport_options or {})
        return _ours(self.app.conf.broker_read_url or self.app.conf.broker_url), {**configured, **self.options}

    @property
    def app_of_broker(self) -> Any:
        """The app, if the broker is its own."""
        return self.app if self.url is None else None

    def error(self, message: str, **_style: Any) -> None:
        """Celery calls it for options in the wrong place."""
        click.echo(message, err=True)

    def location(self) -> Location:
        """Raises ``OptionError``."""
        url, options = self.resolve()
        return locate(parse_url(url), parse_options(options))

    @property
    def absent(self) -> str | None:
        """The broker's file, if it has to be there and is not. Raises ``OptionError``."""
        location = self.location()
        return str(location.path) if isinstance(location, SqliteLocation) and not location.path.exists() else None

    def open(self, *, make: bool = False) -> Broker:
        """A file that is not there is made only if ``make`` says so: its path may be a typo.

        Raises ``OptionError``, ``StoreUnavailable``, ``FormatError``.
        """
        url, options = self.resolve()
        absent = self.absent
        if absent is not None and not make and Path(absent).parent.is_dir():
            fix = "Check the path. The first worker or message creates the file."
            raise StoreUnavailable("there is no broker yet", path=absent, fix=fix)
        return Broker.open(url, **options)


def _ours(configured: Any) -> str:
    """The first URL of a failover list that is one of ours."""
    urls = urls_of(configured)
    for url in urls:
        if url.partition("://")[0] in SCHEMES:
            return url
    schemes = ", ".join(url.partition("://")[0] + "://" if "://" in url else "not a URL" for url in urls) or "not set"
    raise OptionError("the app's broker is not a celery-fdb broker", broker_url=schemes, fix=SET_IT)


def urls_of(configured: Any) -> list[str]:
    """What stands in ``broker_url``: one URL, several for failover, nothing, or by mistake a path."""
    if not configured:
        return []
    if isinstance(configured, str):
        return configured.split(";")
    return [str(each) for each in configured] if isinstance(configured, Iterable) else [str(configured)]
