"""The pages in a project's own addresses, beside the admin or without it.

::

    urlpatterns = [path("ops/fdb/", include("celery_fdb.contrib.django.urls"))]

Users who have logged in and have ``celery_fdb.view_queue`` see them; others are led to ``LOGIN_URL``, or refused.
"""

from __future__ import annotations

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import re_path
from django.views.decorators.csrf import csrf_protect

from celery_fdb.contrib.django import conf


def _page(request: HttpRequest, path: str) -> HttpResponseBase:
    from celery_fdb.contrib.django.pages import page

    return page(request, path)


app_name = "celery_fdb"
_view = conf.outside_transactions(csrf_protect(login_required(_page)))
urlpatterns = [re_path(r"^(?P<path>.*)$", _view, name="pages")]
