"""Export and import: copy a whole broker into a file, from a file, or from one store straight into another.

The export file has lines of JSON, so that any JSON parser can read it in twenty years.

The first line is the header, ``{"celery-fdb-export": 1, "id": ..., "messages": ..., ...}``, then comes one line for
each entry, ``{kind: fields}``, and the last line is ``{"end": {"entries": ..., "sha256": ...}}`` over all lines before
it. Payloads are in base64, ids in hexadecimal, moments in milliseconds since 1970 UTC.

A file without its last line is incomplete, and is refused as a whole. An export is written to a file with the suffix
``.part``, which is renamed when it is complete and on the disk. Messages may hold secrets, so its mode is 0600.

An export holds declarations, exchanges, bindings, controls and limits, open dedup windows, and every message that is
ready, delayed or dead, with its key, priority, order, due time, history and ids. It leaves out sessions, and messages
that they hold unless asked for.

An import may be killed at any point and started again: nothing is lost and nothing doubled, because each message is
stored by the transaction that marks it as stored (``kombu_fdb/engine/transfer.py``). The source is left as it
is.

The source must not be in use. While it has consumers, some messages are leased; the copy would lack them, or they would
be done twice. So an export refuses to begin then. It can't see publishers: point them at the new broker first.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from kombu_fdb import Broker, doctor
from kombu_fdb.api.queue import Queue
from kombu_fdb.engine.messages.publish import split_batch
from kombu_fdb.engine.transfer import MOST_RESTORED
from kombu_fdb.errors import FormatError, KombuFDBError, QueueError
from kombu_fdb.keyspace.codec import Record, decode_control, decode_limits, delivery_info_of, encode_json
from kombu_fdb.model import (
    LONGEST_KEY,
    LONGEST_TASK_ID,
    NO_PRIORITY,
    URGENT,
    Death,
    QueueControl,
    StoredMessage,
)
from kombu_fdb.primitives.clock import Clock, random_id
from kombu_fdb.primitives.ranges import LATEST_MS, MOST, check_text, is_whole, moment
from kombu_fdb.routing.tables import PREDECLARED, Exchange, QueueDeclaration
from kombu_fdb.settings.location import ClusterLocation, Location, SqliteLocation, default_cluster_file

# -- lines -------------------------------------------------------------------------------------------------------------


#: Errors that reading a document of unknown shape may raise.
_ODD = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError, struct.error)
#: The longest name in bytes: a key of FoundationDB has 10,000 bytes for the name and all else in it.
LONGEST_STORED = 8_000

FORMAT = "celery-fdb-export"
#: Version 2 added ``way`` and ``seen`` to messages, and ``first`` to deaths.
VERSION = 2


@dataclass(frozen=True, slots=True)
class Header:
    """``id``: 16 bytes that identify this export. ``source``: the broker it was made of, with secrets masked."""

    id: bytes
    source: str
    taken_ms: int
    messages: int


#: What is stored besides exchanges, queues and messages: a kind, and the arguments with which an import restores it.
Setting = tuple[str, dict[str, Any]]
Entry = Exchange | QueueDeclaration | Setting | StoredMessage


# -- one line ----------------------------------------------------------------------------------------------------------


def _message_fields(message: StoredMessage) -> dict[str, Any]:
    fields = dataclasses.asdict(message)
    fields["payload"] = base64.b64encode(message.payload).decode()
    fields["message_id"] = message.message_id.hex()
    return fields


def _stored_message(fields: dict[str, Any]) -> StoredMessage:
    deaths = tuple(Death(**{**each, "routing_keys": tuple(each["routing_keys"])}) for each in fields["deaths"])
    payload = base64.b64decode(fields["payload"], validate=True)
    message_id = bytes.fromhex(fields["message_id"])
    way = None if fields.get("way") is None else delivery_info_of(fields["way"])
    message = StoredMessage(**{**fields, "payload": payload, "message_id": message_id, "deaths": deaths, "way": way})
    _check(message)
    return message


def _check(message: StoredMessage) -> None:
    """Check that each field has its type and range, so that the message can be stored and read again.

    Raises ``ValueError``, ``struct.error``.
    """
    Record.decode(Record.of_stored(dataclasses.replace(message, payload=b""), message.message_id or bytes(16)).encode())
    flags = (message.keyed, message.unreadable, message.seen)
    if not (
        len(message.message_id) in (0, 16)
        and message.state in ("ready", "delayed")
        and is_whole(message.priority, NO_PRIORITY, URGENT)
        and is_whole(message.due_ms, 0, LATEST_MS)
        and all(isinstance(each, bool) for each in flags)
    ):
        raise ValueError(message.state)
    for name, text, longest in (
        ("queue", message.queue, LONGEST_STORED),
        ("key", message.key, LONGEST_KEY),
        ("task id", message.task_id, LONGEST_TASK_ID),
    ):
        check_text(name, text, longest)


def _text(value: Any) -> str:
    """Check a name: UTF-8, and short enough for a key of any store."""
    check_text("name", value, LONGEST_STORED)
    return str(value)


def _setting(kind: str, names: str, **others: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Setting]:
    """Reads a setting of exactly these names and ``others``, each with the function that reads it."""
    readers = {**dict.fromkeys(names.split(), _text), **others}

    def read(fields: dict[str, Any]) -> Setting:
        if fields.keys() - readers.keys():
            raise ValueError(f"unknown fields: {sorted(fields.keys() - readers.keys())}")
        return kind, {name: read_field(fields[name]) for name, read_field in readers.items()}

    return read


#: The function that reads an entry, by its kind in a line.
_DECODE: dict[str, Callable[[dict[str, Any]], Entry]] = {
    "exchange": lambda of: Exchange.decode(_text(of["name"]), Exchange(**of).encode()),
    "queue": lambda of: QueueDeclaration.decode(_text(of["name"]), QueueDeclaration(**of).encode()),
    "binding": _setting("binding", "exchange queue routing_key"),
    "control": _setting("control", "queue", control=lambda of: decode_control(encode_json(of))),
    "limits": _setting("limits", "queue key", limits=lambda of: decode_limits(encode_json(of))),
    "dedup": _setting("dedup", "exchange routing_key dedup_id", end_ms=lambda ms: moment("end_ms", ms)),
    "message": _stored_message,
}


def _line(entry: Entry) -> bytes:
    """The entry as a line, without its end."""
    match entry:
        case StoredMessage():
            kind, fields = "message", _message_fields(entry)
        case Exchange():
            kind, fields = "exchange", dataclasses.asdict(entry)
        case QueueDeclaration():
            kind, fields = "queue", dataclasses.asdict(entry)
        case _:
            kind, fields = entry
    return _json({kind: fields})


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), default=dataclasses.asdict).encode()


def _decode(line: bytes, number: int) -> Entry:
    try:
        ((kind, fields),) = json.loads(line).items()
        return _DECODE[kind](fields)
    except (*_ODD, KombuFDBError) as error:
        raise FormatError(
            "an entry of the export file can't be read",
            line=number,
            reason=str(error)[:200],
            fix="If a newer celery-fdb wrote it, upgrade this one.",
        ) from error


# -- the file ----------------------------------------------------------------------------------------------------------


def write(path: Path, header: Header, entries: Iterable[Entry]) -> int:
    """Write an export. The file exists only once it is complete. Returns the number of messages. Raises ``OSError``."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)  # of a killed export
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # not through a link
    with os.fdopen(descriptor, "wb") as file:
        messages = _write_lines(file, header, entries)
        file.flush()
        os.fsync(descriptor)
    part.replace(path)
    return messages


