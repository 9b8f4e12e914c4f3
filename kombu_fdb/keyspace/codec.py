"""The values of the store: records, leases and the small JSON values, and how payloads are chunked and parsed.

A record is a fixed head, the fairness key, the task's id, optional extras (JSON: time to run, priority, deaths) and, if
the payload is small, the payload itself. Small payloads travel with their record, so that a claim needs no second round
trip. Larger ones are cut into separate chunks, so that requeueing, leasing and promoting move a few dozen bytes instead
of megabytes. The head's redelivery count has a fixed offset: a redelivered message is patched, not decoded and encoded.

**What every version keeps.** A record of a newer version begins with its version number, up to :data:`LAST_VERSION`,
and its head, key and task id are where they are here. A lease begins with its number, then queue and place as here. So
an older process can count, delay, promote, release, move and delete a message that it can't read. If it would have to
read the message, it keeps it for a newer process (``engine/forward_compatibility.py``). Any change that an older
process would misread, in the record, the history or the payload's envelope (``transport/envelope.py``), raises the
number.

Version 2 of a record adds four facts to version 1. Three are in the extras: the exchange and key that brought the
message to its queue, its first death, and since when it has died in this way. The fourth is the highest bit of the
redelivery count: a consumer has had the message. If none applies, version 1 is written, which every older process can
read.

Decoders raise ``FormatError``, and nothing else, for bytes that they can't read or that a newer version wrote. No such
bytes may stop a claim, a publish or a sweep: these read settings with ``control_of`` and ``limits_of``. Unreadable
settings count as a pause: a queue whose control is unreadable, or a newer version's, hands out nothing, nor does a key
with such limits. An operator's pause must not end because a newer version adds a field. It ends when the settings are
set again, or in a version that can read them. Numbers that an older celery-fdb accepted, but are now out of range
(``ranges.py``), are read as the nearest value in range.

A kombu message's payload is ``version (1 byte), length of meta (4 bytes), meta (JSON list), body``.
``transport/envelope.py`` reads and writes all of it; tools that inspect queues only need its headers and delivery info.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.layout import MOST_ROUNDS, read_or, split_place
from kombu_fdb.model import (
    LEAST_LIMITS,
    LONGEST_KEY,
    LONGEST_TASK_ID,
    NEWCOMERS,
    NO_PRIORITY,
    URGENT,
    Death,
    DeliveryInfo,
    KeyLimits,
    Place,
    QueueControl,
    StoredMessage,
)
from kombu_fdb.primitives.ranges import LONGEST_S, MOST, SLOWEST

#: Payloads up to this size are inline in the record. Celery's messages are about 1 kB.
INLINE_BYTES = 2048
#: FoundationDB's value limit is 100,000 B.
CHUNK_BYTES = 90_000
#: A time that is past by every clock.
OVER_MS = 1

RECORD_VERSION = 2
LEASE_VERSION = 1
#: The highest version that records and leases may ever have: no text begins with a byte up to this one, so no text is
#: mistaken for a newer record.
LAST_VERSION = 31
#: The advice for data from a newer version.
UPGRADE = "Upgrade celery-fdb in this process."
#: version, redeliveries, chunks; lengths of key, task id, extras, payload; published_ms, expires_ms, message id
_HEAD = struct.Struct(">BHHHBIIQQ16s")
_HEAD_BYTES = _HEAD.size
_REDELIVERIES = struct.Struct(">H")
_MOMENT = struct.Struct(">Q")
_SIZE = struct.Struct(">I")
_SIZE_AT = struct.calcsize(">BHHHBI")
_PUBLISHED_AT = struct.calcsize(">BHHHBII")
#: The highest count of version 1. Later versions use the top bit to say whether a consumer has had the message.
_MOST_REDELIVERIES = 0xFFFF
_SEEN = 0x8000
_NO_CONTROL = QueueControl()
_UNREADABLE = QueueControl(paused=True, limited=True)
#: The advice on a control that can't be read.
FIX = (
    "The queue is paused until it can be read: upgrade celery-fdb here, or set it again: "
    "broker.queue(name).reset_control()"
)
_LEASE_HEAD = struct.Struct(">BHH")
#: Two counters in one key, the messages and their bytes, cost as much as one, and can't disagree.
AMOUNT_BYTES = 16
COUNT_BYTES = 8
ROUND_BYTES = 8


# -- records -----------------------------------------------------------------------------------------------------------


class Record(NamedTuple):
    """A stored message. ``payload`` is empty if it is in ``chunks`` separate values.

    ``published_ms``: since when it has waited; for a delayed message, its due time.
    """

    message_id: bytes
    published_ms: int
    expires_ms: int
    redeliveries: int
    chunks: int
    size: int
    payload: bytes
    deaths: tuple[Death, ...]
    key: str = ""
    ttr_ms: int = 0
    task_id: str = ""
    #: A priority that the place does not show: a dead letter's, or one above its queue's maximum.
    priority: int = NO_PRIORITY
    #: None: as it was published.
    delivery_info: DeliveryInfo | None = None
    #: Whether a consumer has had it before, counted or not.
    seen: bool = False

    @classmethod
    def of_stored(cls, message: StoredMessage, message_id: bytes) -> Record:
        """The record of a message from elsewhere, under this id. It has the whole payload until it is stored."""
        return cls(
            message_id=message_id,
            published_ms=message.published_ms,
            expires_ms=message.expires_ms,
            redeliveries=message.redeliveries,
            chunks=0,
            size=len(message.payload),
            payload=message.payload,
            deaths=message.deaths,
            key=message.key,
            ttr_ms=message.ttr_ms,
            task_id=message.task_id,
            priority=message.priority_before,
            delivery_info=message.way,
            seen=message.seen,
        )

    @classmethod
    def unreadable(cls, value: bytes, message_id: bytes = b"") -> Record:
        """A substitute for bytes that are no record: they become its payload, so that people can inspect them."""
        return cls(message_id, 0, 0, 0, 0, len(value), value, ())

    @classmethod
    def decode(cls, value: bytes) -> Record:
        """Raises ``FormatError`` for unreadable bytes, and for a newer version's record."""
        try:
            version, redeliveries, chunks, name, task, extras, size, published_ms, expires_ms, message_id = (
                _HEAD.unpack_from(value)
            )
        except struct.error as error:
            raise FormatError("unreadable message record", length=len(value)) from error
        end_of_key = _HEAD.size + name
        begin = end_of_key + task
        start = begin + extras
        if not 0 < version <= RECORD_VERSION or len(value) != start + (0 if chunks else size):
            if Record.is_newer(value):
                raise FormatError("a message of a newer celery-fdb", version=version, fix=UPGRADE)
            raise FormatError("unreadable message record", version=version, length=len(value))
        deaths, ttr_ms, priority, info = _decode_extras(value[begin:start]) if extras else ((), 0, NO_PRIORITY, None)
        key = _decode_text(value[_HEAD.size : end_of_key]) if name else ""
        task_id = _decode_text(value[end_of_key:begin]) if task else ""
        was_seen = False
        if version > 1:
            redeliveries, was_seen = _split_count(version, redeliveries)
        return cls(
            message_id,
            published_ms,
            expires_ms,
            redeliveries,
            chunks,
            size,
            value[start:],
            deaths,
            key,
            ttr_ms,
            task_id,
            priority,
            info,
            was_seen,
        )

    @classmethod
    def outline(cls, value: bytes) -> Record:
        """The record; for a newer version's, what every version keeps: all but payload, history, priority, time to run.

        Raises ``FormatError``.
        """
        return _outline(value) if Record.is_newer(value) else cls.decode(value)

    @classmethod
    def known(cls, value: bytes) -> Record:
        """The record's outline, or :meth:`unreadable` for other bytes."""
        try:
            return cls.outline(value)
        except FormatError:
            return cls.unreadable(value)

    def has_expired(self, now_ms: int) -> bool:
        """Whether its time to live is over by the clock that says ``now_ms``."""
        return 0 < self.expires_ms <= now_ms

    def encode(self) -> bytes:
        """The bytes to store, without a payload in chunks. Raises ``struct.error`` for values that don't fit."""
        has_extras = self.deaths or self.ttr_ms or self.priority or self.delivery_info
        extras = _encode_extras(self) if has_extras else b""
        version, redeliveries = 1, self.redeliveries
        of_version_2 = self.deaths and any(each.first or each.since_ms for each in self.deaths)
        if self.delivery_info is not None or self.seen or of_version_2:
            version, redeliveries = RECORD_VERSION, min(redeliveries, _SEEN - 1) | (_SEEN if self.seen else 0)
        name, task = self.key.encode(), self.task_id.encode()
        head = _HEAD.pack(
            version,
            redeliveries,
            self.chunks,
            len(name),
            len(task),
            len(extras),
            self.size,
            self.published_ms,
            self.expires_ms,
            self.message_id,
        )
        return head + name + task + extras + (b"" if self.chunks else self.payload)

    # On its bytes, without decoding them

    @staticmethod
    def is_newer(value: bytes) -> bool:
        """Whether it is a newer version's record, with all that every version keeps."""
        if not value or not RECORD_VERSION < value[0] <= LAST_VERSION:
            return False
        return read_or(None, _outline, value) is not None

    @staticmethod
    def traces_of(value: bytes) -> tuple[bytes, int, str]:
        """Message id, number of chunks and task id, which lead to a message's other rows. Raises ``FormatError``.

        Decodes nothing else: an ack does not need the payload.
        """
        try:
            version, _, chunks, name, task, extras, size, _, _, message_id = _HEAD.unpack_from(value)
        except struct.error as error:
            raise FormatError("unreadable message record", length=len(value)) from error
        begin = _HEAD.size + name
        end = begin + task
        if 0 < version <= RECORD_VERSION and len(value) == end + extras + (0 if chunks else size):
            return message_id, chunks, _decode_text(value[begin:end]) if task else ""
        record = Record.outline(value)
        return record.message_id, record.chunks, record.task_id

    @staticmethod
    def published_at(value: bytes, default: int) -> int:
        """Since when it has waited, in milliseconds; ``default`` for unreadable bytes."""
        if not _has_head(value):
            return default
        return int(_MOMENT.unpack_from(value, _PUBLISHED_AT)[0])

    @staticmethod
    def due_from(value: bytes, due_ms: int) -> bytes:
        """The same record, waiting since the end of its delay; unreadable bytes stay unchanged."""
        if not _has_head(value):
            return value
        return value[:_PUBLISHED_AT] + _MOMENT.pack(due_ms) + value[_PUBLISHED_AT + _MOMENT.size :]

    @staticmethod
    def redelivered(value: bytes) -> bytes:
        """The same record with one more redelivery; unreadable bytes stay unchanged."""
        if not _has_head(value):
            return value
        (count,) = _REDELIVERIES.unpack_from(value, 1)
        most = _MOST_REDELIVERIES if value[0] == 1 or count & _SEEN else _SEEN - 1
        return value[:1] + _REDELIVERIES.pack(min(count + 1, most)) + value[1 + _REDELIVERIES.size :]

    @staticmethod
    def marked_seen(value: bytes) -> bytes:
        """The same record, marked as seen by a consumer without an attempt; unreadable bytes stay unchanged."""
        if not _has_head(value):
            return value
        (count,) = _REDELIVERIES.unpack_from(value, 1)
        if value[0] == 1:
            count = min(count, _SEEN - 1)
        head = bytes([max(value[0], 2)]) + _REDELIVERIES.pack(count | _SEEN)
        return head + value[len(head) :]


