"""Forward compatibility: what an older process can't handle of a newer version is kept until a newer process reads it.

While a fleet is upgraded, old processes meet messages of new ones. They handle them as usual unless they must read
their contents: every version keeps the fields that this needs (``codec.py``). If an old process would have to read such
a message, it neither delivers nor buries it: the message is *kept*.

Model. ``("newer", kind, version, queue, place)`` holds the record, or the lease, as it was.

* in its place -> kept: an old process meets it in a claim, finds its lease in a dead session, or would bury it, because
  it is over its delivery limit or must give way to others. One transaction moves it out of its place (ONE-PLACE).
* kept -> in its place: any process that knows the version returns it (``release.py``); two processes that try conflict
  on the row.

A kept message delays no others: the messages after it are served. It is counted, so that operators see it
(``QueueCounts.newer``). It neither expires nor gives way, and stays when its queue is purged or deleted, as a leased
one does. It keeps its stamp, and so its row in the index by task (``messages/message.py``). Once it is regained, an old
consumer may keep it again before a new one claims it; that ends with the last old process.
"""

from __future__ import annotations

from kombu_fdb.engine.work import Work
from kombu_fdb.keyspace import codec
from kombu_fdb.keyspace.layout import Keyspace, Range, read_or, split_place
from kombu_fdb.model import Place

RECORD, LEASE = "record", "lease"


def readable_ranges(keys: Keyspace) -> list[Range]:
    """The ranges of kept records, and of kept leases, that this version can read."""
    return [keys.newer_until(RECORD, codec.RECORD_VERSION), keys.newer_until(LEASE, codec.LEASE_VERSION)]


def keep(work: Work, queue: str, value: bytes, place: bytes) -> bool:
    """Keep a newer record, which its caller has taken out of ``place`` (or key) in ``queue``.

    Does nothing, and returns False, if it is not a newer record, or its place can't be read.
    """
    stood = read_or(None, _place, work.keys, queue, place) if codec.Record.is_newer(value) else None
    if stood is None:
        return False
    work.tr.set(work.keys.newer(RECORD, value[0], queue, stood), value)
    work.effects.change(queue, "newer", 1)
    return True


def _place(keys: Keyspace, queue: str, place: bytes) -> Place:
    is_key = place.startswith((keys.ready(queue), keys.keyed(queue)))
    stood = keys.place(queue, place) if is_key else Place(place)
    split_place(stood)
    return stood


def keep_lease(work: Work, value: bytes) -> tuple[str, Place] | None:
    """Keep a newer lease, which its caller clears and ends. Returns queue and place; None if it is not newer."""
    kept = read_or(None, codec.Message.of_lease, value, newer=True)
    if kept is None or value[0] <= codec.LEASE_VERSION:
        return None
    queue, place, _ = kept
    work.tr.set(work.keys.newer(LEASE, value[0], queue, place), value)
    work.effects.change(queue, "newer", 1)
    return queue, place
