"""Sessions: the consumer processes, and how they find out that one of them is dead.

Model. A session is *open* while ``("session", id)`` exists. Its owner changes ``("beat", id)`` every few seconds.
Everything the session claims is under ``("lease", id, number)``.

* open -> fenced: a process clears ``("session", id)``. The owner does so when it closes. Any other process does so
  after it has seen the beat *unchanged* for at least the session's time to live, in four looks or more, by its own
  monotonic clock (``FailureDetector``), and no sign that the session's process computes (``duty_cycle.py``). No two
  machines' clocks are compared, and store versions are never used as time: they advance by a million a second and jump
  by a hundred million in a recovery.
* fenced -> gone: the process that fenced it, or any other that finds leases of a fenced session, releases the messages
  (``release.release_part``) until none is left.

What happens at each failure. Claims and beats read ``("session", id)`` serializably. One that runs during the fencing
either commits before it, and the sweep finds its leases, or conflicts and then finds no session. The owner learns of
the fencing from its next beat or claim and opens another session. A beat in flight while the session is fenced aborts
the fencing, because the fencing reads the beat. If the process that fenced the session dies before all leases are
released, the beat record is still there, so the next observer finishes the work. The beat is cleared only when no lease
is left.

A claim whose answer was lost may still commit after its owner has given it up, for as long as the session is open. So
the owner first *seals* the session: it rewrites the record that all claims read, so only claims that begin later can
commit. The leases of the lost claim are in the block of numbers that was reserved for it before it began, and are
released uncounted (``Sessions.recover``).

A *role* (promoter) is a record ``(session, stamp)`` that its holder renews; others take it when they have seen it
unchanged for too long, or when it is absent. Two simultaneous holders are harmless by the design of the duties.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from kombu_fdb.engine.work import Work
from kombu_fdb.errors import SessionLost
from kombu_fdb.keyspace.codec import decode_json, encode_json
from kombu_fdb.keyspace.layout import Keyspace, read_or
from kombu_fdb.model import Lease, SessionId
from kombu_fdb.store.protocol import KeyValue

#: A claim's leases are numbered inside a block of this size, so it takes no more messages.
LEASES_PER_CLAIM = 4096
_TTL = struct.Struct(">I")
_STAMP_BYTES = 10
#: The time to live after an unreadable beat: long enough for the slowest next beat, as the session may be alive.
UNREADABLE_TTL_S = 600.0
#: The role that one process holds for all.
PROMOTER = "promoter"

#: A session, its last beat, and its time to live in seconds.
Beat = tuple[SessionId, bytes, float]
#: What a session reads with its beat: the ring, the promoter's record, and whether any newer message is kept.
Surroundings = tuple[list[Beat], bytes | None, bool]


def open_session(
    work: Work,
    session_id: SessionId,
    description: dict[str, str | int],
    ttl_s: float,
) -> None:
    """Record the session and its first beat."""
    work.tr.set(work.keys.session(session_id), encode_json(description))
    _beat(work, session_id, ttl_s)


def _beat(work: Work, session_id: SessionId, ttl_s: float, consumed: Sequence[str] = ()) -> None:
    """Write a beat with the session's time to live, by which observers judge it.

    Its wall clock is for people, and to detect a wrong clock; no session lives or dies by it.
    """
    suffix = encode_json([work.now_ms, *consumed]) + _TTL.pack(round(ttl_s * 1000))
    work.tr.set_versionstamped_value(work.keys.beat(session_id), suffix=suffix)


def consumed_of(beat: bytes) -> list[str]:
    """The queues a session consumed, or waited for, at its last beat."""
    return [each for each in _fields(beat) if isinstance(each, str)]


def beat_ms(beat: bytes) -> int:
    """The session's wall clock at a beat, in milliseconds since 1970; 0 if it has none."""
    return next((each for each in _fields(beat) if isinstance(each, int)), 0)


def _fields(beat: bytes) -> list[Any]:
    """The fields of the beat; empty if it can't be read."""
    fields = read_or(None, decode_json, beat[_STAMP_BYTES : -_TTL.size] or b"[]")
    return fields if isinstance(fields, list) else []


def _ttl_s(beat: bytes) -> float:
    """How long the session may be silent after this beat."""
    if len(beat) < _STAMP_BYTES + _TTL.size:
        return UNREADABLE_TTL_S
    return float(_TTL.unpack(beat[-_TTL.size :])[0]) / 1000


def description_of(value: bytes) -> dict[str, Any]:
    """A session's description of itself; empty if it can't be read."""
    description = read_or(None, decode_json, value)
    return description if isinstance(description, dict) else {}


def describe(work: Work, session_ids: Sequence[SessionId]) -> list[dict[str, Any]]:
    """Each session's description of itself when it was opened; empty for one that was fenced."""
    records = work.tr.get_many(list(map(work.keys.session, session_ids)), snapshot=True)
    return [{} if record is None else description_of(record) for record in records]


def require(
    work: Work,
    session_id: SessionId,
    *,
    and_read: Sequence[bytes] = (),
    ranges: Sequence[tuple[bytes, bytes, int]] = (),
) -> tuple[list[bytes | None], list[list[KeyValue]]]:
    """Raises ``SessionLost`` if the session was fenced. Reads the rest in the same round trip, at snapshot."""
    key = work.keys.session(session_id)
    work.tr.add_read_conflict_key(key)
    (own, *others), rows = work.tr.get_together([key, *and_read], ranges, snapshot=True)
    if own is None:
        raise SessionLost(session=session_id.hex())
    return others, rows