def end_of_life(start_ms: int, ttl_ms: int | None) -> int:
    """When this time to live ends; 0 if there is none.

    A time of 0 is legal (RabbitMQ: expires unless consumed at once), and is over even by a slow clock.
    """
    return 0 if ttl_ms is None else start_ms + ttl_ms if ttl_ms else OVER_MS


def chunks_of(payload: bytes) -> list[bytes]:
    """The chunks of a large payload; none if it is inline in the record."""
    if len(payload) <= INLINE_BYTES:
        return []
    return [payload[start : start + CHUNK_BYTES] for start in range(0, len(payload), CHUNK_BYTES)]


def _split_count(version: int, count: int) -> tuple[int, bool]:
    """Redeliveries, and whether a consumer has had the message."""
    return (count, False) if version == 1 else (count & ~_SEEN, bool(count & _SEEN))


def _outline(value: bytes) -> Record:
    try:
        version, redeliveries, chunks, name, task, _extras, size, published_ms, expires_ms, message_id = (
            _HEAD.unpack_from(value)
        )
    except struct.error as error:
        raise FormatError("unreadable message record", length=len(value)) from error
    end_of_key, end = _HEAD.size + name, _HEAD.size + name + task
    if name > LONGEST_KEY or task > LONGEST_TASK_ID or len(value) < end:
        raise FormatError("unreadable message record", length=len(value))
    key, task_id = _decode_text(value[_HEAD.size : end_of_key]), _decode_text(value[end_of_key:end])
    redeliveries, was_seen = _split_count(version, redeliveries)
    times = (published_ms, expires_ms, redeliveries)
    return Record(message_id, *times, chunks, size, b"", (), key, task_id=task_id, seen=was_seen)


