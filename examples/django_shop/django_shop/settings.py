"""A project as ``startproject`` makes it; what is new for celery-fdb stands at the end.

The two databases are files in ``SHOP_DIRECTORY`` (this folder if unset). ``CELERY_BROKER_URL`` may name another broker.
"""

import os
from pathlib import Path

from kombu import Queue

BASE_DIR = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("SHOP_DIRECTORY", BASE_DIR))

SECRET_KEY = "an example has no secrets"
DEBUG = True
ALLOWED_HOSTS = ["localhost", "127.0.0.1"]
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "celery_fdb.contrib.django",  # pages in the admin, checks, manage.py fdb
    "celery_fdb.contrib.outbox.django",  # tasks in the order's transaction, manage.py fdb_relay
    "shop",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
ROOT_URLCONF = "django_shop.urls"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": DATA / "shop.sqlite3",
        # The web server and several workers write: wait for each other instead of failing.
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_TZ = True
STATIC_URL = "static/"

# -- Celery on celery-fdb -------------------------------------------------------------------------------------------

CELERY_BROKER_URL = os.environ.get("CELERY_BROKER_URL", f"fdb+sqlite:///{DATA}/broker.db")
# The workers' queues. (The first one is for tasks without a route.)
CELERY_TASK_QUEUES = [Queue("celery"), Queue("payments"), Queue("reminders")]
CELERY_TASK_ROUTES = {"shop.tasks.charge": {"queue": "payments"}, "shop.tasks.remind": {"queue": "reminders"}}
CELERY_TASK_ACKS_LATE = True  # a task whose worker dies runs again
CELERY_TASK_IGNORE_RESULT = True  # what came of an order stands in the order
CELERY_FDB = {"PAGE_SIZE": 25}
