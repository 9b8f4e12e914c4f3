"""From Celery's settings to the store's URL and options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kombu_fdb.options import Options, parse_options

__all__ = ["full_url", "options_of"]

#: What others' result backends read from the same setting; harmless here.
_FOREIGN = frozenset({"additional_connection_errors", "result_chord_ordered"})


def full_url(url: str | None) -> str:
    """Celery cuts ``fdb+sqlite:///path`` at the plus sign and hands over the second half."""
    if not url:
        return "fdb://"
    return f"fdb+{url}" if url.startswith("sqlite:") else url


def options_of(conf: Any, url: str) -> tuple[Options, dict[str, Any]]:
    """The parsed ``result_backend_transport_options``, and the ``retry_policy`` among them.

    If the broker has the same URL, its options hold here too, so that both share one open store. Raises
    ``OptionError``.
    """
    own: Mapping[str, Any] = conf.get("result_backend_transport_options") or {}
    given = {**(conf.broker_transport_options or {}), **own} if url in _broker_urls(conf) else dict(own)
    policy = given.pop("retry_policy", None) or {}
    for name in _FOREIGN:
        given.pop(name, None)
    return parse_options(given, connect_timeout=conf.broker_connection_timeout or None), dict(policy)


def _broker_urls(conf: Any) -> list[str]:
    found: list[str] = []
    for urls in (conf.broker_url, conf.broker_write_url, conf.broker_read_url):
        found += urls.split(";") if isinstance(urls, str) else urls or []
    return found
