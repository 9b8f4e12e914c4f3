"""Asides: what a duty could not do, set aside so that it delays nothing else, for people to see.

A row ``("aside", duty, subject)`` says which queue, session or whatever else a duty fails on, why, how often and since
when. The process whose duty failed writes it, and clears it when the same succeeds; if that process is gone, the
duties clear it once it has not changed for a while.
"""

from __future__ import annotations

from typing import NamedTuple

from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import decode_json, encode_json
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.primitives.masking import masked_text, plain

#: Of an error's text, in characters.
LONGEST_ERROR = 500
#: Shown at most.
MOST_SHOWN = 1_000


class Aside(NamedTuple):
    """``subject``: a queue's name, a session's id in hexadecimal digits, or "" for all of the duty. Wall clock.

    ``error``: as it is read, without the secrets that it names, and on one line.
    """

    duty: str
    subject: str
    error: str
    times: int
    since_ms: int

    def __str__(self) -> str:
        about = f" of {self.subject!r}" if self.subject else ""
        return f"{self.duty}{about}, {self.times} times: {self.error}"


def write(work: Work, aside: Aside) -> None:
    fields = {"error": aside.error[:LONGEST_ERROR], "times": aside.times, "since_ms": aside.since_ms}
    work.tr.set(work.keys.aside(aside.duty, aside.subject), encode_json(fields))


def read(work: Work) -> list[Aside]:
    """Snapshot."""
    return [
        _decode(work.keys, *row) for row in work.tr.get_range(*work.keys.all_asides, limit=MOST_SHOWN, snapshot=True)
    ]


def _decode(keys: Keyspace, key: bytes, value: bytes) -> Aside:
    """Of bytes that can't be read, as much as can."""
    try:
        duty, subject = (str(each) for each in keys.unpack(key)[1:])
        fields = decode_json(value)
        error = plain(masked_text(str(fields["error"])))
        return Aside(duty, subject, error, int(fields["times"]), int(fields["since_ms"]))
    except (FormatError, KeyError, TypeError, ValueError):
        return Aside("", "", "unreadable", 0, 0)
