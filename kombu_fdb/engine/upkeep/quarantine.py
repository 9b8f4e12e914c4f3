"""What the duties have set aside because they failed on it, and the orphaned rows that they clear.

Quarantine: what a duty could not handle is set aside, visible to people, and delays nothing else. A row ``("aside",
duty, subject)`` says which queue, session or other subject a duty fails on, why, how often and since when. The process
whose duty failed writes it, and clears it when the duty succeeds; if that process is gone, the duties clear the row
once it has not changed for a while.

Orphans: rows of deleted queues and exchanges. Deleting a queue clears all its rows, but consumers may still hold its
messages: a lease that ends later rings the bell of the deleted queue. Deleting an exchange leaves its epoch, which
tells the caches of other processes of the deletion. A process that has seen such a row unchanged for long enough clears
it, in a transaction that conflicts with every new use of the name.
"""

from __future__ import annotations

from typing import NamedTuple

from kombu_fdb.engine import topology
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import decode_json, encode_json
from kombu_fdb.keyspace.layout import Keyspace, range_of
from kombu_fdb.primitives.masking import masked_text, plain
from kombu_fdb.routing.tables import PREDECLARED

# -- quarantine --------------------------------------------------------------------------------------------------------


#: The longest error text that is kept, in characters.
LONGEST_ERROR = 500
#: How many entries are shown.
MOST_SHOWN = 1_000


class Aside(NamedTuple):
    """``subject``: a queue's name, a session's id in hexadecimal digits, or "" for the whole duty.

    ``error``: on one line when it is read, with secrets masked. ``since_ms``: by the wall clock.
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
    """Record what a duty could not handle."""
    fields = {"error": aside.error[:LONGEST_ERROR], "times": aside.times, "since_ms": aside.since_ms}
    work.tr.set(work.keys.aside(aside.duty, aside.subject), encode_json(fields))


def read(work: Work) -> list[Aside]:
    """What the duties of all processes could not handle, and why; up to :data:`MOST_SHOWN`. Snapshot."""
    return [
        _decode(work.keys, *row) for row in work.tr.get_range(*work.keys.all_asides, limit=MOST_SHOWN, snapshot=True)
    ]


def forget(work: Work, duty: str, subject: str) -> None:
    """Clear the entry of a duty that succeeds again."""
    work.tr.clear(work.keys.aside(duty, subject))


def _decode(keys: Keyspace, key: bytes, value: bytes) -> Aside:
    """As much of the entry as can be read."""
    try:
        duty, subject = (str(each) for each in keys.unpack(key)[1:])
        fields = decode_json(value)
        error = plain(masked_text(str(fields["error"])))
        return Aside(duty, subject, error, int(fields["times"]), int(fields["since_ms"]))
    except (FormatError, KeyError, TypeError, ValueError):
        return Aside("", "", "unreadable", 0, 0)


# -- orphans -----------------------------------------------------------------------------------------------------------


def clear_queue(work: Work, queue: str, bell: bytes) -> bool:
    """Clear the rows of an undeclared queue, if its bell is unchanged since it was observed.

    Does nothing if the queue has messages, or an operator's settings. A publish to it sets the bell.
    """
    found = work.tr.get_many([work.keys.bell(queue), work.keys.queue(queue), work.keys.control(queue)])
    if found != [bell, None, None]:
        return False
    ranges = [
        work.keys.counts(queue),
        work.keys.all_limits(queue),
        range_of(work.keys.ready(queue)),
        range_of(work.keys.delayed(queue)),
    ]
    if any(work.tr.get_ranges([(*each, 1) for each in ranges])):
        return False
    return topology.delete_queue(work, queue, if_unused=True, if_empty=True) is not None


def clear_exchange(work: Work, exchange: str, epoch: bytes) -> bool:
    """Clear the epoch of a deleted exchange, if it is unchanged since it was observed.

    A cache entry from before the deletion has another epoch, and a later one has no binding: neither becomes wrong.
    """
    found = work.tr.get_many([work.keys.epoch(exchange), work.keys.exchange(exchange)])
    if exchange in PREDECLARED or found != [epoch, None]:
        return False
    if work.tr.get_range(*work.keys.bindings(exchange), limit=1):
        return False
    work.tr.clear(work.keys.epoch(exchange))
    return True
