"""Importing the app here makes it the one that ``shared_task`` and the admin use."""

from django_shop.celery import app as celery_app

__all__ = ["celery_app"]
