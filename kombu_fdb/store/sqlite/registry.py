"""Which database files this process has open: each one once.

Model. A file is its device and inode, whatever path led to it. The first handle that is *attached* opens it, the last
one that is *detached* closes it, and a handle that comes while the last one closes opens it anew: SQLite itself knows
how to have a file open twice. A fork waits until no thread attaches or detaches; the child begins with nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Sequence

from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.locks import FairLock, Turn, surely
from kombu_fdb.store.sqlite import fork as sqlite_fork
from kombu_fdb.store.sqlite.errors import explain_os
from kombu_fdb.store.sqlite.files import identify
from kombu_fdb.store.sqlite.open_file import CLOSE_S, OpenFile
from kombu_fdb.store.sqlite.transaction import ReadingTransaction

# The process's state, because POSIX locks are: what it has open.
_open: set[OpenFile] = set()
_changing = FairLock()
#: By thread: several may fork, but only one at a time.
_forking: dict[int, Turn] = {}


def attach(handle: Hashable, path: str, clock: Clock, timeout_s: float) -> OpenFile:
    """The process's one :class:`OpenFile` for ``path``, a real path; it stays open until ``handle`` is detached.

    Raises ``StoreUnavailable``, with the fix.
    """

    def work() -> OpenFile:
        identity = identify(path)
        file = next((file for file in _open if file.identity == identity), None)
        if file is None:
            file = OpenFile(path, identity, clock, read_values)
        file.handles.add(handle)
        _open.add(file)
        return file

    try:
        return _changing.run(work, timeout_s)
    except OSError as error:
        raise explain_os(error, path) from error


def detach(handle: Hashable, file: OpenFile) -> None:
    """``handle`` needs it no more. Idempotent; in a child of the process that attached it does nothing."""

    def work() -> bool:
        file.handles.discard(handle)
        if not file.handles:
            _open.discard(file)
        return not file.handles

    if os.getpid() == file.pid and _changing.run(work, CLOSE_S):
        file.close()


def read_values(file: OpenFile, keys: Sequence[bytes]) -> list[bytes | None]:
    """What is stored of these keys."""
    transaction = ReadingTransaction(file, file, timeout_s=CLOSE_S)
    return surely(lambda: transaction.get_many(keys), transaction.cancel)


def _before_fork() -> None:
    turn = _forking[threading.get_ident()] = Turn()
    _changing.acquire(turn, sqlite_fork.WAIT_S)


def _after_in_parent() -> None:
    turn = _forking.pop(threading.get_ident(), None)
    if turn is not None:
        _changing.release(turn)


def _after_in_child() -> None:
    global _changing  # noqa: PLW0603 - a thread that is not here any more may have it
    _forking.clear()
    _changing = FairLock()
    _open.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
