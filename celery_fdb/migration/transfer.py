"""Export and import: all of a broker into a file, from a file, or from one store straight into another.

What goes along: declarations, exchanges, bindings, controls and limits, open dedup windows, and every message that is
ready, delayed or dead, with its key, priority, order, due time, history and ids. What does not: sessions, and what they
hold, unless it is asked for.

An import may be killed at any point and started again: nothing is lost and nothing doubled, because each message is
stored by the transaction that marks it as stored (``kombu_fdb/engine/migration.py``). The source is left as it
is.

A source has to rest. While consumers live, some messages are under leases, would be missing here and done there; so an
export refuses to begin then. Publishers can't be seen: its user has to turn them to the new broker first.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from celery_fdb.migration import portable
from celery_fdb.migration.portable import Binding, Control, Dedup, Entry, Header, Limits
from kombu_fdb import Broker, QueueError
from kombu_fdb.api.administration import MOST_BYTES, MOST_MESSAGES
from kombu_fdb.errors import FormatError
from kombu_fdb.model import QueueControl, StoredMessage
from kombu_fdb.primitives.clock import SystemClock, random_id
from kombu_fdb.primitives.ranges import MOST
from kombu_fdb.routing.tables import PREDECLARED, Exchange, QueueDeclaration

T = TypeVar("T")

#: Keys read at once.
KEYS = 1_000
#: Told how many messages are done.
Progress = Callable[[int], object]


class SourceBusy(QueueError):
    """A worker or publisher is active on the source."""

    text = "the source is in use"


class AlreadyImported(QueueError):
    """All of it is here, or was."""

    text = "this was already imported"


class Source(Protocol):
    """Where an import comes from."""

    @property
    def header(self) -> Header: ...
    def entries(self) -> Iterator[tuple[bytes, Entry]]:
        """Everything in an order in which it can be stored; a message with a mark that is its alone, and stays so."""


# -- from a store ------------------------------------------------------------------------------------------------------


class StoreSource:
    """An open broker as it is."""

    def __init__(self, broker: Broker, *, leased: bool = False) -> None:
        """``leased``: take what sessions hold too, as ready messages. Raises ``SourceBusy`` without it."""
        self._broker = broker
        self._leased = leased
        counts = broker.queues().values()
        if not leased:
            _check_at_rest(broker, sum(each.leased for each in counts))
        number = sum(each.ready + each.delayed + leased * each.leased for each in counts)
        place = name_of(broker)
        expected = min(max(0, number), MOST)  # a damaged counter tells anything
        self.header = Header(hashlib.sha256(place.encode()).digest()[:16], place, SystemClock().wall_ms(), expected)

    def entries(self) -> Iterator[tuple[bytes, Entry]]:
        for entry in self._topology():
            yield b"", entry
        migration = self._broker.migration
        for each in migration.dedups():
            yield b"", Dedup(*each)
        for queue in self._broker.queues():
            for number, message in enumerate(migration.dump(queue, leased=self._leased)):
                yield _mark(message, number), message

    def _topology(self) -> Iterator[Entry]:
        topology = self._broker.topology
        exchanges = topology.exchanges()
        yield from exchanges
        names = list(self._broker.queues())
        for name in names:
            declaration = _asked(self._broker.queue(name).declaration, name)
            if declaration is not None:
                yield declaration
        known = {*PREDECLARED, *(each.name for each in exchanges)}
        yield from [Binding(*each) for each in topology.bindings() if each[0] in known]
        for name in names:
            control = _asked(self._broker.queue(name).control, name)
            if control != QueueControl():
                yield Control(name, control)
            if control.limited:
                yield from self._limits(name)

    def _limits(self, queue: str) -> Iterator[Entry]:
        after: str | None = None
        while page := self._broker.queue(queue).keys(after=after, limit=KEYS):
            for key, counts in page.items():
                if counts.limits is not None:
                    yield Limits(queue, key, counts.limits)
            after = next(reversed(page))


def _asked(ask: Callable[[], T], queue: str) -> T:
    """Nothing is left out of an export in silence. Raises ``FormatError``."""
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
    """Where it is and in which namespace, with secrets masked."""
    location = broker.location
    return f"{location} namespace {location.namespace}"


def _check_at_rest(broker: Broker, leased: int) -> None:
    open_ = [each for each in broker.inspect.sessions() if each.open]
    if open_ or leased:
        who = ", ".join(f"{each.description.get('host')}:{each.description.get('pid')}" for each in open_[:5])
        raise SourceBusy(
            sessions=len(open_),
            at=who or None,
            leased=leased,
            fix="Stop the workers. If they are dead, add --leased: what they held is exported as ready.",
        )


def _mark(message: StoredMessage, number: int) -> bytes:
    """The same in the next try, even if the message has become ready meanwhile."""
    own = message.message_id or hashlib.sha256(b"%d " % number + message.payload).digest()[:16]
    return hashlib.sha256(message.queue.encode() + b"\0" + own).digest()[:16]


# -- from a file -------------------------------------------------------------------------------------------------------


class FileSource:
    """An export file. Raises ``FormatError`` unless it is whole, and ``OSError``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        portable.verify(path)
        self.header = portable.read_header(path)

    def entries(self) -> Iterator[tuple[bytes, Entry]]:
        for number, entry in portable.read_entries(self._path):
            yield number.to_bytes(8, "big"), entry