def _has_head(value: bytes) -> bool:
    """Whether it is a record, of this version or a newer one, judging by its head."""
    return len(value) >= _HEAD_BYTES and (0 < value[0] <= RECORD_VERSION or Record.is_newer(value))


def size_of(*values: bytes) -> int:
    """The sum of the payloads' sizes by their records; for unreadable bytes, their own. Constant for a message."""
    total = 0
    for value in values:
        # ``_has_head`` inlined: each message would call it.
        known = len(value) >= _HEAD_BYTES and 0 < value[0] <= RECORD_VERSION
        total += _SIZE.unpack_from(value, _SIZE_AT)[0] if known or _has_head(value) else len(value)
    return total


# -- leases ------------------------------------------------------------------------------------------------------------


#: A :data:`~kombu_fdb.model.Place`, or any bytes.
At_co = TypeVar("At_co", bound=bytes, covariant=True)


class Message(NamedTuple, Generic[At_co]):
    """A message that was taken out: its queue, its place, and the bytes of its record.

    ``place``: or the key of its row, which ends in the place; b"" for a message from outside. Only a ``Message[Place]``
    can return to its place, or be leased.
    """

    queue: str
    place: At_co
    value: bytes

    @staticmethod
    def of_lease(lease: bytes, *, newer: bool = False) -> Message[Place]:
        """The message under a lease. Raises ``FormatError``.

        ``newer``: accept also a newer version's lease, whose record is then meaningless.
        """
        try:
            version, name_length, place_length = _LEASE_HEAD.unpack_from(lease)
        except struct.error as error:
            raise FormatError("unreadable lease", length=len(lease)) from error
        start = _LEASE_HEAD.size + name_length
        end = start + place_length
        if not 0 < version <= LAST_VERSION or len(lease) < end:
            raise FormatError("unreadable lease", version=version, length=len(lease))
        place = Place(lease[start:end])
        split_place(place)
        queue = _decode_text(lease[_LEASE_HEAD.size : start])
        if version > LEASE_VERSION and not newer:
            raise FormatError("a lease of a newer celery-fdb", version=version, fix=UPGRADE)
        return Message(queue, place, lease[end:])