def _write_lines(file: IO[bytes], header: Header, entries: Iterable[Entry]) -> int:
    digest, number, messages = hashlib.sha256(), 0, 0

    def put(line: bytes) -> None:
        digest.update(line + b"\n")
        file.write(line + b"\n")

    put(_json({FORMAT: VERSION, **dataclasses.asdict(header), "id": header.id.hex()}))
    for number, entry in enumerate(entries, 1):  # noqa: B007 - the last one is the number of all
        put(_line(entry))
        messages += isinstance(entry, StoredMessage)
    put(_json({"end": {"entries": number, "messages": messages, "sha256": digest.hexdigest()}}))
    return messages


def read_header(path: Path) -> Header:
    """Raises ``FormatError``, ``OSError``."""
    with path.open("rb") as file:
        line = file.readline(100_000)
    try:
        fields = json.loads(line)
        version = fields.pop(FORMAT)
    except _ODD:
        raise FormatError(
            "not an export of celery-fdb", path=str(path), fix="Name a file that `export` wrote."
        ) from None
    if version not in range(1, VERSION + 1):
        raise FormatError("an export of a newer celery-fdb", version=version, fix="Upgrade this one.")
    try:
        header = Header(**{**fields, "id": bytes.fromhex(fields["id"])})
    except _ODD as error:
        raise FormatError(
            "the header of the export can't be read", reason=str(error)[:200], fix="Export again."
        ) from None
    source: object = header.source
    if not (isinstance(source, str) and is_whole(header.taken_ms, 0) and is_whole(header.messages, 0)):
        raise FormatError("the header of the export can't be read", fix="Export again.")
    return header