def export_to(path: Path, source: StoreSource, progress: Progress) -> int:
    """Write an export file; it is there when it is complete. Returns the number of messages. Raises ``OSError``."""

    def entries() -> Iterator[Entry]:
        number = 0
        for _, entry in source.entries():
            yield entry
            if isinstance(entry, StoredMessage):
                number += 1
                progress(number)

    return portable.write(path, dataclasses.replace(source.header, id=random_id()), entries())


# -- into a store ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Imported:
    """``stored``: by this call; the others of ``messages`` were there from earlier ones."""

    messages: int
    stored: int


def import_from(source: Source, target: Broker, progress: Progress, *, again: bool = False) -> Imported:
    """Store all of it in ``target``; to be repeated after whatever failure.

    ``again``: once more what was imported before, as other messages with new ids. Raises ``AlreadyImported``; nothing
    is changed then.
    """
    import_id = _choose_id(source, target, again=again)
    migration = target.migration
    batch: list[tuple[bytes, StoredMessage]] = []
    number, stored, size = 0, 0, 0
    for mark, entry in source.entries():
        if not isinstance(entry, StoredMessage):
            _apply(target, entry)
            continue
        weight = _weight(entry)
        if batch and (len(batch) >= MOST_MESSAGES or size + weight > MOST_BYTES):
            stored += migration.restore(import_id, batch)
            progress(number)
            batch, size = [], 0
        batch.append((mark, dataclasses.replace(entry, message_id=b"") if again else entry))
        size += weight
        number += 1
    if batch:
        stored += migration.restore(import_id, batch)
        progress(number)
    facts = {"messages": number, "source": source.header.source, "finished_ms": SystemClock().wall_ms()}
    migration.finish(import_id, facts)
    return Imported(number, stored)


def _weight(message: StoredMessage) -> int:
    """About how many bytes it adds to a transaction."""
    return len(message.payload) + sum(len(json.dumps(each.details)) for each in message.deaths)


def _choose_id(source: Source, target: Broker, *, again: bool) -> bytes:
    """The export's id; with ``again`` one made of it that is not finished yet."""
    if source.header.source == name_of(target) and not again:
        raise AlreadyImported(
            "source and target are the same store",
            source=source.header.source,
            fix="Name another target, or add --again.",
        )
    migration, import_id = target.migration, source.header.id
    facts = migration.finished(import_id)
    if facts is None and not again:
        return import_id
    if not again and facts is not None:
        raise AlreadyImported(
            messages=facts["messages"], fix="Nothing is missing. To import all of it a second time, add --again."
        )
    number = 1
    while migration.finished(_numbered(import_id, number)) is not None:
        number += 1
    return _numbered(import_id, number)


def _numbered(import_id: bytes, number: int) -> bytes:
    return hashlib.sha256(import_id + b"%d" % number).digest()[:16]


def _apply(target: Broker, entry: Entry) -> None:
    """What is no message. May be repeated."""
    migration = target.migration
    match entry:
        case Exchange():
            target.topology.declare_exchange(entry)
        case QueueDeclaration():
            migration.restore_queue(entry)
        case Binding():
            migration.restore_binding(entry.queue, entry.exchange, entry.routing_key)
        case Control():
            migration.restore_control(entry.queue, entry.control)
        case Limits():
            migration.restore_limits(entry.queue, entry.key, entry.limits)
        case Dedup():
            migration.restore_dedups([(entry.exchange, entry.routing_key, entry.dedup_id, entry.end_ms)])
        case _:
            raise AssertionError(entry)