def encode_lease(message: Message[Place]) -> bytes:
    """The value of a lease: everything needed to return the message to its place."""
    queue, place, record = message
    name = queue.encode()
    return _LEASE_HEAD.pack(LEASE_VERSION, len(name), len(place)) + name + place + record


# -- counters ----------------------------------------------------------------------------------------------------------


def encode_amount(messages: int, size: int) -> int:
    """The operand of an atomic add of :data:`AMOUNT_BYTES` that counts these messages and bytes together."""
    return (size << 64) + messages


def decode_amount(value: bytes | None) -> tuple[int, int]:
    """Messages and bytes of a queue's counter."""
    both = int.from_bytes((value or b"")[:AMOUNT_BYTES].ljust(AMOUNT_BYTES, b"\0"), "little", signed=True)
    messages = (both + 2**63) % 2**64 - 2**63
    return messages, both - messages >> 64


def decode_count(value: bytes | None) -> int:
    """A counter of atomic adds, 8 bytes; if there are more, the first ones."""
    return int.from_bytes((value or b"")[:COUNT_BYTES], "little", signed=True)


def decode_round(value: bytes | None) -> int:
    """A round of the fair ring, or a tenant's pace; 0 if it can't be read."""
    round_ = int.from_bytes(value or b"", "big") if len(value or b"") <= ROUND_BYTES else 0
    return round_ if round_ <= MOST_ROUNDS else 0


