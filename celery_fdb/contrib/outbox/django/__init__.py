"""The outbox of a Django project: add ``celery_fdb.contrib.outbox.django`` to ``INSTALLED_APPS``, and migrate.

::

    from celery_fdb.contrib.outbox.django import delay

    with transaction.atomic():
        order = Order.objects.create(...)
        delay(charge, order.pk)

The task's row is committed with the order, or rolled back with it. Right after the commit, this process publishes its
own rows, all rows of a transaction together. If it dies, or the broker does not answer, ``manage.py fdb_relay``
publishes them. :mod:`celery_fdb.contrib.outbox` describes the model of rows and relays, and the guarantees.
"""

from __future__ import annotations

from typing import Any

from celery import Task
from celery.canvas import Signature

__all__ = ["add", "apply_async", "delay"]


def delay(task: Task, *args: Any, **kwargs: Any) -> Any:
    """As ``task.delay(*args, **kwargs)``, in a transaction of the outbox's database. Returns the result."""
    return apply_async(task, args, kwargs)


def apply_async(task: Task, args: Any = None, kwargs: Any = None, *, using: str | None = None, **options: Any) -> Any:
    """As ``task.apply_async``. ``countdown`` and ``expires`` count from this call.

    ``using``: the database whose transaction it is. Raises ``TypeError`` for arguments that are not JSON.
    """
    return add(task.signature(args or (), kwargs or {}, **options), using=using)


def add(signature: Signature, *, using: str | None = None) -> Any:
    """The same for a signature, group, chain or chord."""
    from celery_fdb.contrib.outbox.django.database import outbox

    return outbox(using).put(signature)
