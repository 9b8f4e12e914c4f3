"""Task index: find a task's messages by the task's id, wherever they wait.

Model. A message's place ends in its stamp, and a row ``("task", task_id, stamp)`` holds what stands before the stamp
there. The row is written wherever a message gets a stamp (publish, promote, release with a delay, burial, replay) and
cleared wherever its stamp ends (the same verbs, and ack, deletion, purge, expiry), in the same transaction. A claim and
the return to the old place leave stamp and row alone, and cost nothing for it: a row whose place is empty is that of a
message under a lease, or of one that is kept for a newer version.

A task may have several messages at a time: one per queue it was routed to, and the next attempt beside the one that
publishes it. A message without a task id has no row and pays nothing.
"""

from __future__ import annotations

from kombu_fdb.engine.stored.work import Work
from kombu_fdb.keyspace.layout import STAMP_CODE, range_of, read_or

#: A versionstamp and the 2 bytes that order the messages of one transaction.
STAMP_BYTES = 12
#: Messages of one task in one transaction: publishers choose the ids, and may give many messages the same one.
MOST_OF_TASK = 500


def forget(work: Work, task_id: str, place: bytes) -> None:
    """The message leaves ``place`` (or key) for good, and with it the stamp in which that ends."""
    if task_id and place:
        work.tr.clear(work.keys.task(task_id) + STAMP_CODE + place[-STAMP_BYTES:])


def places(work: Work, task_id: str, after: bytes = b"", *, snapshot: bool = False) -> tuple[list[bytes], bytes]:
    """The keys of the task's messages, in the order in which they got there; of a leased one, where it was.

    Up to :data:`MOST_OF_TASK` of them, behind ``after``, and where the others begin; b"" if there are none. A row that
    leads to anything but a message is ignored: callers may delete what is found here.
    """
    begin, end = range_of(work.keys.task(task_id))
    rows = work.tr.get_range(max(begin, after), end, limit=MOST_OF_TASK, snapshot=snapshot)
    found = [work.keys.prefix + prefix + key[-STAMP_BYTES:] for key, prefix in rows]
    following = rows[-1][0] + b"\x00" if len(rows) == MOST_OF_TASK else b""
    return [key for key in found if read_or(None, work.keys.queue_of, key) is not None], following
