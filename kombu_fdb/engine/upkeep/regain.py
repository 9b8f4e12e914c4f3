"""Regain: return to its place what an older process kept for a newer one (``newer.py``)."""

from __future__ import annotations

from kombu_fdb.engine.messages import settle
from kombu_fdb.engine.messages.bury import bury, bury_malformed
from kombu_fdb.engine.stored import newer
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import Message
from kombu_fdb.model import Place
from kombu_fdb.store.protocol import KeyValue

MESSAGES_PER_TRANSACTION = 200


def is_any(work: Work) -> bool:
    """Whether something is kept that this version can read. Snapshot."""
    return any(work.tr.get_ranges([(*each, 1) for each in newer.readable_ranges(work.keys)], snapshot=True))


def part(work: Work, limit: int) -> int:
    """Return up to ``limit`` messages to their places. Returns how many."""
    records, leases = work.tr.get_ranges([(*each, limit) for each in newer.readable_ranges(work.keys)], snapshot=True)
    for number, row in enumerate((records + leases)[:limit]):
        _regain(work, row, is_lease=number >= len(records))
    return min(len(records) + len(leases), limit)


def _regain(work: Work, row: KeyValue, *, is_lease: bool) -> None:
    kept, value = row
    work.tr.add_read_conflict_key(kept)
    work.tr.clear(kept)
    try:
        queue, place = work.keys.split_newer(kept)
    except FormatError:  # not written by us
        return
    work.effects.change(queue, "newer", -1)
    message = Message(queue, place, value)
    if is_lease:
        _return(work, message)
    elif settle.over_limit(work, message, again=0):
        bury(work, message, "delivery_limit")
    else:
        settle.release_message(work, message, "none")


def _return(work: Work, kept: Message[Place]) -> None:
    """Release a message that a dead session held; ``kept.value`` is its lease."""
    try:
        record = Message.of_lease(kept.value).value
    except FormatError as error:
        bury_malformed(work, kept, error)
        return
    settle.release_message(work, kept._replace(value=record), "counted")
