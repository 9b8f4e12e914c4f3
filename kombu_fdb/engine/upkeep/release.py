"""Release: return messages from dead sessions, and from older processes that could not read them, to their queues.

Dead sessions. Guarantees: BACK-SOON, NOT-TWICE. Every consumer process sweeps: it observes the sessions that follow its
own in the ring of session ids, and decides which of them are dead (``process/duty_cycle.py``). No process is elected,
so the death of a sweeper delays nothing. The fencing transaction decides which of several sweepers ends a session, and
two that release the same messages conflict on the leases. See ``session.py`` for the states. A lease that can't be
released even in a transaction of its own is skipped, and stays; the others are released.

Older processes. What one has kept for a newer version is *regained*: returned to its place
(``forward_compatibility.py``).
"""

from __future__ import annotations

from kombu_fdb.engine import forward_compatibility
from kombu_fdb.engine.messages import settle
from kombu_fdb.engine.messages.bury import bury, bury_malformed
from kombu_fdb.engine.messages.message import end_lease
from kombu_fdb.engine.scheduling import single, wait_queue
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import Message
from kombu_fdb.keyspace.layout import range_of, split_place
from kombu_fdb.model import SessionId
from kombu_fdb.store.protocol import KeyValue

# -- from dead sessions ------------------------------------------------------------------------------------------------


MESSAGES_PER_TRANSACTION = 200


def release_part(
    work: Work, limit: int, session_id: SessionId, cursor: bytes = b"", *, counted: bool = True
) -> tuple[int, bytes]:
    """Release up to ``limit`` messages of a fenced session. Returns how many, and where to continue; b"" at the end.

    The leases are conflict keys: a concurrent acknowledgement makes this transaction start again.
    """
    if work.tr.get(work.keys.session(session_id)) is not None:
        return 0, b""  # still open
    begin, end = range_of(work.keys.leases(session_id))
    rows = work.tr.get_range(max(begin, cursor), end, limit=limit, snapshot=True)
    for key, value in rows:
        work.tr.add_read_conflict_key(key)
        work.tr.clear(key)
        _release(work, value, counted=counted)
    if rows:
        return len(rows), rows[-1][0] + b"\x00"
    if not cursor or not work.tr.get_range(begin, cursor, limit=1, snapshot=True):
        single.leave_each(work, session_id, work.tr.get_range(*work.keys.all_singles, snapshot=True))
    return 0, b""


def skip(work: Work, session_id: SessionId, cursor: bytes) -> bytes:
    """Where to continue after the next lease, which can't be released; b"" at the end."""
    begin, end = range_of(work.keys.leases(session_id))
    rows = work.tr.get_range(max(begin, cursor), end, limit=1, snapshot=True)
    return rows[0][0] + b"\x00" if rows else b""


def forget(work: Work, session_id: SessionId) -> None:
    """Clear the last row of a fenced session, its beat, by which others find it if the process that cleans up dies.

    The row stays as long as a lease does: the next sweep tries again to release that.
    """
    held = work.tr.get_range(*range_of(work.keys.leases(session_id)), limit=1)
    if not held and work.tr.get(work.keys.session(session_id)) is None:
        wait_queue.forget(work, session_id)
        work.tr.clear(work.keys.beat(session_id))


def _release(work: Work, lease: bytes, *, counted: bool) -> None:
    if (kept := forward_compatibility.keep_lease(work, lease)) is not None:
        work.effects.note(kept[0], "lost", split_place(kept[1])[0])
        end_lease(work, *kept)
        return
    try:
        message = Message.of_lease(lease)
    except FormatError as error:  # its queue is unknown: it goes to ``unreadable.dead``
        bury_malformed(work, Message("unreadable", b"", lease), error)
        return
    if counted:  # otherwise its owner releases it
        work.effects.note(message.queue, "lost", split_place(message.place)[0])
    end_lease(work, message.queue, message.place)
    settle.release_message(work, message, "counted" if counted else "none")


# -- from older processes ----------------------------------------------------------------------------------------------


def is_any_kept(work: Work) -> bool:
    """Whether something is kept that this version can read. Snapshot."""
    return any(
        work.tr.get_ranges([(*each, 1) for each in forward_compatibility.readable_ranges(work.keys)], snapshot=True)
    )


def regain_part(work: Work, limit: int) -> int:
    """Return up to ``limit`` messages to their places. Returns how many."""
    records, leases = work.tr.get_ranges(
        [(*each, limit) for each in forward_compatibility.readable_ranges(work.keys)], snapshot=True
    )
    for number, row in enumerate((records + leases)[:limit]):
        _regain(work, row, is_lease=number >= len(records))
    return min(len(records) + len(leases), limit)


def _regain(work: Work, row: KeyValue, *, is_lease: bool) -> None:
    kept, value = row
    work.tr.add_read_conflict_key(kept)
    work.tr.clear(kept)
    try:
        queue, place = work.keys.split_newer(kept)
    except FormatError:  # not written by celery-fdb
        return
    work.effects.change(queue, "newer", -1)
    message = Message(queue, place, value)
    if is_lease:  # a dead session's
        try:
            message = message._replace(value=Message.of_lease(value).value)
        except FormatError as error:
            bury_malformed(work, message, error)
            return
    elif settle.over_limit(work, message, again=0):
        bury(work, message, "delivery_limit")
        return
    settle.release_message(work, message, "counted" if is_lease else "none")
