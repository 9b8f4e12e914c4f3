"""Django's settings, versions, and the app and broker that they name; and how views relate to its transactions.

The settings are one dict in the settings module, for example ``CELERY_FDB = {"PAGE_SIZE": 100, "SHOW_BODIES": False}``.
The Celery app names the broker, as it does for workers; only a project without an app names it here. An unusable
setting is an ``OptionError`` with the next step.

The store is opened when a page first asks for it, once per process, and again after it has failed. The same client
serves the tasks this process publishes, if the options agree, so a page costs no connection of its own. It never
consumes, so it has no session.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any

import django
from celery import Celery, current_app
from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.db import connections, transaction

from celery_fdb import brokers
from kombu_fdb import Broker
from kombu_fdb.errors import OptionError
from kombu_fdb.primitives.ranges import FLAG, TEXT, Kind, refused

# -- versions ----------------------------------------------------------------------------------------------------------


def no_tasks() -> str:
    """The message where Django has no ``django.tasks``; "" where it has."""
    if django.VERSION >= (6, 0):
        return ""
    return f"django.tasks came with Django 6.0, and this is Django {django.get_version()}."


# -- settings ----------------------------------------------------------------------------------------------------------


NAME = "CELERY_FDB"
#: The Celery task that runs tasks of ``django.tasks``. It stands in messages, so it outlives the module it is in.
RUN = "celery_fdb.django.run"


@dataclass(frozen=True, slots=True)
class DjangoSettings:
    """Field names in capitals are the setting's keys.

    ``app``: the Celery app, ``"shop.celery:app"``; unset, the current one. ``broker_url``: instead of the app's, and
    ``options`` besides its ``broker_transport_options``. ``page_size``: rows of a page. ``show_bodies``: False
    hides bodies from all users, whatever their permissions. ``connect_timeout``: how long a page waits for the store,
    in seconds. ``checks``: whether ``manage.py check`` looks at the store's files.
    """

    app: str | None = None
    broker_url: str | None = dataclasses.field(default=None, repr=False)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    page_size: int = 50
    show_bodies: bool = True
    connect_timeout: float = 3.0
    checks: bool = True


_KINDS = {
    "app": Kind("a string, 'package.module:name'", TEXT.accepts),
    "broker_url": Kind("a string, such as 'fdb+sqlite:////var/lib/app/broker.db'", TEXT.accepts),
    "options": Kind("a dict, as broker_transport_options", lambda value: isinstance(value, Mapping)),
    "page_size": brokers.PAGE_SIZE,
    "show_bodies": Kind("True or False", FLAG.accepts),
    "connect_timeout": brokers.CONNECT_TIMEOUT,
    "checks": Kind("True or False", FLAG.accepts),
}


def read(given: object = None) -> DjangoSettings:
    """``settings.CELERY_FDB``, or what is given instead. Raises ``OptionError``."""
    given = getattr(django_settings, NAME, {}) if given is None else given
    if not isinstance(given, Mapping):
        raise OptionError(f"{NAME} is not a dict", fix=f"Set {NAME} = {{}}, or remove it.")
    fields = {_field(name): value for name, value in given.items()}
    for name, _, kind in refused(_KINDS, fields):
        raise OptionError(f"unusable value in {NAME}", key=name.upper(), fix=f"Use {kind.what}.")
    return DjangoSettings(**fields)


def _field(name: object) -> str:
    field = str(name).lower()
    if field not in _KINDS or name != field.upper():
        near = difflib.get_close_matches(field, _KINDS, 1)
        known = ", ".join(each.upper() for each in _KINDS)
        fix = f"Did you mean {near[0].upper()}?" if near else f"Known keys: {known}."
        raise OptionError(f"unknown key in {NAME}", key=name, fix=fix)
    return field


def celery_app(settings: DjangoSettings) -> Celery:
    """The project's Celery app. Raises ``OptionError`` if its name leads nowhere."""
    if settings.app is None:
        return current_app._get_current_object()
    module_name, _, attribute = settings.app.partition(":")
    try:
        app = getattr(import_module(module_name), attribute or "app")
    except (ImportError, AttributeError) as error:
        raise OptionError(
            f"{NAME}['APP'] can't be imported",
            app=settings.app,
            reason=str(error),
            fix="Write 'package.module:name', as in celery -A.",
        ) from error
    if not isinstance(app, Celery):
        fix = "Write 'package.module:name', as in celery -A."
        raise OptionError(f"{NAME}['APP'] is not a Celery app", app=settings.app, fix=fix)
    return app


def app_of_broker(settings: DjangoSettings) -> Celery | None:
    """The Celery app whose broker the pages show; None if only the broker is named. Raises as :func:`celery_app`."""
    return None if settings.broker_url is not None and settings.app is None else celery_app(settings)


def broker_of(settings: DjangoSettings) -> tuple[str, dict[str, Any]]:
    """The broker's URL and options. Raises ``OptionError``."""
    app = app_of_broker(settings)
    if settings.broker_url is not None:
        url, options = brokers.pick_url(settings.broker_url), {} if app is None else app.conf.broker_transport_options
    else:
        url, options = brokers.broker_of(celery_app(settings))
    return url, {**(options or {}), **settings.options}


# -- the broker --------------------------------------------------------------------------------------------------------


def _open() -> Broker:
    """Open the broker. Raises ``OptionError``, or within ``CONNECT_TIMEOUT`` seconds a ``StoreError``."""
    settings = read()
    url, options = broker_of(settings)
    timeout_s = settings.options.get("connect_timeout", settings.connect_timeout)  # not the workers'
    return brokers.open_existing(url, **{**options, "connect_timeout": timeout_s})


lazy_broker = brokers.LazyBroker(_open)


def _on_change(*, setting: str, **_: Any) -> None:
    if setting.startswith("CELERY"):
        lazy_broker.close()


def follow_settings() -> None:
    """Forget the broker when tests change settings (``override_settings``)."""
    setting_changed.connect(_on_change, dispatch_uid="celery_fdb")


# -- views -------------------------------------------------------------------------------------------------------------


def outside_transactions(view: Callable[..., Any]) -> Any:
    """The view, exempt from ``ATOMIC_REQUESTS`` of every database.

    The entry of an action in the admin's log is committed before the action: in the request's transaction, it would be
    gone with a process that dies in between, and would lock an SQLite database for as long as the action takes.
    """

    @wraps(view)  # a method, as from an admin site whose admin_view returns what it is given, takes no attribute
    def exempt(*args: Any, **kwargs: Any) -> Any:
        return view(*args, **kwargs)

    for alias in connections:
        transaction.non_atomic_requests(alias)(exempt)
    return exempt
