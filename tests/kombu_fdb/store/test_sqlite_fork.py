"""A process that has SQLite's store open forks: the child works on connections of its own, the parent is unharmed."""

import os
import sqlite3
import struct
import threading
from pathlib import Path

import pytest
from kit.conformance.store import TIMEOUT_S, arm, commit, read
from kit.processes import Program, fork, in_child, until

from kombu_fdb.errors import ForkedError, StoreUnavailable
from kombu_fdb.store.sqlite import open_file
from kombu_fdb.store.sqlite.database import SqliteDatabase

pytestmark = pytest.mark.process


def test_a_child_opens_its_own(database, path):
    commit(database, lambda tr: tr.set(b"parent", b"1"))

    def child():
        with pytest.raises(ForkedError):
            database.begin(timeout_s=1)
        database.close()
        own = SqliteDatabase.open(path)
        assert read(own, b"parent") == b"1"
        commit(own, lambda tr: tr.set(b"child", b"1"))
        in_child(lambda: grandchild(own, path))
        commit(own, lambda tr: tr.add(b"n", 1))

    def grandchild(parent, path):
        with pytest.raises(ForkedError):
            parent.begin(timeout_s=1)
        own = SqliteDatabase.open(path)
        commit(own, lambda tr: tr.add(b"n", 1))
        own.close()

    in_child(child)
    assert read(database, b"child") == b"1"
    assert read(database, b"n") == struct.pack("<q", 2)


def test_forking_while_threads_commit(database, path):
    stop = threading.Event()
    done = [0] * 4

    def work(number):
        while not stop.is_set():
            commit(database, lambda tr: tr.add(b"parent", 1))
            commit_reading(database)
            done[number] += 1

    def child():
        own = SqliteDatabase.open(path)
        for _ in range(20):
            commit(own, lambda tr: tr.add(b"child", 1))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    children = []
    for _ in range(8):
        before = sum(done)
        children.append(fork(child))
        until(lambda before=before: sum(done) > before + 4)
    for process in children:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    stop.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert read(database, b"child") == struct.pack("<q", 8 * 20)
    assert read(database, b"parent") == struct.pack("<q", sum(done))
    with sqlite3.connect(path) as other:
        assert other.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    other.close()


def commit_reading(database):
    tr = database.begin(timeout_s=TIMEOUT_S, read_only=True)
    tr.get(b"parent")
    tr.commit()


def test_the_librarys_memory_of_locks_does_not_reach_the_child(database, path):
    """The child is the last one to have the file open, and no process removes the log under it."""
    commit(database, lambda tr: tr.set(b"parent", b"1"))
    with Program(
        """
        import os, sys
        from kombu_fdb.store.sqlite.database import SqliteDatabase
        database = SqliteDatabase.open(sys.argv[1])
        tr = database.begin(timeout_s=5); tr.set(b"a", b"1"); tr.commit()
        if os.fork():
            os._exit(0)  # the parent is gone
        own = SqliteDatabase.open(sys.argv[1])
        tr = own.begin(timeout_s=5); tr.set(b"b", b"1"); tr.commit()
        print("open")
        sys.stdin.readline()
        tr = own.begin(timeout_s=5); tr.set(b"c", b"1"); tr.commit()
        print("committed")
        sys.stdin.readline()
        """,
        path,
    ) as program:
        assert program.hear() == "open"
        database.close()  # as the last one it would remove the log
        program.tell()
        assert program.hear() == "committed"
        again = SqliteDatabase.open(path)
        assert [read(again, key) for key in (b"parent", b"a", b"b", b"c")] == [b"1"] * 4
        again.close()


def test_a_child_does_not_hold_its_dead_parents_lock(database, path):
    with Program(
        """
        import os, sys, threading
        from kombu_fdb.store.sqlite.database import SqliteDatabase
        database = SqliteDatabase.open(sys.argv[1])
        if not os.fork():
            sys.stdin.readline()
            os._exit(0)
        tr = database.begin(timeout_s=5); tr.set(b"a", b"1"); tr.get_range(b"a", b"b")
        print("holding")
        threading.Event().wait()
        """,
        path,
    ) as program:
        assert program.hear() == "holding"
        program.process.kill()
        program.end()
        commit(database, lambda tr: tr.set(b"b", b"1"))
        assert read(database, b"a") is None
        program.tell()


