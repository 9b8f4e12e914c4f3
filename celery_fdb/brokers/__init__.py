"""The broker that an app is configured with; and a holder of one broker per process, opened at its first use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from statistics import median_low
from typing import Any

from celery import Celery
from kombu.utils.url import maybe_sanitize_url

from kombu_fdb import Broker
from kombu_fdb.errors import OptionError, StoreUnavailable
from kombu_fdb.model import SessionFacts
from kombu_fdb.primitives.ranges import Kind
from kombu_fdb.settings.location import MEMORY_SCHEME, SCHEMES, Location, SqliteLocation, locate, parse_url
from kombu_fdb.settings.options import parse_options

# -- pages -------------------------------------------------------------------------------------------------------------


#: What pages take, the dashboard's and Django's: how many rows, and how long to wait for the store.
PAGE_SIZE = Kind.whole("1 to 500 rows", 1, 500)
CONNECT_TIMEOUT = Kind.number("0.1 to 60 seconds", 0.1, 60)

# -- addresses ---------------------------------------------------------------------------------------------------------


SET_IT = (
    "Set the app's broker_url to fdb+sqlite:////path/broker.db or fdb:// (in Django: CELERY_BROKER_URL, and import the "
    "app in the project's __init__.py, or name it in CELERY_FDB['APP']), or name a broker with --broker."
)


def broker_of(app: Celery) -> tuple[str, dict[str, Any]]:
    """The URL and options that the app's workers consume from. Raises ``OptionError``."""
    options = dict(app.conf.broker_transport_options or {})
    return pick_url(app.conf.broker_read_url or app.conf.broker_url), options


def location_of(url: str, options: Mapping[str, Any]) -> Location:
    """Where a broker's store is. Touches neither files nor network. Raises ``OptionError``."""
    return locate(parse_url(url), parse_options(options))


def absent(url: str, options: Mapping[str, Any]) -> SqliteLocation | None:
    """The location of the broker's file if the file does not exist, else None. Raises ``OptionError``."""
    location = location_of(url, options)
    return location if isinstance(location, SqliteLocation) and location.is_absent else None


class NoBrokerYet(StoreUnavailable):
    """The broker's file does not exist, but its folder does or would be created: a typo, or a new project.

    Of a link, the target's folder counts. A target on a disk that is not mounted has none, and is another error.
    """

    text = "there is no broker yet"


def open_existing(url: str, **options: Any) -> Broker:
    """Open a broker without creating its file: the path may be a typo.

    Raises ``OptionError``, ``NoBrokerYet``, ``StoreUnavailable``, ``FormatError``.
    """
    missing = absent(url, options)
    if missing is not None and (missing.is_default or missing.path.resolve().parent.is_dir()):
        fix = "Check the path. The first worker or message creates the file."
        raise NoBrokerYet(path=str(missing.path), fix=fix)
    return Broker.open(url, **options)


def pick_url(configured: Any) -> str:
    """The first of the configured URLs that is a celery-fdb broker. Raises ``OptionError``."""
    urls = urls_of(configured)
    for url in urls:
        if url.partition("://")[0] in {*SCHEMES, MEMORY_SCHEME}:
            return url
    raise OptionError(
        "the broker is not a celery-fdb broker" if urls else "the Celery app names no broker",
        broker_url=[maybe_sanitize_url(url) for url in urls] or None,
        fix=SET_IT,
    )


def urls_of(configured: Any) -> list[str]:
    """The URLs in ``broker_url``: one, several for failover, none, or by mistake a path."""
    if not configured:
        return []
    if isinstance(configured, str):
        return configured.split(";")
    return [str(each) for each in configured] if isinstance(configured, Iterable) else [str(configured)]


# -- lazy brokers ------------------------------------------------------------------------------------------------------


def common_ms(sessions: Iterable[SessionFacts], own_ms: int) -> int:
    """The median of the sessions' clocks at their last heartbeats; ``own_ms`` without sessions.

    Used to delete what others have written, so that one process whose clock is ahead deletes nothing too early. Of two
    clocks, the earlier one counts.
    """
    return median_low([each.beat_ms for each in sessions if each.open and each.beat_ms] or [own_ms])


class LazyBroker:
    """One broker per process, opened by ``open_`` at its first use. Thread-safe. :meth:`broker` raises what it raises.

    It has no lock: a signal handler may close it while its own thread opens it, as at the end of Celery's beat, and a
    process may fork while another thread opens it.
    """

    def __init__(self, open_: Callable[[], Broker]) -> None:
        self._open = open_
        #: By process: a forked child opens its own, and leaves its parent's alone.
        self._held: dict[int, Broker] = {}
        #: Another object after each :meth:`close`.
        self._turn = object()

    def broker(self) -> Broker:
        """The open broker. Raises ``OptionError`` or a ``StoreError``."""
        found = self._held.get(os.getpid())
        if found is not None:
            return found
        turn, opened = self._turn, self._open()
        found = self._held.setdefault(os.getpid(), opened)
        if found is not opened:  # another thread was faster
            opened.close()
        elif self._turn is not turn:  # closed meanwhile, as when settings change: the next call opens anew
            self.forget()
        return found

    def forget(self) -> Broker | None:
        """Drop the broker after an error, so that the next call opens a new one. The old one closes once unused."""
        return self._held.pop(os.getpid(), None)

    def close(self) -> None:
        """Drop the broker and close it now. A broker that another thread is just opening goes to that thread only."""
        self._turn = object()
        held = self.forget()
        if held is not None:
            held.close()
