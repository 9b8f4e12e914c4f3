"""Secrets in what people may see of a message: headers, properties, errors, tracebacks, arguments of queues.

A value is a secret if its name sounds like one, wherever it stands: in a header, in a dict inside of a header, in a
text as ``password='x'`` or ``"token": "x"``, in a URL as ``user:x@host``. This protects from looks over a shoulder and
from screenshots, not from whoever may read the store: a secret that nothing names is not found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["MASK", "masked", "masked_text"]

MASK = "••••••"

_WORDS = (
    *("authorization", "password", "passwd", "passphrase", "secret", "token", "cookie", "credential"),
    *("api_?key", "private_?key", "access_?key", "signing_?key"),
)
_NAME = re.compile("|".join(_WORDS).replace("_?", "[-_ ]?"), re.IGNORECASE)
#: The parts of each repetition are bounded: a hostile text costs no more than its length.
_IN_TEXT = re.compile(
    rf"((?:{_NAME.pattern})[\w-]{{0,40}}\\?[\"']?\]?\s{{0,5}}(?:=>|[:=])\s{{0,5}}(?:(?:bearer|basic)\s{{1,5}})?)"
    r"(\\?'[^']{0,2000}'|\\?\"[^\"]{0,2000}\"|[^\s,;&)}\]]{1,2000})",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(?<=://)([^\s:/@]{0,200}):[^\s/@]{1,200}@")
#: Deeper than anybody looks.
_DEEPEST = 40


def masked(name: str, value: Any, depth: int = 0) -> Any:
    """The value without its secrets; :data:`MASK` if its name sounds like one. Dicts and lists are copied."""
    if _NAME.search(name):
        return MASK
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, str):
        return masked_text(value)
    if isinstance(value, Mapping):
        return {masked_text(str(each)): masked(str(each), inner, depth + 1) for each, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked("", each, depth + 1) for each in value]
    return value


def masked_text(text: str) -> str:
    """A text, such as an error or a ``repr``, without the secrets that it names."""
    return _IN_URL.sub(rf"\1:{MASK}@", _IN_TEXT.sub(rf"\1{MASK}", text))
