"""A handle that shares nothing with the other handles of this process: as if another process had opened the file."""

from __future__ import annotations

from kombu_fdb.primitives.clock import Clock
from kombu_fdb.store.sqlite.database import SqliteDatabase, read_values
from kombu_fdb.store.sqlite.errors import explain_os
from kombu_fdb.store.sqlite.files import identify
from kombu_fdb.store.sqlite.open_file import OpenFile


def open_apart(path: str) -> SqliteDatabase:
    """The file exists, and ``path`` is a real one. SQLite keeps count of its own openings in one process."""
    database = SqliteDatabase(path, "normal", Clock())
    try:
        database.file = OpenFile(path, identify(path), database.clock, read_values)
    except OSError as error:
        raise explain_os(error, path) from error
    database.file.handles.add(database)
    return database