# -- JSON: limits and controls -----------------------------------------------------------------------------------------


def encode_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def decode_json(value: bytes) -> Any:
    """Raises ``FormatError``."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise FormatError("unreadable JSON value", value=value[:80]) from error


def _decode_text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise FormatError("unreadable text", value=value[:80]) from error


def encode_settings(settings: KeyLimits | QueueControl) -> bytes:
    return encode_json(dataclasses.asdict(settings))


def decode_limits(value: bytes) -> KeyLimits:
    """Raises ``FormatError``, also for limits that can't have been set, with which a claim could not work."""
    return _limits(decode_json(value))


def limits_of(value: bytes) -> KeyLimits:
    """The limits; if they can't be read, those of a paused key."""
    return read_or(KeyLimits(paused=True), decode_limits, value)


def _limits(fields: Any) -> KeyLimits:
    limits = _typed(KeyLimits, fields)
    numbers: dict[str, Any] = {name: getattr(limits, name) for name in LEAST_LIMITS}
    counts = all(number is None or LEAST_LIMITS[name] <= number for name, number in numbers.items())
    rate = limits.rate is None or limits.rate > 0
    if not (counts and rate and limits.priority in (None, *range(URGENT + 1))):
        raise FormatError("unreadable limits", **{name: repr(each)[:80] for name, each in fields.items()})
    nearest: dict[str, Any] = {
        name: number if number is None else min(number, MOST) for name, number in numbers.items()
    }
    return dataclasses.replace(limits, rate=_nearest(limits.rate, SLOWEST, MOST), **nearest)


def _nearest(number: float | None, least: float, most: float) -> float | None:
    return None if number is None else min(max(number, least), most)


def decode_control(value: bytes | None) -> QueueControl:
    """The control; the defaults if there is none. Raises ``FormatError``."""
    if value is None:
        return _NO_CONTROL
    fields = decode_json(value)
    if not isinstance(fields, dict):
        raise _unreadable_control(value)
    control = _typed(QueueControl, {**fields, "every_key": _limits(fields.get("every_key", {}))})
    ageing = control.ageing is None or control.ageing > 0
    if not (ageing and control.newcomer in NEWCOMERS and 0 <= control.consumer_timeout_ms <= MOST):
        raise _unreadable_control(value)
    return dataclasses.replace(control, ageing=_nearest(control.ageing, 0.001, LONGEST_S))


def _unreadable_control(value: bytes) -> FormatError:
    return FormatError("unreadable control of a queue", value=value[:80], fix=FIX)


def control_of(value: bytes | None) -> QueueControl:
    """The queue's control; a paused one if it can't be read."""
    return read_or(_UNREADABLE, decode_control, value)


T = TypeVar("T")


def _typed(kind: type[T], fields: Any) -> T:
    """A dataclass with fields of the right types. Raises ``FormatError``."""
    types = _TYPES[kind]
    if not isinstance(fields, dict) or not all(isinstance(each, types.get(name, ())) for name, each in fields.items()):
        raise FormatError(f"unreadable {kind.__name__}", value=str(fields)[:80])
    try:
        return kind(**fields)
    except TypeError as error:  # a field is missing
        raise FormatError(f"unreadable {kind.__name__}", value=str(fields)[:80]) from error


def _types(kind: type) -> Mapping[str, Any]:
    """The types that each field accepts; a whole number is a number."""
    hints = get_type_hints(kind)
    return {
        name: hint | int if float in get_args(hint) else get_origin(hint) if get_origin(hint) in (dict, tuple) else hint
        for name, hint in hints.items()
    }


