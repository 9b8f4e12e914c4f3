"""``manage.py check``: what is wrong with the set-up, each with the next step.

=====================  ==========  ====================================================================================
id                     when        what
=====================  ==========  ====================================================================================
``celery_fdb.E001``                a key or value of ``CELERY_FDB`` is unusable, or its ``APP`` is not a Celery app
``celery_fdb.E002``                the URL or options of the broker or result backend are unusable: no worker starts
``celery_fdb.W001``                the Celery app uses another broker, or the project's ``__init__.py`` imports no app
``celery_fdb.W002``                ``CELERY_BROKER_URL`` and the app's ``broker_url`` differ
``celery_fdb.W003``                the file's path is relative, or its folder is missing, not writable or on a network
``celery_fdb.W004``                every user of this machine can read or write the file
``celery_fdb.W005``                the file is also Django's database
``celery_fdb.W006``                the file is in ``MEDIA_ROOT`` or ``STATIC_ROOT``, which web servers serve
``celery_fdb.W007``                the client library or the cluster file is missing or does not fit
``celery_fdb.W008``                ``accept_content`` allows workers to load pickle
``celery_fdb.W009``                the admin is not installed, so there are no pages
``celery_fdb.W010``    --deploy    the store does not answer
``celery_fdb.W011``    --deploy    the cluster's default namespace is used, which other projects may use too
``celery_fdb.W012``    --deploy    ``ATOMIC_REQUESTS`` is on: send tasks when their request commits
``celery_fdb.W013``                results of a ``django.tasks`` backend (``backend.py``) can't be read
``celery_fdb.W014``                ``TASKS`` names that backend, and this Django ignores ``TASKS``
``celery_fdb.W015``                ``INSTALLED_APPS`` names ``celery_fdb``, which is no app (``celery_fdb/apps.py``)
``celery_fdb.W016``                a library of the pages is not installed
``celery_fdb.W017``                tasks have options of celery-fdb that do nothing: the app is not installed
=====================  ==========  ====================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from celery import Celery
from django.apps import apps
from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, Warning  # noqa: A004 - Django's name
from django.db import connections

from celery_fdb import brokers
from celery_fdb.contrib.django import conf
from celery_fdb.results.backend import settings_of
from kombu_fdb import doctor
from kombu_fdb.errors import KombuFDBError, OptionError
from kombu_fdb.settings.location import (
    SCHEMES,
    ClusterLocation,
    Location,
    SqliteLocation,
    default_cluster_file,
)
from kombu_fdb.transport.worker import without_effect

Messages = Iterator[CheckMessage]
#: How a message names the store that was checked.
BROKER, RESULT_BACKEND = "The broker", "The result backend"
_UNSAFE = frozenset({"pickle", "application/x-python-serialize", "yaml", "application/x-yaml"})
#: Whether these checks are loading an app's tasks.
_loading = ContextVar("loading", default=False)


def check_settings(**_: Any) -> list[CheckMessage]:
    """Check ``CELERY_FDB``, and the app and broker that it names."""
    return _read()[2]


def check_project(**_: Any) -> list[CheckMessage]:
    """The Celery app beside Django's settings."""
    found = [*_check_admin(), *_check_libraries(), *_check_tasks()]
    settings = _read()[0]
    if settings is not None and settings.broker_url is None:
        app = conf.celery_app(settings)
        found += [*_check_urls(app), *_check_pickle(app), *_check_options(app)]
    return found


def check_store_files(**_: Any) -> list[CheckMessage]:
    """The file, or the cluster file and client library. Opens nothing."""
    settings, locations, _wrong = _read()
    if settings is None or not settings.checks:
        return []
    found: list[CheckMessage] = []
    for whose, location in locations.items():
        if isinstance(location, SqliteLocation):
            found += _check_file(whose, location)
        elif isinstance(location, ClusterLocation):
            found += _check_cluster(location)
    return found


def check_deployment(**_: Any) -> list[CheckMessage]:
    """``check --deploy``: opens the broker's store."""
    location = _read()[1].get(BROKER)
    if location is None:
        return []
    return [*_check_answers(), *_check_namespace(location), *_check_atomic_requests()]


# -- one by one --------------------------------------------------------------------------------------------------------


def _check_admin() -> Messages:
    if not apps.is_installed("django.contrib.admin"):
        yield Warning(
            "The broker's pages are part of Django's admin, which is not installed.",
            hint="Add django.contrib.admin to INSTALLED_APPS, or silence this check.",
            id="celery_fdb.W009",
        )


def _check_libraries() -> Messages:
    missing = [each for each in ("jinja2", "starlette") if find_spec(each) is None]
    if missing:
        yield Warning(
            f"The broker's pages need {' and '.join(missing)}.",
            hint="Run: pip install 'celery-fdb[django]'",
            id="celery_fdb.W016",
        )


def _check_tasks() -> Messages:
    backends = [each.get("BACKEND", "") for each in getattr(django_settings, "TASKS", {}).values()]
    reason = conf.no_tasks()
    if reason and any(each.startswith("celery_fdb.") for each in backends):
        yield Warning(
            f"{reason} It ignores TASKS.",
            hint="Upgrade Django, or use Celery's own tasks and remove TASKS.",
            id="celery_fdb.W014",
        )


def _check_urls(app: Celery) -> Messages:
    named, used = getattr(django_settings, "CELERY_BROKER_URL", None), app.conf.broker_url
    if named and named != used:
        yield Warning(
            f"CELERY_BROKER_URL differs from the broker_url of the Celery app {app.main!r}.",
            hint="Make the app read Django's settings, app.config_from_object('django.conf:settings', "
            "namespace='CELERY'), and import it in the project's __init__.py.",
            id="celery_fdb.W002",
        )


