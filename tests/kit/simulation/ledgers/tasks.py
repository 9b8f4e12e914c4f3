"""The index by task id, held against the messages. Model: ``kombu_fdb/engine/messages/message.py``.

Each message with a task id has one row, which says where it is or, under a lease, where it was; there is no other row.
"""

from __future__ import annotations

from kit.simulation.ledgers.rows import Row
from kit.simulation.violation import Violation
from kombu_fdb.keyspace.layout import STAMP_BYTES, STAMP_CODE, Keyspace


class TaskLedger:
    """Books of the index."""

    def __init__(self, keys: Keyspace) -> None:
        self._keys = keys
        self._expected: dict[bytes, bytes] = {}
        self._found: dict[bytes, bytes] = {}
        self._touched: set[bytes] = set()

    def message(self, row: Row, by: int) -> None:
        """A message row came (after the one it replaces has gone) or went."""
        task_id = row.record.task_id
        if not task_id:
            return
        key = self._keys.task(task_id) + STAMP_CODE + row.place[-STAMP_BYTES:]
        if by > 0:
            self._expected[key] = row.place[len(self._keys.prefix) : -STAMP_BYTES]
        else:
            self._expected.pop(key, None)
        self._touched.add(key)

    def note(self, key: bytes, value: bytes | None) -> None:
        """A row of the index came or went."""
        if value is None:
            self._found.pop(key, None)
        else:
            self._found[key] = value
        self._touched.add(key)

    def check(self) -> None:
        """Raises ``Violation``."""
        touched, self._touched = self._touched, set()
        for key in touched:
            expected, found = self._expected.get(key), self._found.get(key)
            if expected != found:
                task_id = str(self._keys.unpack(key)[1])
                raise Violation("COUNTS", f"the index says of {task_id} {found!r}; it is at {expected!r}")
