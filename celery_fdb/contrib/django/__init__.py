"""Django: add ``celery_fdb.contrib.django`` to ``INSTALLED_APPS``. ``docs/django.md`` describes what you get.

The app has no tables. Its models only give Django's permissions and the admin's log their names. The pages read the
broker's store when they are requested.
"""
