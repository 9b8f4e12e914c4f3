"""Masking: secrets are hidden in what people may see: headers, properties, errors, tracebacks, arguments of queues.

A value is a secret if its name sounds like one, wherever it is: in a header, in a dict inside a header, in a text as
``password='x'`` or ``"token": "x"``, in a URL as ``user:x@host``. This protects against a look over the shoulder and in
screenshots, not against a user who may read the store; a secret without a telling name is not found.
``settings/location.py`` masks a store's own URL.

In a text, the value is everything that may belong to it: a quoted string, a bracket or a ``repr`` up to its end, or, if
that was cut off, the rest of the text; the rest of the line for a header with credentials; else the next word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "••••••"

_WORDS = (
    *("authorization", "password", "passwd", "passphrase", "pwd", "secret", "token", "cookie", "credential"),
    *("api_?key", "private_?key", "access_?key", "signing_?key", "session_?key", "session_?id"),
    *("(?<![a-z])pw(?![a-z])", "(?<![a-z])pass(?![a-z])"),
)
_NAME = re.compile("|".join(_WORDS).replace("_?", "[-_ ]?"), re.IGNORECASE)
#: A text without any of these, as ``casefold`` has it, names no secret: to look for them takes a thirtieth of the time.
_HINTS = ("auth", "pass", "pw", "secret", "token", "cook", "cred", "key", "sess", "://")
#: Each repetition is bounded: a hostile text costs no more than its length.
_NAMED = re.compile(rf"(?P<name>{_NAME.pattern})[\w-]{{0,40}}\\?[\"']?\]?\s{{0,5}}(?:=>|[:=])\s{{0,5}}", re.IGNORECASE)
_OF_THE_LINE = re.compile("authorization|cookie", re.IGNORECASE)
#: Up to the quote that ends the string around it; its own parameters are quoted as well, as in ``realm="x"``.
_LINE = re.compile(r"(?:=\\?\"[^\"\r\n]{0,2000}\"|=\\?'[^'\r\n]{0,2000}'|[^\r\n\"'])*")
#: A string as written by Python, JSON, or JSON inside a string.
_QUOTE = re.compile(r"[bBrRuUfF]{0,2}(\\?[\"'])")
_PEM = re.compile(r"-----BEGIN[^-]{0,100}-----(?:(?!-----END)[\s\S])*(?:-----END[^-]{0,100}-----)?")
_WORD = re.compile(r"(?:(?:bearer|basic|digest|token|apikey)\s{1,5})?[^\s&]{1,10000}", re.IGNORECASE)
_BRACKETS = {"[": "]", "{": "}", "(": ")", "<": ">"}
#: An opening bracket, as of a list; in a ``repr``, with the name before it: ``User(name='x')``.
_CALLED = re.compile(r"[\w.]{0,200}[\[{(]|<")
_TOKENS = re.compile(r"[bBrRuUfF]{0,2}\\?[\"']|[\[\]{}()<>]")

_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]{0,40})://(?P<rest>[^\s\"'<>]{1,10000})", re.IGNORECASE)
_PORT = re.compile(r"\d{0,5}")
#: Values that are nested deeper are shown as dots.
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


def plain(text: str) -> str:
    """The text, with characters escaped that end a line, colour a terminal or reverse the writing direction."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def masked_text(text: str) -> str:
    """A text, such as an error or a ``repr``, without the secrets that it names."""
    small = text.casefold()
    for hint in _HINTS:
        if hint in small:
            break
    else:
        return text
    parts, at = [], 0
    while (found := _NAMED.search(text, at)) is not None:
        begin = found.end()
        end = _end_of_value(text, begin, whole_line=_OF_THE_LINE.fullmatch(found["name"]) is not None)
        parts += [text[at:begin], MASK if end > begin else ""]
        at = end
    return _URL.sub(_masked_url, "".join([*parts, text[at:]]))


def _end_of_value(text: str, begin: int, *, whole_line: bool) -> int:
    quote = _QUOTE.match(text, begin)
    if quote is not None:
        return _end_of_string(text, quote.end(), quote[1])
    bracket = _CALLED.match(text, begin)
    if bracket is not None:
        return _end_of_bracket(text, bracket.end() - 1)
    if (pem := _PEM.match(text, begin)) is not None:
        return pem.end()
    if whole_line and (line := _LINE.match(text, begin)) is not None:
        return line.end()
    word = _WORD.match(text, begin)
    if word is None:
        return begin
    return max(begin + len(word[0].rstrip(",;.)}]\"'")), begin + 1)


def _end_of_string(text: str, begin: int, quote: str) -> int:
    """The position after the closing quote, which in an escaped string is escaped as well."""
    at = begin
    while at < len(text):
        if text.startswith(quote, at):
            return at + len(quote)
        at += 2 if text[at] == "\\" else 1
    return len(text)


def _end_of_bracket(text: str, begin: int) -> int:
    closing, at = [_BRACKETS[text[begin]]], begin + 1
    while closing and (found := _TOKENS.search(text, at)) is not None:
        token, at = found[0], found.end()
        if token in _BRACKETS:
            closing.append(_BRACKETS[token])
        elif token[-1] in "\"'":
            at = _end_of_string(text, at, token.lstrip("bBrRuUfF"))
        elif token == closing[-1]:
            closing.pop()
    return len(text) if closing else at


def _masked_url(found: re.Match[str]) -> str:
    rest = found["rest"]
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    user, colon, password = authority.partition(":")
    if "@" in authority:
        end = authority.rindex("@")
    elif colon and "@" in rest and not _PORT.fullmatch(password):  # a password with a slash
        end = rest.rindex("@")
    elif colon and user[:1] != "[" and not _PORT.fullmatch(password) and rest == authority and _is_cut(found):
        end = len(rest)
    else:
        return found[0]
    if found["scheme"].lower() in {"http", "https"}:  # there a token may replace the user
        return f"{found['scheme']}://{MASK}{rest[end:]}"
    return f"{found['scheme']}://{user}:{MASK}{rest[end:]}" if ":" in rest[:end] else found[0]


def _is_cut(found: re.Match[str]) -> bool:
    """Whether the text may have been cut off inside the URL: stored errors and arguments have a maximum length."""
    return found.end() == len(found.string) or found["rest"].endswith("...")
