"""Templates, and the words by which they show numbers, ages and moments."""

from __future__ import annotations

import hashlib
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from celery_fdb.inspection.time_formats import age, limit, moment, rate
from celery_fdb.operations.action import carried
from kombu_fdb.primitives.masking import masked_text, plain

HERE = Path(__file__).parent
#: A dash.
NOTHING = "\N{EN DASH}"
TONES = {
    **dict.fromkeys(("SUCCESS", "alive"), "good"),
    **dict.fromkeys(("FAILURE", "LOST", "dead", "REJECTED"), "bad"),
    **dict.fromkeys(("RETRY", "STARTED", "leased"), "busy"),
}


@cache
def environment() -> Environment:
    """Everything that a template shows is text, never markup, unless the template itself says so."""
    made = Environment(
        loader=PackageLoader("celery_fdb.web", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "number": number,
        "age_s": partial(age, nothing=NOTHING),
        "took": took,
        "rate": partial(rate, nothing=NOTHING),
        "limit": limit,
        "clock": clock,
    }
    made.globals["carried"] = carried
    made.filters |= {"tone": tone, "masked": masked_text, "moment": moment_of, "plain": plain}
    return made


@cache
def files_version() -> str:
    """Changes with any of the static files, so that browsers may keep them."""
    digest = hashlib.sha256()
    for path in sorted((HERE / "static").rglob("*")):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def html(template: str, context: dict[str, Any]) -> bytes:
    """What UTF-8 can't write, as lone surrogates in a message's headers, becomes a question mark."""
    return environment().get_template(f"{template}.html").render(context).encode(errors="replace")


# -- filters -----------------------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """With thin separators; a dash for what is not known."""
    return NOTHING if value is None else f"{value:,}".replace(",", "\u202f")


def moment_of(seconds: float) -> datetime:
    """Seconds since 1970."""
    return moment(seconds * 1000)


def clock(moment: Any) -> str:
    """A moment in UTC; scripts show it in the reader's time zone."""
    return NOTHING if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def took(seconds: float | None) -> str:
    """Of a run: three digits, in the unit that suits."""
    if seconds is None:
        return NOTHING
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 60 else age(seconds)


def tone(state: str) -> str:
    """The class of a tag that shows the state."""
    return TONES.get(state, "plain")
