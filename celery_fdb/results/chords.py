"""Chords: count the parts in the store, and say which publishes the body (``backend.py``). CHORD-ONCE, CHORD-SURE.

Model. A chord is *open* from ``apply_chord``, before the first header task is published. Each header task that returns
adds its *part*, in the transaction that stores its result; a part counts once, however often its task runs, and parts
that return at the same time do not conflict. The size becomes known when the last header task is about to be published.
In a transaction of its own, each part then looks whether the chord is *complete*; the first to find it so *claims* it.
The process that claimed it publishes the body (``backend.py``) and deletes the chord, in one transaction; then the
chord is *over*, and there is nothing left of it.

What happens at each failure:

* a header task runs twice (its worker died, its ack came too late): its part is there, nothing is counted.
* the worker dies before its part is stored: no result is there either; the redelivered task runs again.
* it dies after the last part, before the body is published: the redelivered task finds the chord unclaimed, or claimed
  by its own part, and goes on at once. If it is not redelivered (``acks_late`` off, or Celery takes it for done),
  workers look at every open chord now and then, and publish what is complete and abandoned.
* two publish at the same time (a frozen worker goes on): both delete the chord, so one of the transactions conflicts,
  finds it over and publishes nothing.
* the answer of that commit is lost: the engine's retry finds its own token, or a later look at the chord does.
* its header is published again by a program that can't know whether it was published before (an outbox's relay), and
  the broker drops the messages that it has: parts that have returned don't return again. So an open chord stays as it
  is.
* the chord expires before it is complete: it is deleted, its body never runs, and the late parts say so in the log.
  Each part prolongs the chord, as on Redis, so it expires when none has come for that long.
* error callbacks take longer than a claim lasts: the claim is renewed while they run (``backend.py``).

If the broker is another store than the result backend there is no common transaction: the body is published first, and
deleted then. It can be published twice if the worker dies in between; it is never lost.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from celery_fdb.results import records
from kombu_fdb.errors import FormatError, KombuFDBError
from kombu_fdb.keyspace.codec import decode_count, decode_json, encode_json
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.primitives.ranges import is_whole
from kombu_fdb.store.protocol import Transaction

#: How long the process that claimed a chord has to publish its body, in milliseconds, before others do it.
CLAIM_MS = 10_000
#: The longest pause between two looks at an open chord, in milliseconds; the first ones are shorter.
LONGEST_LOOK_MS = 600_000
#: Chords looked at in one transaction.
LOOK_ROWS = 20
#: Rows of parts read in one transaction; each has up to 90,000 bytes, and one part up to 101 rows.
PART_ROWS = 200
#: Ids of joined header tasks in the chord's own row, which may have 100,000 bytes. The others have rows of their own.
JOINED_WITHIN = 500
#: Stands before the state of a part whose payload is in the record of its task.
ELSEWHERE = "@"


#: Whether the program can't know if it has published this header before. Set by an outbox's relay.
PERHAPS_AGAIN: ContextVar[bool] = ContextVar("PERHAPS_AGAIN", default=False)


class ChordOver(KombuFDBError):
    """Another process has published the chord's body."""

    text = "the chord is over"


#: What the worker of a header task that has returned is to do: publish the body; nothing, as others have not returned
#: yet, or another worker publishes it; add its part first; or nothing, as it came too late: the chord is over.
ChordStep = Literal["publish", "nothing", "add", "late"]


@dataclass
class Chord:
    """What stands in the store beside the parts and their number. Times in milliseconds; 0 for never."""

    expires_ms: int
    opened_ms: int
    #: When the chord has to be looked at.
    look_ms: int
    size: int | None = None
    #: Ids of header tasks that joined while it ran (``add_to_chord``), the first :data:`JOINED_WITHIN` of them.
    joined: tuple[str, ...] = ()
    #: Place and task id of the part whose worker publishes the body.
    claimed_by: tuple[int, str] | None = None

    def is_complete(self, returned: int, joins: int) -> bool:
        """Whether all parts have returned. ``joins``: how many more have joined than stand in ``joined``."""
        return self.size is not None and returned >= self.size + len(self.joined) + joins


class ChordPart(NamedTuple):
    """What a header task returned. Two parts may share a task id, if a frozen signature stands in the header twice.

    ``payload`` is None if it stands in the record of the task. ``lifetime_ms``: how long the chord lives from now on; 0
    to leave it as it is.
    """

    group_id: str
    place: int
    task_id: str
    state: str
    payload: bytes | None
    lifetime_ms: int = 0


def _read(tr: Transaction, keys: records.ResultKeys, group_id: str) -> Chord | None:
    value = tr.get(keys.chord(group_id))
    return None if value is None else _decode(value)