def test_a_child_does_not_keep_its_dead_parents_pipe(database, path):
    with Program(
        """
        import os, sys, threading
        from kombu_fdb.store.sqlite.database import SqliteDatabase
        from kit.conformance.store import arm
        database = SqliteDatabase.open(sys.argv[1])
        arm(database, b"bell")
        if not os.fork():
            print("armed", flush=True)  # the child: what it had to drop at the fork it has dropped
            sys.stdin.readline()
            os._exit(0)
        threading.Event().wait()
        """,
        path,
    ) as program:
        assert program.hear() == "armed"
        program.process.kill()
        program.end()
        commit(database, lambda tr: tr.set_versionstamped_value(b"bell"))
        assert list(Path(f"{path}-bells").glob("*.bell")) == []
        program.tell()


def test_the_parents_watches_live_on(database, path):
    _, fired = arm(database, b"bell")

    def child():
        own = SqliteDatabase.open(path)
        commit(own, lambda tr: tr.set_versionstamped_value(b"bell"))
        _, own_fired = arm(own, b"bell")
        commit(own, lambda tr: tr.set_versionstamped_value(b"bell"))
        assert own_fired.wait(TIMEOUT_S)

    in_child(child)
    assert fired.wait(TIMEOUT_S)


def test_a_transaction_that_outlasts_the_wait(database, path, monkeypatch):
    monkeypatch.setattr(open_file, "WAIT_S", 0.05)
    tr = database.begin(timeout_s=TIMEOUT_S)
    tr.set(b"a", b"1")
    tr.get_range(b"a", b"b")

    def child():
        with pytest.raises(StoreUnavailable, match="lazy-apps"):
            SqliteDatabase.open(path)
        other = SqliteDatabase.open(path + "2")
        commit(other, lambda tr: tr.set(b"a", b"1"))

    in_child(child)
    tr.commit()
    assert read(database, b"a") == b"1"


def test_a_child_that_exits_normally_harms_no_other_process(path):
    with Program(
        """
        import os, sys
        from kombu_fdb.store.sqlite import open_file
        from kombu_fdb.store.sqlite.database import SqliteDatabase
        open_file.WAIT_S = 0.05
        database = SqliteDatabase.open(sys.argv[1])
        tr = database.begin(timeout_s=5)
        tr.set(b"a", b"1")
        tr.get_range(b"a", b"b")
        pid = os.fork()
        if not pid:
            sys.exit(0)  # with the interpreter's whole farewell
        print(os.waitpid(pid, 0)[1])
        tr.commit()
        print("committed")
        """,
        path,
    ) as program:
        assert program.hear() == "0"
        assert program.hear() == "committed"
        assert program.end() == 0
    database = SqliteDatabase.open(path)
    assert read(database, b"a") == b"1"
    database.close()


def test_a_fork_without_pythons_hooks_is_noticed(path):
    """As C code may fork: by then nothing was closed."""
    with Program(
        """
        import ctypes, os, sys
        from kombu_fdb.errors import ForkedError, StoreUnavailable
        from kombu_fdb.store.sqlite.database import SqliteDatabase
        database = SqliteDatabase.open(sys.argv[1])
        if not ctypes.CDLL(None).fork():
            for use in (lambda: database.begin(timeout_s=1), lambda: SqliteDatabase.open(sys.argv[1])):
                try:
                    use()
                except (ForkedError, StoreUnavailable) as error:
                    print(type(error).__name__)
            os._exit(0)
        sys.stdin.readline()
        """,
        path,
    ) as program:
        assert program.hear() == "ForkedError"
        assert program.hear() == "StoreUnavailable"


def test_subprocesses_cost_nothing(database):
    connection = database.file._writer
    with Program("print(1)") as program:
        assert program.hear() == "1"
    assert database.file._writer is connection


def test_a_database_is_reopened_after_the_fork(database):
    in_child(lambda: None)
    assert database.file._writer is None
    commit(database, lambda tr: tr.set(b"a", b"1"))
    assert os.getpid() == database.pid


def test_threads_that_fork_at_the_same_time(database, path):
    """Forks take turns: the end of one must not let transactions start in the middle of another."""
    statuses = []

    def work():
        for _ in range(10):
            commit(database, lambda tr: tr.add(b"parent", 1))
            pid = os.fork()
            if not pid:
                try:
                    commit(SqliteDatabase.open(path), lambda tr: tr.add(b"child", 1))
                    os._exit(0)
                finally:
                    os._exit(1)
            statuses.append(os.waitpid(pid, 0)[1])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert statuses == [0] * 40
    assert read(database, b"child") == read(database, b"parent") == struct.pack("<q", 40)