def verify(path: Path) -> int:
    """Check that the file is whole. Returns the number of messages. Raises ``FormatError``, ``OSError``."""
    digest, last = hashlib.sha256(), b""
    with path.open("rb") as file:
        for line in file:
            digest.update(last)
            last = line
    try:
        end = dict(json.loads(last)["end"]) if last.endswith(b"\n") else None
    except _ODD:
        end = None
    if end is None:
        raise FormatError(
            "an incomplete export: its end is missing", path=str(path), fix="Export again. Nothing was imported."
        )
    if end.get("sha256") != digest.hexdigest() or not is_whole(end.get("messages"), 0):
        raise FormatError("the export file was changed or is damaged", path=str(path), fix="Export again.")
    return int(end["messages"])


def read_entries(path: Path) -> Iterator[tuple[bytes, Entry]]:
    """The entries between header and end; their lines' numbers are the marks. Raises ``FormatError``, ``OSError``."""
    with path.open("rb") as file:
        next(file)
        before = None
        for number, line in enumerate(file, 2):
            if before is not None:
                yield (number - 1).to_bytes(8, "big"), _decode(before, number - 1)
            before = line


# -- transfer ----------------------------------------------------------------------------------------------------------


T = TypeVar("T")

#: Keys read at once.
KEYS = 1_000
#: Called with the number of messages that are done.
Progress = Callable[[int], object]
#: The source of an import: its header, and a function that gives the entries in an order in which they can be stored.
#: Each message has a mark of its own, the same one in each run.
Source = tuple[Header, Callable[[], Iterator[tuple[bytes, Entry]]]]


# -- from a store ------------------------------------------------------------------------------------------------------


def broker_source(broker: Broker, *, leased: bool = False) -> Source:
    """An open broker as it is.

    ``leased``: include messages that sessions hold, as ready ones; without it, raises ``QueueError`` if there are any.
    """
    counts = broker.queues().values()
    if not leased:
        _check_at_rest(broker, sum(each.leased for each in counts))
    number = sum(each.ready + each.delayed + leased * each.leased for each in counts)
    place, location = name_of(broker), _resolved(broker.location)
    # By the path of a cluster file: coordinators may move before an interrupted import goes on.
    named = f"{location} namespace {location.namespace}"
    expected = min(max(0, number), MOST)  # a damaged counter may have any value
    header = Header(hashlib.sha256(named.encode()).digest()[:16], place, Clock().wall_ms(), expected)
    return header, lambda: _entries(broker, leased=leased)


def _entries(broker: Broker, *, leased: bool) -> Iterator[tuple[bytes, Entry]]:
    for entry in _topology(broker):
        yield b"", entry
    for exchange, routing_key, dedup_id, end_ms in broker.transfer.dedups():
        fields = {"exchange": exchange, "routing_key": routing_key, "dedup_id": dedup_id, "end_ms": end_ms}
        yield b"", ("dedup", fields)
    for queue in broker.queues():
        for number, message in enumerate(broker.transfer.dump(queue, leased=leased)):
            yield _mark(message, number), message


def _topology(broker: Broker) -> Iterator[Entry]:
    exchanges = broker.topology.exchanges()
    yield from exchanges
    queues = [broker.queue(name) for name in broker.queues()]
    for queue in queues:
        declaration = _asked(queue.declaration, queue.name)
        if declaration is not None:
            yield declaration
    known = {*PREDECLARED, *(each.name for each in exchanges)}
    for exchange, bound, routing_key in broker.topology.bindings():
        if exchange in known:
            yield "binding", {"exchange": exchange, "queue": bound, "routing_key": routing_key}
    for queue in queues:
        control = _asked(queue.control, queue.name)
        if control != QueueControl():
            yield "control", {"queue": queue.name, "control": control}
        if control.limited:
            yield from _limits(queue)


def _limits(queue: Queue) -> Iterator[Entry]:
    after: str | None = None
    while page := queue.keys(after=after, limit=KEYS):
        for key, counts in page.items():
            if counts.limits is not None:
                yield "limits", {"queue": queue.name, "key": key, "limits": counts.limits}
        after = next(reversed(page))


def _asked(ask: Callable[[], T], queue: str) -> T:
    """Ask for a queue's declaration or control. Raises ``FormatError``: an export leaves nothing out silently."""
    try:
        return ask()
    except FormatError as error:
        raise FormatError(
            "a queue's declaration or control can't be read",
            queue=queue,
            reason=str(error),
            fix="Declare it again, or reset its control (broker.queue(name).reset_control()), and repeat the export.",
        ) from error


def name_of(broker: Broker) -> str:
    """The broker's location and namespace, with secrets masked; the same for every path to the same file or cluster."""
    location = _resolved(broker.location)
    if isinstance(location, ClusterLocation) and location.connection_string is None:
        _, named = doctor.read_cluster_file(location.cluster_file or default_cluster_file(os.environ))
        location = dataclasses.replace(location, connection_string=named)
    return f"{location} namespace {location.namespace}"


