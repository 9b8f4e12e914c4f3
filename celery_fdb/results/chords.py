"""Chords: count the parts in the store, and publish the body exactly once. Guarantees CHORD-ONCE and CHORD-SURE.

Model. A chord is *open* from ``apply_chord``, before the first header task is published. Each header task that returns
adds its *part*, in the transaction that stores its result; a part counts once, however often its task runs. The size
becomes known when the last header task is about to be published. The transaction that adds the last part *claims* the
chord: it names the part and a moment. Whoever claimed it publishes the body and deletes the chord, in one transaction;
then the chord is *over*, and there is nothing left of it.

What happens at each failure:

* a header task runs twice (its worker died, its ack came too late): its part is there, nothing is counted.
* the worker dies before its part is stored: no result is there either; the redelivered task runs again.
* it dies after the last part, before the body is published: the redelivered task finds the claim of its own part and
  takes it over at once. If nobody redelivers it (``acks_late`` off), every worker looks for claims past their moment.
* two publish at the same time (a frozen worker thaws): both delete the chord, so one of the transactions conflicts,
  finds it over and publishes nothing.
* the answer of that commit is lost: the engine's retry finds its own token, or somebody finds the claim later.
* the chord expires before it is complete: it is deleted, its body never runs, and the late parts say so in the log.

If the broker is another store than the result backend there is no common transaction: the body is published first, and
deleted then. It can be published twice if the worker dies in between; it is never lost.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import islice

from celery_fdb.results import expiry, records
from celery_fdb.results.layout import Part, ResultKeys
from kombu_fdb.errors import KombuFDBError
from kombu_fdb.keyspace.codec import decode_json, encode_json
from kombu_fdb.store.protocol import Transaction

__all__ = [
    "CLAIMS_ROWS",
    "CLAIM_MS",
    "Chord",
    "ChordOver",
    "Return",
    "add",
    "enlarge",
    "finish",
    "open_",
    "overdue",
    "parts",
]

#: How long whoever claimed a chord has to publish its body, in milliseconds, before others do it.
CLAIM_MS = 30_000
#: Before the state of a part whose payload stands in the record of its task.
ELSEWHERE = "@"
#: Abandoned chords taken over in one transaction.
CLAIMS_ROWS = 20


class ChordOver(KombuFDBError):
    """Somebody else has published the chord's body."""

    text = "the chord is over"


@dataclass
class Chord:
    """What stands in the store. Times in milliseconds, 0 for none."""

    expires_ms: int
    size: int | None = None
    #: Ids of header tasks that joined while it ran (``add_to_chord``).
    joined: tuple[str, ...] = ()
    returned: int = 0
    #: Place and task id of the part whose worker publishes the body.
    claimed_by: tuple[int, str] | None = None
    due_ms: int = 0

    @property
    def complete(self) -> bool:
        return self.size is not None and self.returned >= self.size + len(self.joined)


@dataclass(frozen=True)
class Return:
    """What a header task came back with. ``payload`` is None if it stands in the record of the task."""

    part: Part
    state: str
    payload: bytes | None


def _read(tr: Transaction, keys: ResultKeys, group_id: str) -> Chord | None:
    value = tr.get(keys.chord(group_id))
    return None if value is None else _decode(value)


def _decode(value: bytes) -> Chord:
    fields = decode_json(value)
    claimed_by = fields["claimed_by"]
    fields["claimed_by"] = None if claimed_by is None else (claimed_by[0], claimed_by[1])
    return Chord(**{**fields, "joined": tuple(fields["joined"])})


def _write(tr: Transaction, keys: ResultKeys, group_id: str, chord: Chord) -> None:
    tr.set(keys.chord(group_id), encode_json(asdict(chord)))


def open_(tr: Transaction, keys: ResultKeys, group_id: str, body: bytes | None, expires_ms: int) -> None:
    """Begin a chord; an earlier run of the same frozen one is forgotten."""
    _delete(tr, keys, group_id, _read(tr, keys, group_id))
    chord = Chord(expires_ms)
    _write(tr, keys, group_id, chord)
    expiry.move(tr, keys, "chord", group_id, 0, expires_ms)
    if body is not None:
        records.write(tr, keys.body(group_id), "", body, expires_ms=0)