def _decode(value: bytes) -> Chord:
    """Raises ``FormatError``."""
    fields = decode_json(value)
    try:
        claimed_by, joined = fields["claimed_by"], fields["joined"]
        chord = Chord(**{**fields, "joined": tuple(joined), "claimed_by": claimed_by and tuple(claimed_by)})
    except (TypeError, LookupError) as error:
        raise FormatError("unreadable chord", value=value[:80]) from error
    moments = (chord.expires_ms, chord.opened_ms, chord.look_ms)
    if not (
        all(is_whole(each, 0) for each in moments)
        and (chord.size is None or is_whole(chord.size, 0))
        and all(isinstance(each, str) for each in chord.joined)
        and (chord.claimed_by is None or [type(each) for each in chord.claimed_by] == [int, str])
    ):
        raise FormatError("unreadable chord", value=value[:80])
    return chord


def _write(tr: Transaction, keys: records.ResultKeys, group_id: str, chord: Chord) -> None:
    tr.set(keys.chord(group_id), encode_json(asdict(chord)))


def open_(
    tr: Transaction, keys: records.ResultKeys, group_id: str, body: bytes | None, *, expires_ms: int, now_ms: int
) -> None:
    """Begin a chord, and forget an earlier run of the same frozen one, unless it may be this run."""
    tr.fill()
    if PERHAPS_AGAIN.get() and _is_open(tr, keys, group_id):
        return
    expire(tr, keys, group_id)
    chord = Chord(expires_ms, now_ms, now_ms + CLAIM_MS)
    _write(tr, keys, group_id, chord)
    tr.set(keys.look(chord.look_ms, group_id), b"")
    records.move_expiry(tr, keys, "chord", group_id, 0, expires_ms)
    if body is not None:
        records.write(tr, keys.body(group_id), "", body, expires_ms=0)


def _is_open(tr: Transaction, keys: records.ResultKeys, group_id: str) -> bool:
    try:
        return _read(tr, keys, group_id) is not None
    except FormatError:
        return False


def enlarge(
    tr: Transaction, keys: records.ResultKeys, group_id: str, *, size: int | None = None, joined: str | None = None
) -> None:
    """Say how many header tasks there are, or that another one joined."""
    chord = _read(tr, keys, group_id)
    if chord is None:
        return
    if size is not None:
        # Celery before 5.7 also tells it the size of a group inside, when a chain in the header comes to it.
        chord.size = max(size, chord.size or 0)
    if joined is not None and joined not in chord.joined:
        if len(chord.joined) < JOINED_WITHIN:
            chord.joined += (joined,)
        elif tr.get(keys.join(group_id, joined)) is None:
            tr.set(keys.join(group_id, joined), b"")
            tr.add(keys.joins(group_id), 1)
    _write(tr, keys, group_id, chord)


def add(tr: Transaction, keys: records.ResultKeys, part: ChordPart, now_ms: int) -> bool:
    """Add a part, if it is not there, of a chord that is not over. False if it is over: the part came too late."""
    group_id, key = part.group_id, keys.part(part.group_id, part.place, part.task_id)
    chord, known = tr.get_many([keys.chord(group_id), key])
    if chord is None or known is not None:
        return chord is not None
    if part.lifetime_ms:
        _prolong(tr, keys, group_id, chord, now_ms=now_ms, lifetime_ms=part.lifetime_ms)
    state = ELSEWHERE + part.state if part.payload is None else part.state
    if part.payload is None:
        tr.set(keys.large(group_id, part.task_id), b"")
    records.write(tr, key, state, part.payload or b"", expires_ms=0)
    tr.add(keys.returned(group_id), 1)
    return True


def _prolong(
    tr: Transaction, keys: records.ResultKeys, group_id: str, value: bytes, *, now_ms: int, lifetime_ms: int
) -> None:
    """Let the chord live on, once a quarter of its life has passed: it makes parts that return together conflict."""
    try:
        chord = _decode(value)
    except FormatError:
        return
    expires_ms = now_ms + lifetime_ms
    if chord.expires_ms and expires_ms - chord.expires_ms > lifetime_ms // 4:
        records.move_expiry(tr, keys, "chord", group_id, chord.expires_ms, expires_ms)
        chord.expires_ms = expires_ms
        _write(tr, keys, group_id, chord)
        # The structure of a header with groups in it, and the parts that stand elsewhere.
        large = [keys.split_large(group_id, key) for key, _ in tr.get_range(*keys.larges(group_id))]
        needed = [("group", group_id), *(("task", task_id) for task_id in large)]
        for each, stored in zip(needed, tr.get_many([keys.record(*each) for each in needed]), strict=True):
            if stored is not None:
                records.prolong(tr, keys, *each, stored, expires_ms)


def renew(tr: Transaction, keys: records.ResultKeys, group_id: str, now_ms: int) -> None:
    """Keep the claim of a chord whose error callbacks are still running."""
    chord = _read(tr, keys, group_id)
    if chord is not None:
        _look_later(tr, keys, group_id, chord, now_ms + CLAIM_MS)


