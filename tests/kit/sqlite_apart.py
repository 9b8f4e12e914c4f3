"""A handle that shares nothing with the other handles of this process: as if another process had opened the file.

And a program that is one, and holds the write lock until it is told to go on.
"""

from __future__ import annotations

from kombu_fdb.primitives.clock import Clock
from kombu_fdb.store.sqlite.database import SqliteDatabase, read_values
from kombu_fdb.store.sqlite.errors import explain_os
from kombu_fdb.store.sqlite.files import identify
from kombu_fdb.store.sqlite.open_file import OpenFile

#: For ``kit.processes.Program``, with the path of a database.
HOLDER = """
    import sys
    from kombu_fdb.store.sqlite.database import SqliteDatabase
    database = SqliteDatabase.open(sys.argv[1])
    tr = database.begin(timeout_s=20)
    tr.set(b"half", b"done")
    tr.get_range(b"", b"z")  # a read makes it write, and from then on it is alone
    print("holding")
    sys.stdin.readline()
    tr.commit()
    print("committed")
    sys.stdin.readline()
"""


def open_apart(path: str) -> SqliteDatabase:
    """The file exists, and ``path`` is a real one. SQLite keeps count of its own openings in one process."""
    database = SqliteDatabase(path, "normal", Clock())
    try:
        database.file = OpenFile(path, identify(path), database.clock, read_values)
    except OSError as error:
        raise explain_os(error, path) from error
    database.file.handles.add(database)
    return database