def enlarge(
    tr: Transaction, keys: ResultKeys, group_id: str, *, size: int | None = None, joined: str | None = None
) -> None:
    """Say how many header tasks there are, or that another one joined."""
    chord = _read(tr, keys, group_id)
    if chord is None:
        return
    chord.size = chord.size if size is None else size
    if joined is not None and joined not in chord.joined:
        chord.joined += (joined,)
    _write(tr, keys, group_id, chord)


def add(tr: Transaction, keys: ResultKeys, returned: Return, now_ms: int) -> bool | None:
    """Add a part. True if the caller is to publish the body; None if the chord is over or unknown."""
    part = returned.part
    value, known = tr.get_many([keys.chord(part.group_id), keys.part(part)])
    if value is None:
        return None
    chord = _decode(value)
    if known is None:
        _write_part(tr, keys, returned)
        chord.returned += 1
    ours = chord.complete and chord.claimed_by in {None, part[1:]}
    claims = ours and chord.due_ms < now_ms + CLAIM_MS // 2  # else claimed a moment ago, when it was stored
    if claims:
        _claim(tr, keys, chord, part, now_ms)
    if known is None or claims:
        _write(tr, keys, part.group_id, chord)
    return ours


def _write_part(tr: Transaction, keys: ResultKeys, returned: Return) -> None:
    if returned.payload is None:
        records.write(tr, keys.part(returned.part), ELSEWHERE + returned.state, b"", expires_ms=0)
    else:
        records.write(tr, keys.part(returned.part), returned.state, returned.payload, expires_ms=0)


def _claim(tr: Transaction, keys: ResultKeys, chord: Chord, part: Part, now_ms: int) -> None:
    if chord.due_ms:
        tr.clear(keys.claim(chord.due_ms, part.group_id))
    chord.claimed_by = part.place, part.task_id
    chord.due_ms = now_ms + CLAIM_MS
    tr.set(keys.claim(chord.due_ms, part.group_id), b"")


def overdue(tr: Transaction, keys: ResultKeys, now_ms: int) -> list[Part]:
    """Take over complete chords that nobody has published in time. Returns the parts whose claims they were."""
    found = []
    for key, _ in tr.get_range(*keys.claimed_until(now_ms), limit=CLAIMS_ROWS):
        group_id = keys.split_claim(key)
        chord = _read(tr, keys, group_id)
        if chord is None or chord.claimed_by is None:
            tr.clear(key)
            continue
        part = Part(group_id, *chord.claimed_by)
        _claim(tr, keys, chord, part, now_ms)
        _write(tr, keys, group_id, chord)
        found.append(part)
    return found


def parts(tr: Transaction, keys: ResultKeys, group_id: str) -> list[Return]:
    """What the header tasks came back with, in the order of the header. Raises ``ChordOver``."""
    if tr.get(keys.chord(group_id), snapshot=True) is None:
        raise ChordOver(group_id=group_id)
    found: list[Return] = []
    rows = iter(tr.get_range(*keys.parts(group_id), snapshot=True))
    for key, value in rows:
        place, task_id = keys.split_part(group_id, key)
        record = records.decode(value)
        if record.chunks:
            record = records.join(record, list(islice(rows, record.chunks)))
        elsewhere = record.state.startswith(ELSEWHERE)
        part = Part(group_id, place, task_id)
        found.append(Return(part, record.state.removeprefix(ELSEWHERE), None if elsewhere else record.payload))
    return found


def finish(tr: Transaction, keys: ResultKeys, group_id: str) -> None:
    """The body is published in this transaction. Raises ``ChordOver`` if it was before."""
    chord = _read(tr, keys, group_id)
    if chord is None:
        raise ChordOver(group_id=group_id)
    _delete(tr, keys, group_id, chord)


def _delete(tr: Transaction, keys: ResultKeys, group_id: str, chord: Chord | None) -> None:
    if chord is None:
        return
    records.clear(tr, keys.chord(group_id))
    expiry.move(tr, keys, "chord", group_id, chord.expires_ms, 0)
    if chord.due_ms:
        tr.clear(keys.claim(chord.due_ms, group_id))
