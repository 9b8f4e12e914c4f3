"""Django: put ``celery_fdb.contrib.django`` into ``INSTALLED_APPS``. What that gives is told in ``docs/django.md``.

It has no tables. Its models are names under which Django keeps permissions and the admin its log; what the pages show
is read from the broker's store when they are asked for.
"""
