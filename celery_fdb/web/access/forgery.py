"""A form that another site sends in a person's name is refused.

Two checks, and both must pass. The browser says where a form comes from (``Origin``): it has to be this host, and a
form without one is taken only if ``Sec-Fetch-Site`` does not contradict. And the form repeats a value that stands in a
cookie, which another site can neither read nor set.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers

COOKIE = "celery_fdb_form"
FIELD = "form_token"
_SHORTEST = 32


def is_forged(headers: Headers, cookie: str, field: str) -> bool:
    """Whether to refuse a POST with this cookie and this field."""
    if not _comes_from_here(headers):
        return True
    if len(cookie) < _SHORTEST:
        return True
    return not hmac.compare_digest(cookie.encode(errors="replace"), field.encode(errors="replace"))


def _comes_from_here(headers: Headers) -> bool:
    origin = headers.get("origin")
    if origin is None:
        return headers.get("sec-fetch-site", "same-origin") in {"same-origin", "none"}
    try:
        return urlsplit(origin).netloc.lower() == headers.get("host", "").lower() != ""
    except ValueError:
        return False
