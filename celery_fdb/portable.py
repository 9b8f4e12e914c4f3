"""The export file: JSON lines, so that it can be read in twenty years, and with no more than a JSON parser.

The first line is the header, ``{"celery-fdb-export": 1, "id": ..., "messages": ..., ...}``, then comes one line an
entry, ``{kind: fields}``, and the last line is ``{"end": {"entries": ..., "sha256": ...}}`` over all lines before it.
Payloads are in base64, ids in hexadecimal, moments in milliseconds since 1970 UTC.

A file without its end is half an export, and is refused as a whole. It is written beside its name, with ``.part``
behind, and gets the name when it is complete and on the disk. Messages are other people's secrets: mode 0600.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kombu_fdb.errors import FormatError
from kombu_fdb.model import Death, KeyLimits, QueueControl, StoredMessage
from kombu_fdb.routing.tables import Exchange, QueueDeclaration

__all__ = ["Binding", "Control", "Dedup", "Entry", "Header", "Limits", "read_entries", "read_header", "verify", "write"]

FORMAT = "celery-fdb-export"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Header:
    """``id``: 16 bytes of this export alone. ``source``: where it is from, with secrets masked."""

    id: bytes
    source: str
    taken_ms: int
    messages: int


@dataclass(frozen=True, slots=True)
class Binding:
    exchange: str
    queue: str
    routing_key: str


@dataclass(frozen=True, slots=True)
class Control:
    queue: str
    control: QueueControl


@dataclass(frozen=True, slots=True)
class Limits:
    queue: str
    key: str
    limits: KeyLimits


@dataclass(frozen=True, slots=True)
class Dedup:
    """A window of a dedup id; ``end_ms``: wall clock."""

    exchange: str
    routing_key: str
    dedup_id: str
    end_ms: int


Entry = Exchange | QueueDeclaration | Binding | Control | Limits | Dedup | StoredMessage


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
    return StoredMessage(**{**fields, "payload": payload, "message_id": message_id, "deaths": deaths})


def _control(fields: dict[str, Any]) -> Control:
    control = fields["control"]
    return Control(fields["queue"], QueueControl(**{**control, "every_key": KeyLimits(**control["every_key"])}))


def _limits(fields: dict[str, Any]) -> Limits:
    return Limits(fields["queue"], fields["key"], KeyLimits(**fields["limits"]))


_DECODE: dict[str, Callable[[dict[str, Any]], Entry]] = {
    "exchange": lambda fields: Exchange(**fields),
    "queue": lambda fields: QueueDeclaration(**fields),
    "binding": lambda fields: Binding(**fields),
    "control": _control,
    "limits": _limits,
    "dedup": lambda fields: Dedup(**fields),
    "message": _stored_message,
}
_KINDS: dict[type, str] = {
    Exchange: "exchange",
    QueueDeclaration: "queue",
    Binding: "binding",
    Control: "control",
    Limits: "limits",
    Dedup: "dedup",
    StoredMessage: "message",
}


def _encode(entry: Entry) -> dict[str, Any]:
    fields = _message_fields(entry) if isinstance(entry, StoredMessage) else dataclasses.asdict(entry)
    return {_KINDS[type(entry)]: fields}


def _decode(line: bytes, number: int) -> Entry:
    try:
        ((kind, fields),) = json.loads(line).items()
        return _DECODE[kind](fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(
            "an entry of the export file can't be read",
            line=number,
            fix="Was it written by a newer celery-fdb? Upgrade this one.",
        ) from error


# -- the file ----------------------------------------------------------------------------------------------------------


def write(path: Path, header: Header, entries: Iterable[Entry]) -> int:
    """Write a whole export, or nothing under this name. Returns the number of messages. Raises ``OSError``."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)  # of a killed export
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # not through somebody's link
    with os.fdopen(descriptor, "wb") as file:
        messages = _write_lines(file, header, entries)
        file.flush()
        os.fsync(descriptor)
    part.replace(path)
    return messages


def _write_lines(file: IO[bytes], header: Header, entries: Iterable[Entry]) -> int:
    digest, number, messages = hashlib.sha256(), 0, 0

    def put(document: dict[str, Any]) -> None:
        line = json.dumps(document, separators=(",", ":")).encode() + b"\n"
        digest.update(line)
        file.write(line)

    put({FORMAT: VERSION, **dataclasses.asdict(header), "id": header.id.hex()})
    for number, entry in enumerate(entries, 1):  # noqa: B007 - the last one is the number of all
        put(_encode(entry))
        messages += isinstance(entry, StoredMessage)
    put({"end": {"entries": number, "messages": messages, "sha256": digest.hexdigest()}})
    return messages


def read_header(path: Path) -> Header:
    """Raises ``FormatError``, ``OSError``."""
    with path.open("rb") as file:
        line = file.readline(100_000)
    try:
        fields = json.loads(line)
        version = fields.pop(FORMAT)
    except (ValueError, KeyError, AttributeError, TypeError):
        raise FormatError(
            "not an export of celery-fdb", path=str(path), fix="Name a file that `export` has written."
        ) from None
    if version != VERSION:
        raise FormatError("an export of a newer celery-fdb", version=version, fix="Upgrade this one.")
    return Header(**{**fields, "id": bytes.fromhex(fields["id"])})


def verify(path: Path) -> int:
    """Check that the file is whole. Returns the number of messages. Raises ``FormatError``, ``OSError``."""
    digest, last = hashlib.sha256(), b""
    with path.open("rb") as file:
        for line in file:
            digest.update(last)
            last = line
    end = _end(last)
    if end is None or not last.endswith(b"\n"):
        raise FormatError(
            "half an export: it has no end", path=str(path), fix="Export again; nothing was imported from it."
        )
    if end["sha256"] != digest.hexdigest():
        raise FormatError("the export file was changed or is damaged", path=str(path), fix="Export again.")
    return int(end["messages"])


def _end(line: bytes) -> dict[str, Any] | None:
    try:
        return dict(json.loads(line)["end"])
    except (ValueError, KeyError, TypeError):
        return None


def read_entries(path: Path) -> Iterator[tuple[int, Entry]]:
    """The entries with the numbers of their lines, between header and end. Raises ``FormatError``, ``OSError``."""
    with path.open("rb") as file:
        next(file)
        before = None
        for number, line in enumerate(file, 2):
            if before is not None:
                yield number - 1, _decode(before, number - 1)
            before = line
