"""Models for what is in the store, to which Django attaches permissions, admin pages and log entries.

``managed = False`` and no migrations: there are no tables. ``migrate`` creates the permissions.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from django.db import models
from django.db.models.manager import EmptyManager
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

# -- permissions -------------------------------------------------------------------------------------------------------


Permission = Literal["view_queue", "view_body", "manage_queue", "manage_worker"]


def allows(request: HttpRequest, permission: Permission) -> bool:
    """Whether the user has a permission."""
    user: Any = request.user
    return bool(user.has_perm(f"celery_fdb.{permission}"))


class Unmanaged(models.Model):
    """A model without a table, and so without rows: ``dumpdata`` asks every model for them."""

    objects: ClassVar = EmptyManager(models.Model)

    class Meta:
        abstract = True
        managed = False
        base_manager_name = "objects"
        default_permissions: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(self.pk)


class Queue(Unmanaged):
    """A queue of the broker."""

    name: models.CharField[str, str] = models.CharField(_("name"), max_length=255, primary_key=True)

    class Meta(Unmanaged.Meta):
        default_permissions = ("view",)
        permissions: ClassVar = [
            ("manage_queue", _("Can pause and resume queues, cancel messages, replay and discard dead letters")),
            ("manage_worker", _("Can shut down and resize workers, and limit the rates of their tasks")),
            ("view_body", _("Can see the bodies and arguments of messages")),
        ]


class DeadLetter(Unmanaged):
    """The admin's entry for the queues of dead letters; permissions are those of :class:`Queue`."""


class Session(Unmanaged):
    """A consumer process; permissions are those of :class:`Queue`."""


# -- texts -------------------------------------------------------------------------------------------------------------


#: Characters that UTF-8 can't encode (lone surrogates), or PostgreSQL can't store (NUL).
_UNFIT = re.compile("[\x00\ud800-\udfff]")


def fit(text: str) -> str:
    """Text from the store, for Django's database: each of these characters becomes a visible U+FFFD."""
    return _UNFIT.sub("\ufffd", text)
