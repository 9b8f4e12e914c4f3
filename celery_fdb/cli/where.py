"""Which broker a command is about: the one named on the command line, else the app's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import click

from celery_fdb import brokers
from kombu_fdb import Broker
from kombu_fdb.errors import OptionError
from kombu_fdb.settings.location import Location, SqliteLocation

NAME_IT = "Name it with --broker fdb+sqlite:////path/broker.db, or use celery -A with an app whose broker_url it is."


@dataclass
class Where:
    """``app``: a Celery app, or None. URL and options may hold a password.

    ``project``: tells the broker of a project whose settings may name another than its app's, as Django's do.
    """

    app: Any = None
    url: str | None = field(default=None, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    no_color: bool = False
    project: Callable[[], tuple[str, dict[str, Any]]] | None = field(default=None, repr=False)

    def resolve(self) -> tuple[str, dict[str, Any]]:
        """URL and options. Raises ``OptionError``."""
        if self.url is not None:
            return self.url, dict(self.options)
        if self.project is not None:
            url, configured = self.project()
        elif self.app is not None:
            url, configured = brokers.broker_of(self.app)
        else:
            raise OptionError("no broker named", fix=NAME_IT)
        return url, {**configured, **self.options}

    @property
    def app_of_broker(self) -> Any:
        """The app, if the broker is the app's own."""
        return self.app if self.url is None else None

    def error(self, message: str, **_style: Any) -> None:
        """Report an error. Celery calls this for options in the wrong place."""
        click.echo(message, err=True)

    def location(self) -> Location:
        """Raises ``OptionError``."""
        return brokers.location_of(*self.resolve())

    @property
    def absent(self) -> SqliteLocation | None:
        """The location of the broker's file if the file does not exist, else None. Raises ``OptionError``."""
        return brokers.absent(*self.resolve())

    def open(self, *, make: bool = False) -> Broker:
        """Open the broker. ``make``: create a file that does not exist; by default not, as its path may be a typo.

        Raises ``OptionError``, ``StoreUnavailable``, ``FormatError``.
        """
        url, options = self.resolve()
        return Broker.open(url, **options) if make else brokers.open_existing(url, **options)


def check_text(value: Any) -> None:
    """Check that text of the command line is UTF-8, as a store requires. Raises ``click.UsageError``."""
    if isinstance(value, tuple):
        for each in value:
            check_text(each)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise click.UsageError(f"{value!r} is not UTF-8") from None
