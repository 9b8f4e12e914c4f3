"""Which broker a Celery app uses, and opening it to look at it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from celery import Celery
from kombu.utils.url import maybe_sanitize_url

from kombu_fdb import Broker, OptionError
from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.settings.location import SCHEMES, SqliteLocation, locate, parse_url
from kombu_fdb.settings.options import parse_options

SET_IT = (
    "Set the app's broker_url to fdb+sqlite:////path/broker.db or fdb:// (in Django: CELERY_BROKER_URL, and import the "
    "app in the project's __init__.py, or name it in CELERY_FDB['APP']), or name a broker with --broker."
)


def broker_of(app: Celery) -> tuple[str, dict[str, Any]]:
    """URL and options: those that its workers consume from, where its queues are. Raises ``OptionError``."""
    options = dict(app.conf.broker_transport_options or {})
    return ours(app.conf.broker_read_url or app.conf.broker_url), options


def absent(url: str, options: dict[str, Any]) -> str | None:
    """The broker's file, if it has to be there and is not. Raises ``OptionError``."""
    location = locate(parse_url(url), parse_options(options))
    return str(location.path) if isinstance(location, SqliteLocation) and not location.path.exists() else None


def open_existing(url: str, **options: Any) -> Broker:
    """A file that is not there is not made: its path may be a typo.

    Raises ``OptionError``, ``StoreUnavailable``, ``FormatError``.
    """
    missing = absent(url, options)
    if missing is not None and Path(missing).parent.is_dir():
        fix = "Check the path. The first worker or message creates the file."
        raise StoreUnavailable("there is no broker yet", path=missing, fix=fix)
    return Broker.open(url, **options)


def ours(configured: Any) -> str:
    """Of several URLs, for failover, the first that is ours. Raises ``OptionError``."""
    urls = urls_of(configured)
    for url in urls:
        if url.partition("://")[0] in SCHEMES:
            return url
    raise OptionError(
        "the broker is not a celery-fdb broker" if urls else "the Celery app names no broker",
        broker_url=[maybe_sanitize_url(url) for url in urls] or None,
        fix=SET_IT,
    )


def urls_of(configured: Any) -> list[str]:
    """What stands in ``broker_url``: one URL, several for failover, nothing, or by mistake a path."""
    if not configured:
        return []
    if isinstance(configured, str):
        return configured.split(";")
    return [str(each) for each in configured] if isinstance(configured, Iterable) else [str(configured)]
