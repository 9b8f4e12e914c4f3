"""From Celery's settings to the store's location and options."""

from __future__ import annotations

from typing import Any, NamedTuple

import celery
from celery.utils.log import get_logger

from kombu_fdb.settings.location import Location, locate, parse_url
from kombu_fdb.settings.options import Options, parse_options

logger = get_logger(__name__)

#: What others' result backends read from the same setting; harmless here.
_FOREIGN = frozenset({"additional_connection_errors", "result_chord_ordered"})


class Settings(NamedTuple):
    """Where the results are, and how they are treated."""

    location: Location
    options: Options
    #: Those of the broker if it is in the same place: then both share one open store.
    client_options: Options
    retry_policy: dict[str, Any]


def full_url(url: str | None) -> str:
    """Celery cuts ``fdb+sqlite:///path`` at the plus sign and hands over the second half."""
    if not url:
        return "fdb://"
    return f"fdb+{url}" if url.startswith(("sqlite:", "memory:")) else url


def settings_of(conf: Any, url: str) -> Settings:
    """Those of ``result_backend_transport_options``.

    If the broker has the same URL, ``broker_transport_options`` hold where they are not overruled. Raises
    ``OptionError``.
    """
    _tell_of_newer_settings(conf)
    timeout_s = conf.broker_connection_timeout or None
    own: dict[str, Any] = dict(conf.get("result_backend_transport_options") or {})
    policy = dict(own.pop("retry_policy", None) or {})
    for name in _FOREIGN:
        own.pop(name, None)
    if url not in _broker_urls(conf):
        options = parse_options(own, connect_timeout=timeout_s)
        return Settings(locate(parse_url(url), options), options, options, policy)
    brokers: dict[str, Any] = dict(conf.broker_transport_options or {})
    options = parse_options({**brokers, **own}, connect_timeout=timeout_s)
    of_broker = parse_options(brokers, connect_timeout=timeout_s)
    location = locate(parse_url(url), options)
    shared = location == locate(parse_url(url), of_broker)
    return Settings(location, options, of_broker if shared else options, policy)


def _tell_of_newer_settings(conf: Any) -> None:
    """Celery itself ignores a setting that it does not know."""
    if conf.get("result_compression") and tuple(celery.VERSION[:2]) < (5, 7):
        logger.warning(
            "result_compression needs Celery 5.7, and this is %s: results are stored as they are", celery.__version__
        )


def _broker_urls(conf: Any) -> list[str]:
    found: list[str] = []
    for urls in (conf.broker_url, conf.broker_write_url, conf.broker_read_url):
        found += urls.split(";") if isinstance(urls, str) else urls or []
    return found
