"""A transaction of the SQLite store that promised not to write: a snapshot, on a connection of its own."""

from __future__ import annotations

import sqlite3

from kombu_fdb.errors import StoreError
from kombu_fdb.primitives.locks import Turn
from kombu_fdb.store.sqlite.transaction import SqliteTransaction

__all__ = ["ReadingTransaction"]


class ReadingTransaction(SqliteTransaction):
    """One that promised not to write: a snapshot beside the writer."""

    __slots__ = ()

    _begin = "BEGIN"

    def _send(self) -> None:
        self._run("COMMIT", ())

    def _take(self, turn: Turn) -> sqlite3.Connection:
        return self._file.take_reader(turn, self._deadline)

    def _grow(self, key_bytes: int, value_bytes: int) -> None:
        raise StoreError("write in a transaction that was begun read-only")

    def _release(self) -> None:
        assert self._turn is not None
        connection = self._connection
        sound = connection is None or self._rolled_back(connection)
        # Forgotten first: a connection that is returned twice would serve two threads.
        self._cursor = self._connection = None
        if connection is not None:
            self._file.return_reader(connection, sound=sound)
        self._file.leave(self._turn)
        self._turn = None

    @staticmethod
    def _rolled_back(connection: sqlite3.Connection) -> bool:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            return False
        return True
