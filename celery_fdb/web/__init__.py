"""The dashboard: an ASGI application that runs by itself (``celery -A proj fdb web``) or mounted into another one.

::

    from celery_fdb.web import dashboard

    app.mount("/fdb", dashboard("fdb:///shop", token=os.environ["DASHBOARD_TOKEN"]))

It needs the extra: ``pip install 'celery-fdb[web]'``.
"""

from __future__ import annotations

try:
    from celery_fdb.web.application import dashboard
    from celery_fdb.web.settings import User
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in {"starlette", "jinja2"}:
        raise
    text = f"the dashboard needs {error.name}, which is not installed. Run: pip install 'celery-fdb[web]'"
    raise ModuleNotFoundError(text, name=error.name) from error

__all__ = ["User", "dashboard"]