_TYPES: Mapping[type, Mapping[str, Any]] = {kind: _types(kind) for kind in (Death, KeyLimits, QueueControl)}


# -- a record's extras -------------------------------------------------------------------------------------------------


def _encode_extras(record: Record) -> bytes:
    """The deaths, after the time to run if there is one or a priority; the priority, if any; the delivery info.

    Without the facts of version 2, this is version 1's list.
    """
    numbers = [record.ttr_ms, record.priority] if record.priority else [record.ttr_ms] if record.ttr_ms else []
    info = [] if record.delivery_info is None else [record.delivery_info]
    return encode_json([*numbers, *info, *(_fields_of(death) for death in record.deaths)])


def _fields_of(death: Death) -> dict[str, Any]:
    fields = dataclasses.asdict(death)
    for name in ("first", "since_ms"):
        if not fields[name]:
            del fields[name]
    return fields


def _decode_extras(value: bytes) -> tuple[tuple[Death, ...], int, int, DeliveryInfo | None]:
    extras = decode_json(value)
    if not isinstance(extras, list):
        raise FormatError("unreadable death history", value=value[:80])
    numbers = [each for each in extras[:2] if isinstance(each, int)]
    ttr_ms, priority = (*numbers, 0, NO_PRIORITY)[:2]
    if not (0 <= ttr_ms <= MOST and NO_PRIORITY <= priority <= URGENT):
        raise FormatError("unreadable death history", value=value[:80])
    rest = extras[len(numbers) :]
    info = delivery_info_of(rest.pop(0)) if rest and isinstance(rest[0], list) else None
    return tuple(_death(entry) for entry in rest), ttr_ms, priority, info


def delivery_info_of(fields: Any) -> DeliveryInfo:
    """The delivery info in a list of two texts. Raises ``FormatError``."""
    if not isinstance(fields, list) or [type(each) for each in fields] != [str, str]:
        raise FormatError("unreadable delivery info", value=str(fields)[:80])
    return DeliveryInfo(*fields)


def _death(entry: Any) -> Death:
    keys = entry.get("routing_keys", []) if isinstance(entry, dict) else None
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise FormatError("unreadable death history", value=str(entry)[:80])
    death = _typed(Death, {**entry, "routing_keys": tuple(keys)})
    times_ms = death.time_ms, death.since_ms
    if not (0 <= death.count <= MOST and all(-MOST <= each <= MOST for each in times_ms)):
        raise FormatError("unreadable death history", count=str(death.count)[:80], times_ms=str(times_ms)[:80])
    return death


# -- kombu's payloads --------------------------------------------------------------------------------------------------


#: The header of a task that waits for a retry, with time and error of each failed attempt
#: (``celery_fdb/tasks/failures.py``).
ATTEMPTS = "fdb_attempts"

#: An older process would dead-letter a message with a higher number, so a change of this number also raises the
#: record's, and the message is kept for a newer process.
PAYLOAD_VERSION = 1
PAYLOAD_HEAD = struct.Struct(">BI")
#: The fields of meta: content type, content encoding, headers, properties, exchange, routing key.
_HEADERS = 2
_EXCHANGE = 4


def headers_of(payload: bytes) -> dict[str, Any]:
    """The headers of a kombu message; empty for any other payload."""
    meta = _meta(payload)
    headers = meta[_HEADERS] if len(meta) > _HEADERS else None
    return headers if isinstance(headers, dict) else {}


def published_by(payload: bytes) -> DeliveryInfo | None:
    """Exchange and routing key of a kombu message; None for any other payload."""
    info = _meta(payload)[_EXCHANGE:]
    return DeliveryInfo(*info) if [type(each) for each in info] == [str, str] else None


def _meta(payload: bytes) -> list[Any]:
    """The meta list; empty if it is not a kombu message."""
    try:
        version, length = PAYLOAD_HEAD.unpack_from(payload)
        meta = json.loads(payload[PAYLOAD_HEAD.size : PAYLOAD_HEAD.size + length]) if version == PAYLOAD_VERSION else []
    except (struct.error, ValueError, RecursionError):
        return []
    return meta if isinstance(meta, list) else []