def _check_options(app: Celery) -> Messages:
    """Check all tasks that a worker would load. If their modules can't be imported, the doctor says why.

    Celery runs Django's checks whenever it loads tasks: without a guard, each load would start another. A worker warns
    of these options itself.
    """
    if app.loader.worker_initialized or _loading.get():
        return
    token = _loading.set(True)
    try:
        found = without_effect(app, load=True)
    except Exception:  # noqa: BLE001 - whatever a module of the user's raises
        return
    finally:
        _loading.reset(token)
    if found:
        yield Warning(
            f"Options of celery-fdb without effect: {', '.join(found)}.",
            hint="Call celery_fdb.install(app) right after Celery(...).",
            id="celery_fdb.W017",
        )


def _check_pickle(app: Celery) -> Messages:
    unsafe = sorted(_UNSAFE & set(app.conf.accept_content or ()))
    if unsafe:
        yield Warning(
            f"Workers accept {', '.join(unsafe)}: anyone who can write to the store can run code in them.",
            hint="Set CELERY_ACCEPT_CONTENT = ['json'].",
            id="celery_fdb.W008",
        )


def _check_file(whose: str, location: SqliteLocation) -> Messages:
    for finding in doctor.check_file(location):
        if finding.level != "ok":
            number = "W004" if finding.what == "file mode" else "W003"
            yield Warning(f"{whose}'s {finding.what}: {finding.found}.", hint=finding.fix, id=f"celery_fdb.{number}")
    path = location.path
    if any(_is_file(each.settings_dict, path) for each in connections.all()):
        yield Warning(
            f"{whose}'s file is also a Django database.",
            hint=f"Give {whose.lower()} its own file: each write locks the whole file.",
            id="celery_fdb.W005",
        )
    for name in ("MEDIA_ROOT", "STATIC_ROOT"):
        root = getattr(django_settings, name, None)
        if root and path.is_relative_to(Path(root).absolute()):
            yield Warning(
                f"{whose}'s file is in {name}, which web servers serve to anyone.",
                hint="Move it elsewhere, such as /var/lib.",
                id="celery_fdb.W006",
            )


def _is_file(database: dict[str, Any], path: Path) -> bool:
    is_sqlite = database.get("ENGINE", "").endswith("sqlite3")
    return is_sqlite and Path(database["NAME"]).absolute() == path


def _check_cluster(location: ClusterLocation) -> Messages:
    findings = [*doctor.check_library()]
    if location.connection_string is None:
        path = location.cluster_file or default_cluster_file(os.environ)
        findings.append(doctor.read_cluster_file(path)[0])
    for finding in findings:
        if finding.level != "ok":
            yield Warning(f"The {finding.what}: {finding.found}.", hint=finding.fix, id="celery_fdb.W007")


def _check_answers() -> Messages:
    try:
        conf.lazy_broker.broker()
    except brokers.NoBrokerYet:
        return  # the first worker or message makes the file
    except KombuFDBError as error:
        yield _told(Warning, error, "W010")


def _check_namespace(location: Location) -> Messages:
    if isinstance(location, ClusterLocation) and location.namespace == "default":
        yield Warning(
            "The broker uses the cluster's namespace 'default', like every other project that names none.",
            hint="Name one in the URL, as in fdb:///shop, for workers and publishers, while the queues are empty.",
            id="celery_fdb.W011",
        )


def _check_atomic_requests() -> Messages:
    atomic = [each.alias for each in connections.all() if each.settings_dict.get("ATOMIC_REQUESTS")]
    if atomic:
        yield Warning(
            f"Requests are transactions (ATOMIC_REQUESTS of {', '.join(atomic)}): a task sent by delay() may run "
            "before its request commits, or even if it is rolled back.",
            hint="Send tasks with delay_on_commit() in views, then silence this check.",
            id="celery_fdb.W012",
        )


# -- how ---------------------------------------------------------------------------------------------------------------


def _read() -> tuple[conf.DjangoSettings | None, dict[str, Location], list[CheckMessage]]:
    """The settings, None if they are wrong; the location of each usable store; and the messages on what is wrong.

    The result backend has a location only if it is celery-fdb's, and elsewhere than the broker.
    """
    try:
        settings = conf.read()
        app = conf.app_of_broker(settings)
    except OptionError as error:
        return None, {}, [_told(Error, error, "E001")]
    locations: dict[str, Location] = {}
    wrong: list[CheckMessage] = []
    try:
        url, options = conf.broker_of(settings)
    except OptionError as error:
        wrong.append(_told(Warning, error, "W001"))
    else:
        try:
            locations[BROKER] = brokers.location_of(url, options)
        except OptionError as error:
            wrong.append(_told(Error, error, "E002"))
    if app is not None and str(app.conf.result_backend).startswith(tuple(f"{each}://" for each in SCHEMES)):
        try:
            location = settings_of(app.conf, app.conf.result_backend)[0]
            if location != locations.get(BROKER):
                locations[RESULT_BACKEND] = location
        except OptionError as error:
            wrong.append(_told(Error, error, "E002", whose=RESULT_BACKEND))
    return settings, locations, wrong


def _told(kind: type[Error | Warning], error: KombuFDBError, number: str, *, whose: str = "") -> CheckMessage:
    """A check's message for an error: what happened, and the next step."""
    text = f"{whose}: {error.diagnosis}" if whose else error.diagnosis
    hint = error.attributes.get("fix") or "Run python -m kombu_fdb.doctor with the broker's URL to see what is wrong."
    return kind(f"{text[:1].upper()}{text[1:]}.", hint=hint, id=f"celery_fdb.{number}")
