"""The dashboard: an ASGI application that runs by itself (``celery -A proj fdb web``) or mounted into another one.

::

    from celery_fdb.web import dashboard

    app.mount("/fdb", dashboard("fdb:///shop", token=os.environ["DASHBOARD_TOKEN"]))

It needs the extra: ``pip install 'celery-fdb[web]'``.
"""

from __future__ import annotations

from celery_fdb.web.access.user import User
from celery_fdb.web.application import dashboard

__all__ = ["User", "dashboard"]
