"""The project's Celery app, set up as Celery's own documentation says."""

import os

from celery import Celery

from celery_fdb.tasks.failures import install

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "django_shop.settings")

app = Celery("django_shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
install(app)  # workers tell dead letters what they failed of
