"""Where the pages are. Names of queues and keys stand in the query, where any text may stand.

In a path, browsers and proxies have opinions of their own on "..", "%2F" and empty parts.
"""

from __future__ import annotations

from urllib.parse import unquote, urlencode

PATHS = {
    "overview": "/",
    "events": "/events",
    "queues": "/queues",
    "queue": "/queue",
    "keys": "/keys",
    "messages": "/messages",
    "message": "/message",
    "dead": "/dead",
    "causes": "/causes",
    "tasks": "/tasks",
    "runs": "/runs",
    "task": "/task",
    "workflows": "/workflows",
    "workflow": "/workflow",
    "schedules": "/schedules",
    "sessions": "/sessions",
    "workers": "/workers",
    "act": "/act",
    "login": "/login",
    "logout": "/logout",
    "static": "/static",
}
#: In the bar on top of each page.
NAVIGATION = (
    ("overview", "Overview"),
    ("queues", "Queues"),
    ("causes", "Dead letters"),
    ("tasks", "Tasks"),
    ("workflows", "Workflows"),
    ("schedules", "Schedules"),
    ("sessions", "Sessions"),
    ("workers", "Workers"),
    ("task", "Find"),
)


def url(root: str, page: str, **query: object) -> str:
    """The address of a page under whatever prefix the dashboard is mounted. None in ``query``: not there."""
    given = {name: value for name, value in query.items() if value is not None}
    path = root.rstrip("/") + PATHS[page]
    return f"{path}?{urlencode(given, errors='replace')}" if given else path


def local_path(root: str, target: str) -> str:
    """``target`` if it is an address of this dashboard, else its first page: no visitor is led to another site."""
    first = url(root, "overview")
    parts = unquote(target.split("?", 1)[0]).split("/")  # browsers read %2e as a dot
    is_plain = target.isprintable() and "\\" not in target and not {".", ".."} & set(parts)
    return target if target.startswith(first) and not target.startswith("//") and is_plain else first
