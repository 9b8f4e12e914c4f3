"""Which broker an app has, and one broker per address and process, opened when it is first used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from statistics import median_low
from typing import Any

from celery import Celery
from kombu.utils.url import maybe_sanitize_url

from kombu_fdb import Broker
from kombu_fdb.errors import OptionError, StoreUnavailable
from kombu_fdb.model import SessionFacts
from kombu_fdb.settings.location import SCHEMES, SqliteLocation, locate, parse_url
from kombu_fdb.settings.options import parse_options

# -- addresses ---------------------------------------------------------------------------------------------------------


SET_IT = (
    "Set the app's broker_url to fdb+sqlite:////path/broker.db or fdb:// (in Django: CELERY_BROKER_URL, and import the "
    "app in the project's __init__.py, or name it in CELERY_FDB['APP']), or name a broker with --broker."
)


def broker_of(app: Celery) -> tuple[str, dict[str, Any]]:
    """URL and options: those that its workers consume from, where its queues are. Raises ``OptionError``."""
    options = dict(app.conf.broker_transport_options or {})
    return ours(app.conf.broker_read_url or app.conf.broker_url), options


def absent(url: str, options: dict[str, Any]) -> SqliteLocation | None:
    """Where the broker's file has to be, if it is not there. Raises ``OptionError``."""
    location = locate(parse_url(url), parse_options(options))
    return location if isinstance(location, SqliteLocation) and location.is_absent else None


class NoBrokerYet(StoreUnavailable):
    """Its file is not there, and its folder is, or is made with it: a typo, or a project in its first minute.

    Behind a link, the folder is that of the file that it leads to, which may be on a disk that is not mounted.
    """

    text = "there is no broker yet"


def open_existing(url: str, **options: Any) -> Broker:
    """A file that is not there is not made: its path may be a typo.

    Raises ``OptionError``, ``NoBrokerYet``, ``StoreUnavailable``, ``FormatError``.
    """
    missing = absent(url, options)
    if missing is not None and (missing.is_default or missing.path.resolve().parent.is_dir()):
        fix = "Check the path. The first worker or message creates the file."
        raise NoBrokerYet(path=str(missing.path), fix=fix)
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


# -- lazy brokers ------------------------------------------------------------------------------------------------------


def common_ms(sessions: Iterable[SessionFacts], own_ms: int) -> int:
    """By the clocks of most workers, as of their last heartbeats; ``own_ms`` if there are none.

    For deleting what others have written: one process whose clock is ahead deletes nothing too early. Of two that
    differ, the one behind is believed.
    """
    return median_low([each.beat_ms for each in sessions if each.open and each.beat_ms] or [own_ms])


class Holding:
    """Thread-safe. ``open_`` opens the broker; what it raises comes out of :meth:`broker`.

    It has no lock: a signal handler closes it while its own thread opens it, as at the end of Celery's beat, and a
    child may be forked while another thread does.
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
        """After an error: the next call opens it anew. The old one closes when it is unused."""
        return self._held.pop(os.getpid(), None)

    def close(self) -> None:
        """The same, and it closes now. What another thread is opening meanwhile is that thread's alone."""
        self._turn = object()
        held = self.forget()
        if held is not None:
            held.close()