def _resolved(location: Location) -> Location:
    if isinstance(location, SqliteLocation):
        return dataclasses.replace(location, path=location.path.resolve())
    return location


def _check_at_rest(broker: Broker, leased: int) -> None:
    open_ = [each for each in broker.inspect.sessions() if each.open]
    if open_ or leased:
        who = ", ".join(f"{each.host}:{each.pid}" for each in open_[:5])
        raise QueueError(
            "the source is in use",
            sessions=len(open_),
            at=who or None,
            leased=leased,
            fix="Stop the workers. If they are dead, add --leased: what they held is exported as ready.",
        )


def _mark(message: StoredMessage, number: int) -> bytes:
    """A message's mark: the same in a repeated import, even if the message has become ready meanwhile."""
    own = message.message_id or hashlib.sha256(b"%d " % number + message.payload).digest()[:16]
    return hashlib.sha256(message.queue.encode() + b"\0" + own).digest()[:16]


# -- from a file -------------------------------------------------------------------------------------------------------


def file_source(path: Path) -> Source:
    """An export file. Raises ``FormatError`` unless it is whole, and ``OSError``."""
    verify(path)
    return read_header(path), lambda: read_entries(path)


def export_to(path: Path, source: Source, progress: Progress) -> int:
    """Export the source to a file, which exists once it is complete. Returns the number of messages.

    Raises ``OSError``.
    """
    header, marked = source

    def entries() -> Iterator[Entry]:
        number = 0
        for _, entry in marked():
            yield entry
            if isinstance(entry, StoredMessage):
                number += 1
                progress(number)

    return write(path, dataclasses.replace(header, id=random_id()), entries())


# -- into a store ------------------------------------------------------------------------------------------------------


def import_from(source: Source, target: Broker, progress: Progress, *, again: bool = False) -> tuple[int, int]:
    """Import the source into ``target``. After any failure, call it again.

    ``again``: import a second time what was imported before, as other messages with new ids. Returns how many messages
    there are, and how many this call stored; earlier calls stored the others. Raises ``QueueError``, and then nothing
    was changed.
    """
    header, entries = source
    import_id = _choose_id(header, target, again=again)
    transfer = target.transfer

    def messages() -> Iterator[tuple[bytes, StoredMessage]]:
        """The messages, with their marks. Applies all other entries on the way."""
        for mark, entry in entries():
            if isinstance(entry, StoredMessage):
                yield mark, dataclasses.replace(entry, message_id=b"") if again else entry
            else:
                _apply(target, entry)

    number = stored = 0
    for part in split_batch(messages(), lambda each: (1, _weight(each[1])), MOST_RESTORED):
        stored += transfer.restore(import_id, part)
        number += len(part)
        progress(number)
    facts = {"messages": number, "source": header.source, "finished_ms": Clock().wall_ms()}
    transfer.finish(import_id, facts)
    return number, stored


def _weight(message: StoredMessage) -> int:
    """About how many bytes it adds to a transaction."""
    return len(message.payload) + sum(len(json.dumps(each.details)) for each in message.deaths)


def _choose_id(header: Header, target: Broker, *, again: bool) -> bytes:
    """The import's id: that of the export; with ``again`` one derived from it whose import is not finished."""
    if header.source == name_of(target) and not again:
        raise QueueError(
            "source and target are the same store",
            source=header.source,
            fix="Name another target, or add --again.",
        )
    transfer, import_id = target.transfer, header.id
    facts = transfer.finished(import_id)
    if facts is None and not again:
        return import_id
    if not again and facts is not None:
        raise QueueError(
            "this was already imported",
            messages=facts["messages"],
            fix="All that it held then is here. To import all of it a second time, add --again.",
        )
    number = 1
    while transfer.finished(_numbered(import_id, number)) is not None:
        number += 1
    return _numbered(import_id, number)


def _numbered(import_id: bytes, number: int) -> bytes:
    return hashlib.sha256(import_id + b"%d" % number).digest()[:16]


def _apply(target: Broker, entry: Entry) -> None:
    """Apply an entry that is not a message. May be repeated."""
    transfer = target.transfer
    match entry:
        case Exchange():
            target.topology.declare_exchange(entry)
        case QueueDeclaration():
            transfer.restore_queue(entry)
        case "binding", fields:
            transfer.restore_binding(**fields)
        case "control", fields:
            transfer.restore_control(**fields)
        case "limits", fields:
            transfer.restore_limits(**fields)
        case "dedup", fields:
            transfer.restore_dedups([tuple(fields.values())])
        case _:
            raise AssertionError(entry)
