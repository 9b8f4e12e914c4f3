"""Restore: store messages of another store (``dump.py``), each once, however often one tries.

Model. An *import* has an id, and each of its messages a *mark* that is its alone. The transaction that stores a message
also sets ``("imported", id, mark)``, having read it serializably as absent. So whatever is killed, and whenever, the
next try stores exactly what is missing; two that run at once share the work. A message that was consumed meanwhile
keeps its mark and does not come again. When all is there, ``("import", id)`` says so, and the marks are cleared, in
parts, by the duties if need be: from then on the import is over, and an importer that still tries, or tries again,
changes nothing. The marks of an import that is not done stay: it may go on a year later.

Messages keep their ids, so that one that was noted is found; one whose chunks would fall upon another's gets a new id.
Limits of the queues are not asked: nothing may be lost on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kombu_fdb.engine.messages.message import put_delayed, put_ready, subqueue
from kombu_fdb.engine.stored.effects import DELAYED
from kombu_fdb.engine.stored.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import decode_json, encode_json, record_of
from kombu_fdb.model import StoredMessage

MESSAGES_PER_TRANSACTION = 500
MARKS_PER_TRANSACTION = 5_000


def state(work: Work, import_id: bytes) -> dict[str, Any] | None:
    """What is known of a finished import; None if it is new or under way. Raises ``FormatError``."""
    value = work.tr.get(work.keys.import_(import_id))
    facts = None if value is None else decode_json(value)
    if facts is not None and not isinstance(facts, dict):
        raise FormatError("unreadable note of an import", value=str(facts)[:80])
    return facts


def restore(work: Work, import_id: bytes, messages: Sequence[tuple[bytes, StoredMessage]]) -> int:
    """Store those whose mark is not set yet, in this order. Returns how many."""
    work.tr.fill()
    marks = [work.keys.imported(import_id, mark) for mark, _ in messages]
    firsts = [work.keys.body(message.message_id, 0) for _, message in messages]
    over, *found = work.tr.get_many([work.keys.import_(import_id), *marks, *firsts])
    if over is not None:  # by another process: its marks are cleared, or about to be
        return 0
    known, taken = found[: len(marks)], found[len(marks) :]
    stored = 0
    for key, (_, message), mark, body in zip(marks, messages, known, taken, strict=True):
        if mark is None:
            work.tr.set(key, b"")
            message_id = work.ids() if body is not None or not message.message_id else message.message_id
            _store(work, message, message_id)
            stored += 1
    return stored


def _store(work: Work, message: StoredMessage, message_id: bytes) -> None:
    stored = message.payload if message.unreadable else record_of(message, message_id)
    if message.state == DELAYED:
        put_delayed(work, subqueue(work, message.queue, "", message.priority), message.due_ms, stored)
    else:
        key = message.key if message.keyed else ""
        put_ready(work, subqueue(work, message.queue, key, message.priority), stored)


def finish(work: Work, import_id: bytes, facts: dict[str, Any]) -> None:
    """The import is over."""
    work.tr.set(work.keys.import_(import_id), encode_json(facts))


def clear_marks(work: Work, cursor: bytes) -> bytes:
    """Clear some marks of the next import behind the cursor, if it is over; where to go on, b"" at the end."""
    begin, end = work.keys.every_imported
    first = work.tr.get_range(max(begin, cursor), end, limit=1, snapshot=True)
    if not first:
        return b""
    for (import_id, _mark), _ in work.keys.read(first, bytes, bytes):
        behind = work.keys.all_imported(import_id)[1]
        if work.tr.get(work.keys.import_(import_id), snapshot=True) is None:
            return behind
        rows = work.tr.get_range(first[0][0], behind, limit=MARKS_PER_TRANSACTION, snapshot=True)
        work.tr.clear_range(first[0][0], rows[-1][0] + b"\x00")
        return rows[-1][0] + b"\x00"
    return first[0][0] + b"\x00"
