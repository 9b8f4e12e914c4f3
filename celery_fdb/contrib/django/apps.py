from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import Tags, register
from django.utils.translation import gettext_lazy as _


class CeleryFdbConfig(AppConfig):
    """The label is ``celery_fdb``: permissions are ``celery_fdb.view_queue`` and so on."""

    name = "celery_fdb.contrib.django"
    label = "celery_fdb"
    verbose_name = _("Celery broker")
    default_auto_field = "django.db.models.BigAutoField"  # of no table; unset, Django warns of W042

    def ready(self) -> None:
        from celery_fdb.contrib.django import checks, conf

        register(checks.check_settings)
        register(checks.check_project)
        register(checks.check_store_files, Tags.files)
        register(checks.check_deployment, deploy=True)
        conf.follow_settings()
