"""Stores in memory under the URL ``fdb+memory://name``, for everything that takes a URL: brokers, transports, commands.

::

    with MemoryStores() as stores:
        broker = Broker.open("fdb+memory://orders")

Model. A store is made when it is first opened and lives as long as its :class:`MemoryStores`, however often it is
closed and opened meanwhile, as a file or a cluster would. Outside of the ``with`` the URL is an error. A forked child
has only a copy of it, so opening or using one there is an error too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Self

from kombu.transport import TRANSPORT_ALIASES

from kombu_fdb.errors import ForkedError, StoreUnavailable
from kombu_fdb.process import connect
from kombu_fdb.settings.location import MEMORY_SCHEME
from kombu_fdb.testing.memory import MemoryDatabase, MemoryTransaction


class MemoryStores:
    """Every store in memory, by name."""

    def __init__(self, make: Callable[[], MemoryDatabase] = MemoryDatabase) -> None:
        self._make = make
        self._pid = os.getpid()
        self._stores: dict[str, MemoryDatabase] = {}
        self._outer = connect.open_memory

    def __enter__(self) -> Self:
        self._outer = connect.open_memory
        connect.open_memory = self.open
        # Kombu resolves the scheme's first part, which is known; after a failover it asks for the whole.
        TRANSPORT_ALIASES.setdefault(MEMORY_SCHEME, TRANSPORT_ALIASES.get("fdb", "kombu_fdb.transport:Transport"))
        return self

    def __exit__(self, *_: object) -> None:
        connect.open_memory = self._outer
        if self._outer is None:
            TRANSPORT_ALIASES.pop(MEMORY_SCHEME, None)
        self._stores.clear()

    def open(self, name: str) -> OpenedMemory:
        """Raises ``ForkedError`` in a child."""
        if os.getpid() != self._pid:
            raise ForkedError(
                "a store in memory belongs to one process",
                name=name,
                fix="Use the fixture fdb_sqlite_broker for workers with processes.",
            )
        if name not in self._stores:
            self._stores[name] = self._make()
        return OpenedMemory(self._stores[name])

    def store(self, name: str) -> MemoryDatabase:
        """What stands behind the URL."""
        return self._stores[name]

    def drop(self, name: str) -> None:
        """Forget what is in it. Harmless if there is none."""
        self._stores.pop(name, None)


class OpenedMemory:
    """One opening of a store: closing it leaves the store as it is."""

    writers_take_turns = False

    def __init__(self, store: MemoryDatabase) -> None:
        self.commit_may_be_unknown = store.commit_may_be_unknown
        self._store = store
        self._pid = os.getpid()
        self._closed = False

    def begin(self, *, timeout_s: float, read_only: bool = False) -> MemoryTransaction:
        if os.getpid() != self._pid:
            raise ForkedError("a store in memory belongs to one process")
        if self._closed:
            raise StoreUnavailable("the database was closed")
        return self._store.begin(timeout_s=timeout_s, read_only=read_only)

    def close(self) -> None:
        self._closed = True

    @property
    def armed_watches(self) -> int:
        return self._store.armed_watches
