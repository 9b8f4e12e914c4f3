"""A message's row of the store, decoded once."""

from __future__ import annotations

from typing import NamedTuple

from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import Message, Record
from kombu_fdb.keyspace.layout import EVERY_RANK, Keyspace, has_key, split_place
from kombu_fdb.model import NO_SESSION, Rank, SessionId

#: Tags of the ranges in which messages stand, and what their messages are.
STATES = {"ready": "ready", "keyed": "ready", "delayed": "delayed", "lease": "leased"}


class Row(NamedTuple):
    """Where a message is, and what is written there. ``malformed``: no record, but the bytes themselves."""

    state: str
    queue: str
    record: Record
    key: str = ""
    rank: Rank = EVERY_RANK
    due_ms: int = 0
    session: SessionId = NO_SESSION
    number: int = 0
    #: Counted among those in flight of its key, which may be "".
    keyed: bool = False
    malformed: bytes = b""
    #: Its key in the store; of a leased one, that where it was.
    place: bytes = b""

    @property
    def reason(self) -> str:
        """Why it died last."""
        return self.record.deaths[0].reason if self.record.deaths else ""

    @property
    def likeness(self) -> tuple[object, ...]:
        """What a copy of it has in common with it."""
        return self.record.payload, self.record.size, self.record.published_ms, self.record.key

    def __str__(self) -> str:
        whose = f" by {self.session.hex()[:4]} as {self.number}" if self.session else ""
        return f"{self.state} in {self.queue}{whose}"


def read_row(keys: Keyspace, tag: str, key: bytes, value: bytes) -> Row:
    """Decode a row; the bytes of a malformed record count as its id."""
    if tag == "lease":
        return _leased(keys, key, value)
    queue = str(keys.unpack(key)[1])
    record, malformed = _decode(value)
    if tag == "delayed":
        due_ms, rank = keys.split_delayed(queue, key)
        return Row("delayed", queue, record, rank=rank, due_ms=due_ms, malformed=malformed, place=key)
    fair_key, rank = split_place(keys.place(queue, key))
    return Row("ready", queue, record, fair_key, rank, malformed=malformed, place=key)


def _leased(keys: Keyspace, key: bytes, value: bytes) -> Row:
    _tag, owner, number = keys.unpack(key)
    assert isinstance(owner, bytes)
    assert isinstance(number, int)
    session = SessionId(owner)
    queue, place, stored = Message.of_lease(value)
    record, malformed = _decode(stored)
    at = keys.at(queue, place)
    return Row("leased", queue, record, *split_place(place), 0, session, number, has_key(place), malformed, at)


def _decode(value: bytes) -> tuple[Record, bytes]:
    try:
        return Record.decode(value), b""
    except FormatError:
        return Record.unreadable(value, value), value


def label_of(payload: bytes) -> str:
    """The name a publishing step gave to a message."""
    return payload.split(b"|", 1)[0][:20].decode(errors="replace")