def claim(tr: Transaction, keys: records.ResultKeys, part: ChordPart, now_ms: int) -> ChordStep:
    """What the task of an added part is to do. Writes only if the chord is complete."""
    group_id, own = part.group_id, (part.place, part.task_id)
    value, known, returned, joins = tr.get_many(
        [keys.chord(group_id), keys.part(group_id, *own), keys.returned(group_id), keys.joins(group_id)]
    )
    if value is None:
        return "late"
    if known is None:
        return "add"
    chord = _decode(value)
    if not chord.is_complete(decode_count(returned), decode_count(joins)) or chord.claimed_by not in {None, own}:
        return "nothing"
    chord.claimed_by = own
    _look_later(tr, keys, group_id, chord, now_ms + CLAIM_MS)
    return "publish"


def _look_later(tr: Transaction, keys: records.ResultKeys, group_id: str, chord: Chord, look_ms: int) -> None:
    tr.clear(keys.look(chord.look_ms, group_id))
    chord.look_ms = look_ms
    tr.set(keys.look(look_ms, group_id), b"")
    _write(tr, keys, group_id, chord)


def abandoned(tr: Transaction, keys: records.ResultKeys, now_ms: int) -> list[str]:
    """Look at the chords whose time has come. Returns those that are complete: the caller has to publish them now.

    If the answer of the commit is lost, they are found again at their next look.
    """
    found = []
    for key, _ in tr.get_range(*keys.looks_until(now_ms), limit=LOOK_ROWS):
        tr.clear(key)  # also if it is not the one that the chord knows of: it would be found at each look
        looked_at = _look_at(tr, keys, key)
        if looked_at is None:
            continue
        group_id, chord, complete = looked_at
        pause_ms = CLAIM_MS if complete else min(max(now_ms - chord.opened_ms, CLAIM_MS), LONGEST_LOOK_MS)
        _look_later(tr, keys, group_id, chord, now_ms + pause_ms)
        if complete:
            found.append(group_id)
    return found


def _look_at(tr: Transaction, keys: records.ResultKeys, key: bytes) -> tuple[str, Chord, bool] | None:
    """The chord, and whether it is complete.

    None if it has expired, or can't be read: it stays as it is, and delays no other.
    """
    try:
        group_id = keys.split_look(key)
        value, returned, joins = tr.get_many([keys.chord(group_id), keys.returned(group_id), keys.joins(group_id)])
        if value is None:
            return None
        chord = _decode(value)
        return group_id, chord, chord.is_complete(decode_count(returned), decode_count(joins))
    except FormatError:
        return None


def parts(
    tr: Transaction, keys: records.ResultKeys, group_id: str, begin: bytes = b""
) -> tuple[list[ChordPart], bytes | None]:
    """Some of what the header tasks returned, in the order of the header, and where to go on; None at the end.

    Parts of a complete chord don't change, so they may be read in several transactions. Raises ``ChordOver``.
    """
    if tr.get(keys.chord(group_id), snapshot=True) is None:
        raise ChordOver(group_id=group_id)
    first, end = keys.parts(group_id)
    rows = tr.get_range(begin or first, end, limit=PART_ROWS, snapshot=True)
    found: list[ChordPart] = []
    at = 0
    while at < len(rows):
        key, value = rows[at]
        record = records.decode(value)
        behind = at + 1 + record.chunks
        if behind > len(rows) == PART_ROWS:
            return found, key  # the chunks of this part are beyond what was read
        if record.chunks:
            record = records.join(record, rows[at + 1 : behind])
        payload = None if record.state.startswith(ELSEWHERE) else record.payload
        place = keys.split_part(group_id, key)
        found.append(ChordPart(group_id, *place, record.state.removeprefix(ELSEWHERE), payload))
        at = behind
    return found, rows[-1][0] + b"\0" if len(rows) == PART_ROWS else None


def finish(tr: Transaction, keys: records.ResultKeys, group_id: str) -> None:
    """Delete the chord, whose body this transaction publishes. Raises ``ChordOver`` if it was published before.

    The structure of its header is deleted with it: nothing else would find that again.
    """
    value, structure = tr.get_many([keys.chord(group_id), keys.group(group_id)])
    if value is None:
        raise ChordOver(group_id=group_id)
    _delete(tr, keys, group_id, _decode(value))
    records.delete_record(tr, keys, "group", group_id, structure)


def expire(tr: Transaction, keys: records.ResultKeys, group_id: str) -> None:
    """Delete a chord, whether complete, incomplete or unreadable, or what is left of one whose own row was lost."""
    try:
        chord = _read(tr, keys, group_id)
    except FormatError:
        tr.clear(keys.chord(group_id))
        chord = None
    if chord is None:
        tr.clear_range(*range_of(keys.chord(group_id)))
    else:
        _delete(tr, keys, group_id, chord)


def _delete(tr: Transaction, keys: records.ResultKeys, group_id: str, chord: Chord) -> None:
    records.clear(tr, keys.chord(group_id))
    records.move_expiry(tr, keys, "chord", group_id, chord.expires_ms, 0)
    tr.clear(keys.look(chord.look_ms, group_id))
