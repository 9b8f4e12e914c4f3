"""What must hold in the store at every version; the guarantees of ``docs/guarantees.md`` that a scan can check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.forward_compatibility import LEASE
from kombu_fdb.engine.inspection.browse import places
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import Message, Record, size_of
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import QueueCounts
from kombu_fdb.store.protocol import KeyValue


def _rows(engine: Engine, tag: str) -> list[KeyValue]:
    begin, end = range_of(engine.keys._key(tag))

    return engine.transactions.read(lambda work: work.tr.get_range(begin, end, snapshot=True))


def messages(engine: Engine) -> dict[bytes, tuple[str, str]]:
    """Every message in the store: its queue and state. Fails if one is in two places (ONE-PLACE)."""
    found: dict[bytes, tuple[str, str]] = {}
    for state in ("ready", "keyed", "delayed", "lease"):
        for key, value in _rows(engine, state):
            queue, record = (str(engine.keys.unpack(key)[1]), value)
            if state == "lease":
                queue, _place, record = Message.of_lease(value)
            message_id = _message_id(record)
            assert message_id not in found, f"ONE-PLACE: {message_id.hex()} is {found[message_id]} and {queue, state}"
            found[message_id] = (queue, {"lease": "leased", "keyed": "ready"}.get(state, state))
    for key, value in _rows(engine, "newer"):
        message_id = _message_id(value)
        assert message_id not in found, f"ONE-PLACE: {message_id.hex()} is {found[message_id]} and kept"
        found[message_id] = (engine.keys.split_newer(key)[0], "newer")
    return found


def _message_id(record: bytes) -> bytes:
    try:
        return Record.outline(record).message_id
    except FormatError:
        return record


def ready_bytes(engine: Engine) -> Counter[str]:
    """The bytes of each queue's ready payloads, added up message by message."""
    sizes = Counter[str]()
    for state in ("ready", "keyed"):
        for key, value in _rows(engine, state):
            sizes[str(engine.keys.unpack(key)[1])] += size_of(value)
    return sizes


def check_counts(engine: Engine) -> None:
    """COUNTS: the counters equal a full scan, those of bytes too."""
    scanned = Counter(messages(engine).values())
    sizes = ready_bytes(engine)
    queues = {queue for queue, _ in scanned} | set(engine.inspect.queues())
    for queue in queues:
        ready, delayed, leased, newer = (scanned[queue, state] for state in ("ready", "delayed", "leased", "newer"))
        expected = QueueCounts(ready, delayed, leased, sizes[queue], newer)
        assert engine.inspect.counts(queue) == expected, (
            f"COUNTS: {queue}: {engine.inspect.counts(queue)} is not {expected}"
        )


def check_whereabouts(engine: Engine) -> None:
    """The index by task id has a row for each message with one, and no other."""
    keys = engine.keys
    expected = set()
    for tag in ("ready", "keyed", "delayed", "lease"):
        for key, value in _rows(engine, tag):
            place, record = key, value
            if tag == "lease":
                queue, place, record = Message.of_lease(value)
                place = keys.at(queue, place)
            if task_id := Record.known(record).task_id:
                expected.add((task_id, place))
    unnamed = set()
    for key, value in _rows(engine, "newer"):
        place = keys.at(*keys.split_newer(key))
        if task_id := Record.known(value).task_id:
            expected.add((task_id, place))
        elif keys.unpack(key)[1] == LEASE:
            unnamed.add(place)
    rows = {str(keys.unpack(key)[1]) for key, _ in _rows(engine, "task")}
    found = {(task_id, key) for task_id in rows for key in engine.transactions.read(_places_of(task_id))}
    found = {(task_id, key) for task_id, key in found if key not in unnamed}
    assert found == expected, f"the index by task id: {found ^ expected}"


def _places_of(task_id: str) -> Callable[[Work], list[bytes]]:
    return lambda work: places(work, task_id)[0]


def leftovers(engine: Engine) -> list[bytes]:
    """Keys that a store without messages and queues must not have."""
    tags = """
        ready keyed todo active backlog flight delayed lease body task count waiting expiring consumer single bound
        binding relimit newer
    """
    return [key for tag in tags.split() for key, _ in _rows(engine, tag)]