def seal(work: Work, session_id: SessionId) -> None:
    """Prevent claims of this session that have already begun from committing. Raises ``SessionLost`` if fenced.

    A claim conflicts on the session's record, and this rewrites it unchanged. So a later search for the leases of a
    claim whose answer was lost finds all leases that it will ever have.
    """
    key = work.keys.session(session_id)
    record = work.tr.get(key)
    if record is None:
        raise SessionLost(session=session_id.hex())
    work.tr.set(key, record)


def beat(work: Work, session_id: SessionId, ttl_s: float, consumed: Sequence[str], most: int) -> Surroundings | None:
    """Show a sign of life, and the queues consumed; None if the session was fenced.

    This transaction also reads what the process may have to do for others, so an idle process needs no other.
    """
    keys = work.keys
    key = keys.session(session_id)
    work.tr.add_read_conflict_key(key)
    ranges = [_behind(keys, session_id, most), (*keys.all_newer, 1)]
    (own, promoter), (behind, newer) = work.tr.get_together([key, keys.role(PROMOTER)], ranges, snapshot=True)
    if own is None:
        return None
    ring = _ring(work, session_id, most, behind)
    _beat(work, session_id, ttl_s, consumed)
    return ring, promoter, bool(newer)


def beats(work: Work) -> list[Beat]:
    """Every session that is open or not yet cleaned up, with its last beat and its time to live in seconds."""
    return _known(work.keys, work.tr.get_range(*work.keys.all_beats, snapshot=True))


def neighbours(work: Work, session_id: SessionId, most: int) -> list[Beat]:
    """The session itself and up to ``most`` that follow it in the ring of ids; the first id follows the last."""
    (behind,) = work.tr.get_ranges([_behind(work.keys, session_id, most)], snapshot=True)
    return _ring(work, session_id, most, behind)


def _behind(keys: Keyspace, session_id: SessionId, most: int) -> tuple[bytes, bytes, int]:
    """The part of the ring up to its last id: a range, and how many rows of it."""
    return keys.beat(session_id), keys.all_beats[1], most + 1


def _ring(work: Work, session_id: SessionId, most: int, behind: list[KeyValue]) -> list[Beat]:
    """``behind``: the rows of :func:`_behind`. If they are not enough, the others follow the first id."""
    if len(behind) <= most:
        first, own = work.keys.all_beats[0], work.keys.beat(session_id)
        behind = behind + work.tr.get_range(first, own, limit=most + 1 - len(behind), snapshot=True)
    return _known(work.keys, behind)


def _known(keys: Keyspace, rows: Sequence[KeyValue]) -> list[Beat]:
    return [(SessionId(session_id), value, _ttl_s(value)) for (session_id,), value in keys.read(rows, bytes)]


def seal_beat(work: Work, session_id: SessionId) -> None:
    """Rewrite another process's last beat unchanged: no observer takes that for a sign of life."""
    key = work.keys.beat(session_id)
    value = work.tr.get(key)
    if value is not None:
        work.tr.set(key, value)


def fence(work: Work, session_id: SessionId, *, last_beat: bytes | None = None) -> bool:
    """End the session, unless its beat is no longer ``last_beat``."""
    if last_beat is not None and work.tr.get(work.keys.beat(session_id)) != last_beat:
        return False
    work.tr.clear(work.keys.session(session_id))
    return True


def leases_of_claim(work: Work, session_id: SessionId, first: int, most: int) -> list[Lease]:
    """The leases of the claim that are numbered from ``first`` on, ``most`` at most.

    A lease that commits between this look and the caller's commit conflicts with it: then the caller looks again.
    """
    end = first + LEASES_PER_CLAIM
    rows = work.tr.get_range(work.keys.lease(session_id, first), work.keys.lease(session_id, end), limit=most)
    return [Lease(session_id, number) for (_session, number), _ in work.keys.read(rows, bytes, int)]


def holds(work: Work, leases_: Sequence[Lease]) -> list[bool]:
    """Whether each lease is valid: neither settled nor swept, and its session not fenced."""
    asked = [key for lease in leases_ for key in (work.keys.lease(*lease), work.keys.session(lease.session))]
    values = work.tr.get_many(asked, snapshot=True)
    return [None not in values[at : at + 2] for at in range(0, len(values), 2)]


def hold_role(work: Work, role: str, session_id: SessionId, observed: bytes | None) -> bool:
    """Take a role that is free or whose record is still ``observed``, or renew one's own. False once fenced."""
    key = work.keys.role(role)
    record, own = work.tr.get_many([key, work.keys.session(session_id)])
    if own is None or (record is not None and not record.startswith(session_id) and record != observed):
        return False
    work.tr.set_versionstamped_value(key, prefix=session_id)
    return True


def role_record(work: Work, role: str) -> bytes | None:
    """The holder of a role, and its last renewal."""
    return work.tr.get(work.keys.role(role))


def leave_role(work: Work, role: str, session_id: SessionId) -> None:
    """Free a role that the session holds, so that another process can take it at once."""
    key = work.keys.role(role)
    record = work.tr.get(key)
    if record is not None and record.startswith(session_id):
        work.tr.clear(key)
