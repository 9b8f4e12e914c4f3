"""SQLite's store between processes: turns, wake-ups, and what a killed or stopped process does to the others."""

import errno
import fcntl
import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import termios
import threading
import time
from pathlib import Path

import pytest
from kit.conformance.store import TIMEOUT_S, arm, commit, read
from kit.processes import Program, until
from kit.sqlite_apart import HOLDER, open_apart

from kombu_fdb.errors import LimitExceeded, StoreError, StoreUnavailable
from kombu_fdb.primitives.interruption import FairLock, Ticket
from kombu_fdb.store.sqlite import open_file
from kombu_fdb.store.sqlite import wakeups as sqlite_bell
from kombu_fdb.store.sqlite.database import SqliteDatabase

pytestmark = pytest.mark.process

BELL = b"bell"


@pytest.fixture(autouse=True)
def no_second_chance(monkeypatch):
    """The comparison that makes good a killed writer's lost news would hide what else gets lost."""
    monkeypatch.setattr(sqlite_bell, "CHECK_S", 3600)


def ring(database, key=BELL):
    commit(database, lambda tr: tr.set_versionstamped_value(key))


# Turns

PUBLISHER = """
    import sys
    from kombu_fdb.store.sqlite.database import SqliteDatabase
    database, who = SqliteDatabase.open(sys.argv[1]), sys.argv[2].encode()
    print("ready")
    sys.stdin.readline()
    for i in range(int(sys.argv[3])):
        tr = database.begin(timeout_s=20)
        tr.set_versionstamped_key(b"q/", b"", who)
        tr.add(b"count", 1)
        tr.commit()
    print("done")
"""


@pytest.mark.parametrize("writers", [2, 4])
def test_writers_in_tight_loops_take_turns(database, path, writers):
    count = 3000
    programs = [Program(PUBLISHER, path, str(i), str(count)) for i in range(writers)]
    for program in programs:
        assert program.hear() == "ready"
    for program in programs:
        program.tell()
    for program in programs:
        assert program.hear() == "done"
        program.end()
        program.__exit__()
    rows = [value for _, value in commit(database, lambda tr: tr.get_range(b"q/", b"q0"))]
    assert len(rows) == count * writers
    assert read(database, b"count") == struct.pack("<q", count * writers)
    assert_fair(rows, [b"%d" % i for i in range(writers)])


def assert_fair(rows, names):
    """While all of them were writing, none got less than 40 % of its share."""
    first = max(rows.index(name) for name in names)
    last = min(len(rows) - rows[::-1].index(name) for name in names)
    together = rows[first:last]
    assert len(together) > len(rows) / 2, "they did not write at the same time"
    for name in names:
        assert together.count(name) > 0.4 * len(together) / len(names)


def test_the_waiting_writer_is_next(database, path):
    """A writer that comes back at once finds the gate closed, however fast it is."""
    with open_gate(path) as gate, Program(PUBLISHER, path, "waiter", "1") as waiter:
        assert waiter.hear() == "ready"
        tr = database.begin(timeout_s=TIMEOUT_S)
        tr.get(b"a")
        tr.set_versionstamped_key(b"q/", b"", b"first")
        waiter.tell()
        until(lambda: is_locked(gate))
        tr.commit()
        commit(database, lambda tr: tr.set_versionstamped_key(b"q/", b"", b"again"))
        assert waiter.hear() == "done"
    rows = [value for _, value in commit(database, lambda tr: tr.get_range(b"q/", b"q0"))]
    assert rows == [b"first", b"waiter", b"again"]


def open_gate(path):
    return Path(f"{path}-gate").open("rb")


def is_locked(file):
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def test_threads_get_the_lock_in_the_order_they_came():
    lock, first, order = FairLock(), Ticket(), []
    assert lock.acquire(first, 0)

    def work(number):
        ticket = Ticket()
        assert lock.acquire(ticket, TIMEOUT_S)
        order.append(number)
        lock.release(ticket)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(10)]
    for number, thread in enumerate(threads):
        thread.start()
        until(lambda number=number: len(lock) == number + 2)
    assert not lock.acquire(Ticket(), 0.01)
    lock.release(first)
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert order == list(range(10))
    assert lock.acquire(Ticket(), 0)


def test_a_thread_that_would_wait_for_itself_is_refused_at_once(database):
    """As a signal handler that publishes while it interrupts a transaction of its thread."""
    outer = database.begin(timeout_s=TIMEOUT_S)
    outer.get(b"a")
    inner = database.begin(timeout_s=TIMEOUT_S)
    with pytest.raises(StoreError, match="would wait for itself") as caught:
        inner.get(b"a")
    assert not caught.value.retryable
    assert not isinstance(caught.value, StoreUnavailable)  # the store is well: no reconnect would help
    outer.set(b"a", b"1")
    outer.commit()
    commit(database, lambda tr: tr.set(b"b", b"1"))
    assert read(database, b"a") == b"1"


def test_another_thread_waits_its_turn(database):
    outer = database.begin(timeout_s=TIMEOUT_S)
    outer.get(b"a")
    other = threading.Thread(target=commit, args=(database, lambda tr: tr.set(b"b", b"1")))
    other.start()
    writers = database.file.lock._writers
    until(lambda: len(writers) == 2)
    outer.commit()
    other.join(TIMEOUT_S)
    assert read(database, b"b") == b"1"


def test_a_killed_writer_frees_the_lock_and_leaves_nothing(database, path):
    with Program(HOLDER, path) as holder:
        assert holder.hear() == "holding"
        holder.process.send_signal(signal.SIGKILL)
        commit(database, lambda tr: tr.set(b"a", b"1"))
    assert read(database, b"half") is None


def test_a_stopped_writer_costs_others_their_deadline_only(database, path):
    with Program(HOLDER, path) as holder:
        assert holder.hear() == "holding"
        holder.process.send_signal(signal.SIGSTOP)
        for _ in range(2):
            tr = database.begin(timeout_s=0.1)
            tr.set(b"a", b"1")
            with pytest.raises(StoreUnavailable, match=f"held the write lock.*{path}-lock"):
                tr.commit()
            tr.cancel()
        assert read_beside(database, b"half") is None
        holder.process.send_signal(signal.SIGCONT)
        holder.tell()
        assert holder.hear() == "committed"
        # The helper thread that stayed behind hands its lock over, and this process gives it up afterwards.
        commit(database, lambda tr: tr.set(b"a", b"1"))
        with Program(HOLDER, path) as other:
            assert other.hear() == "holding"
    assert read(database, b"a") == b"1"


def test_an_abandoned_wait_gives_the_lock_back(database, path):
    with Program(HOLDER, path) as holder:
        assert holder.hear() == "holding"
        tr = database.begin(timeout_s=0.1)
        with pytest.raises(StoreUnavailable):
            tr.get(b"a")
        holder.tell()
        assert holder.hear() == "committed"
        with Program(HOLDER, path) as other:  # not stopped by this process, which wants nothing any more
            assert other.hear() == "holding"


def test_a_try_for_a_turn_ends_by_the_deadline(database, path, monkeypatch):
    """However long the machine's other threads take when this one yields: an event loop has 0.1 s for a turn."""
    yields = []

    def slow():
        yields.append(None)
        threading.Event().wait(0.05)

    with Program(HOLDER, path) as holder:
        assert holder.hear() == "holding"
        monkeypatch.setattr(open_file.os, "sched_yield", slow)
        with pytest.raises(StoreUnavailable):
            database.begin(timeout_s=0.1).get(b"a")
        assert 0 < len(yields) <= 3
        holder.tell()
        assert holder.hear() == "committed"


def test_an_interrupted_wait_leaves_the_gate_open(database, path, monkeypatch):
    """As a signal handler of the application interrupts it: Celery's soft time limit is one."""

    def interrupted(*args):
        raise KeyboardInterrupt

    with Program(HOLDER, path) as holder, open_gate(path) as gate:
        assert holder.hear() == "holding"
        tr = database.begin(timeout_s=TIMEOUT_S)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(open_file, "_try_for_a_turn", interrupted)
            tr.get(b"a")
        assert not is_locked(gate)
        holder.tell()
        assert holder.hear() == "committed"
    commit(database, lambda tr: tr.set(b"a", b"1"))


def read_beside(database, key):
    tr = database.begin(timeout_s=TIMEOUT_S, read_only=True)
    value = tr.get(key)
    tr.commit()
    return value


ENDLESS = """
    import sys
    from kombu_fdb.store.sqlite.database import SqliteDatabase
    database = SqliteDatabase.open(sys.argv[1])
    for i in range(1_000_000):
        tr = database.begin(timeout_s=20)
        tr.set_versionstamped_key(b"q/", b"", b"x" * 900)
        tr.add(b"count", 1)
        tr.set_versionstamped_value(b"bell")
        tr.commit()
        if i == 50:
            print("running")
"""


def test_killing_writers_in_mid_work_harms_no_other_process(database, path):
    for round_ in range(4):
        with Program(ENDLESS, path) as victim:
            assert victim.hear() == "running"
            until(lambda round_=round_: int.from_bytes(read_beside(database, b"count"), "little") > 200 * (round_ + 1))
            victim.process.send_signal(signal.SIGKILL)
            victim.end()
        rows = commit(database, lambda tr: tr.get_range(b"q/", b"q0"))
        assert read(database, b"count") == struct.pack("<q", len(rows))
    with sqlite3.connect(path) as other:
        assert other.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    other.close()


# Wake-ups

LISTENER = """
    import sys, threading
    from kombu_fdb.store.sqlite import wakeups as sqlite_bell
    from kombu_fdb.store.sqlite.database import SqliteDatabase
    from kit.conformance.store import arm
    sqlite_bell.CHECK_S = 3600
    database = SqliteDatabase.open(sys.argv[1])
    while True:
        watch, fired = arm(database, b"bell")
        print("armed")
        assert fired.wait(20)
        print("woken")
        if not sys.stdin.readline():
            break
"""


def test_a_commit_wakes_another_process(database, path, record_property):
    latencies = []
    with Program(LISTENER, path) as listener:
        for _ in range(50):
            assert listener.hear() == "armed"
            start = time.perf_counter()
            ring(database)
            assert listener.hear() == "woken"
            latencies.append(time.perf_counter() - start)
            listener.tell()
    record_property("wake_up_p50_us", round(sorted(latencies)[25] * 1e6))


def test_several_processes_are_woken_by_one_commit(database, path):
    listeners = [Program(LISTENER, path) for _ in range(3)]
    for listener in listeners:
        assert listener.hear() == "armed"
    ring(database)
    for listener in listeners:
        assert listener.hear() == "woken"
        listener.__exit__()


def test_a_dead_listeners_pipe_is_removed(database, path):
    bells = Path(f"{path}-bells")
    with Program(LISTENER, path) as listener:
        assert listener.hear() == "armed"
        ring(database)
        assert listener.hear() == "woken"
        assert len(list(bells.glob("*.bell"))) == 1
    ring(database)
    assert list(bells.glob("*.bell")) == []
    with Program(LISTENER, path) as listener:
        assert listener.hear() == "armed"
    with_fresh_cache = open_apart(path)
    ring(with_fresh_cache)
    assert list(bells.glob("*.bell")) == []
    with_fresh_cache.close()


def test_a_process_without_watches_is_not_woken(database, path, monkeypatch):
    other, idle = open_apart(path), threading.Event()
    listener = database.file.listener
    wait = listener._wait_until_armed

    def wait_until_armed():
        if not listener.watches:
            idle.set()
        return wait()

    monkeypatch.setattr(listener, "_wait_until_armed", wait_until_armed)
    _, fired = arm(database, BELL)
    ring(other)
    assert fired.wait(TIMEOUT_S)
    assert idle.wait(TIMEOUT_S)
    before = unread(database)  # the thread may have found the change by comparing, before the news came
    for _ in range(10):
        ring(other)
    assert unread(database) == before + 10 * sqlite_bell.DIGEST_BYTES
    _, fired = arm(database, BELL)
    _, sign = arm(database, b"sign")
    ring(other, b"sign")
    assert sign.wait(TIMEOUT_S)
    assert not fired.is_set(), "old news is no news"
    ring(other)
    assert fired.wait(TIMEOUT_S)
    other.close()


def unread(database):
    answer = fcntl.ioctl(database.file.listener._read_fd, termios.FIONREAD, bytes(4))
    return int.from_bytes(answer, "little")


def test_a_full_pipe_is_news_for_every_watch(database, path):
    other = open_apart(path)
    busy, go_on = threading.Event(), threading.Event()
    watch, _ = arm(database, b"busy bell")
    watch.on_fire(lambda: (busy.set(), go_on.wait(TIMEOUT_S)))
    ring(other, b"busy bell")
    assert busy.wait(TIMEOUT_S)
    fired = [arm(database, b"bell/%d" % i)[1] for i in range(3)]
    with pytest.raises(BlockingIOError):
        while True:
            os.write(next(iter(other.file.ringer._fds.values())), b"unknown!" * 64)
    ring(other, b"bell/1")  # refused by the pipe
    go_on.set()
    assert all(event.wait(TIMEOUT_S) for event in fired)
    other.close()


@pytest.mark.parametrize("others_ring", [False, True])
def test_news_lost_with_a_killed_writer_is_found_by_comparing(database, path, monkeypatch, *, others_ring):
    """Also where there are always news, of queues that are not waited for."""
    monkeypatch.setattr(sqlite_bell, "CHECK_S", 0.02)
    if others_ring:
        monkeypatch.setattr(sqlite_bell, "readable", lambda *_: True)
    other = open_apart(path)
    monkeypatch.setattr(other.file.ringer, "ring", lambda keys: None)
    _, fired = arm(database, BELL)
    _, unconcerned = arm(database, b"other bell")
    ring(other)
    assert fired.wait(TIMEOUT_S)
    assert not unconcerned.is_set()
    other.close()


def test_bells_work_after_their_directory_was_removed(database, path):
    shutil.rmtree(f"{path}-bells")
    other = open_apart(path)
    ring(database)
    _, fired = arm(other, BELL)
    ring(database)
    assert fired.wait(TIMEOUT_S)
    other.close()


def test_many_bells_in_one_commit(database, path):
    other = open_apart(path)
    keys = [b"bell/%d" % i for i in range(200)]  # more than one atomic write to a pipe holds
    fired = [arm(database, key)[1] for key in keys]
    commit(other, lambda tr: [tr.set_versionstamped_value(key) for key in keys])
    assert all(event.wait(TIMEOUT_S) for event in fired)
    other.close()


def test_a_listener_outlives_a_lock_that_is_not_free(database, path, monkeypatch):
    """As after a SIGSTOP, when every deadline has passed."""
    other, ticket = open_apart(path), Ticket()
    _, fired = arm(database, BELL)
    monkeypatch.setattr(sqlite_bell, "LOCK_S", 0.01)
    assert database.file.listener.lock.acquire(ticket, TIMEOUT_S)
    ring(other)
    assert fired.wait(TIMEOUT_S)
    database.file.listener.lock.release(ticket)
    _, again = arm(database, BELL)
    ring(other)
    assert again.wait(TIMEOUT_S)
    other.close()


def test_closing_ends_the_thread_and_removes_the_pipe(path):
    database = SqliteDatabase.open(path)
    arm(database, BELL)
    thread = database.file.listener._thread
    before = open_files()
    database.close()
    database.close()
    assert not thread.is_alive()
    assert list(Path(f"{path}-bells").glob("*.bell")) == []
    assert open_files() <= before - 6, "connections, locks, pipe"
    with pytest.raises(StoreUnavailable):
        database.begin(timeout_s=1)


def test_a_watch_that_can_not_be_armed_fails_before_the_commit(database, monkeypatch):
    def no_more_files(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    tr = database.begin(timeout_s=TIMEOUT_S)
    tr.set(b"a", b"1")
    with monkeypatch.context() as patch, pytest.raises(StoreUnavailable, match="ulimit"):
        patch.setattr(os, "mkfifo", no_more_files)
        tr.watch(BELL)
    tr.cancel()
    assert read(database, b"a") is None


def test_a_store_that_fails_after_the_commit_wakes_instead_of_raising(database, monkeypatch):
    def unreadable(keys):
        raise StoreUnavailable

    tr = database.begin(timeout_s=TIMEOUT_S)
    tr.set(b"a", b"1")
    watch = tr.watch(BELL)
    with monkeypatch.context() as patch:
        patch.setattr(database.file.listener, "_read_values", unreadable)
        tr.commit()
    fired = threading.Event()
    watch.on_fire(fired.set)
    assert fired.is_set()
    assert read(database, b"a") == b"1"


def open_files():
    """``/dev/fd`` is there on Linux and on macOS."""
    return len(list(Path("/dev/fd").iterdir()))


# Disks and files


def test_a_database_that_may_not_grow(database):
    database.file._writer.execute("PRAGMA max_page_count=20")
    with pytest.raises(StoreUnavailable, match="disk is full"):
        for i in range(1000):
            commit(database, lambda tr: tr.set(b"%04d" % i, bytes(20_000)))  # noqa: B023
    commit(database, lambda tr: tr.clear_range(b"0", b"9"))
    commit(database, lambda tr: tr.set(b"again", b"1"))


def test_a_read_only_file_system(tmp_path):
    directory = tmp_path / "disk"
    directory.mkdir()
    if os.geteuid():
        SqliteDatabase.open(str(directory / "broker.db")).close()
        directory.chmod(0o500)
        (directory / "broker.db").chmod(0o400)
        with pytest.raises(StoreUnavailable, match="writable for this user"):
            SqliteDatabase.open(str(directory / "broker.db"))
        directory.chmod(0o700)
        return
    mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(directory)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"root does not heed permissions, and may not mount: {mounted.stderr.decode().strip()}")
    try:
        SqliteDatabase.open(str(directory / "broker.db")).close()
        subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
        with pytest.raises(StoreUnavailable, match=r"Mount .* read-write"):
            SqliteDatabase.open(str(directory / "broker.db"))
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def test_a_failed_transaction_frees_the_lock(database, path):
    other = open_apart(path)
    tr = database.begin(timeout_s=TIMEOUT_S)
    tr.set(b"a", b"1")
    tr.get_range(b"a", b"b")
    with pytest.raises(LimitExceeded):
        tr.set(b"k" * 20_000, b"")
    tr.cancel()
    with pytest.raises(StoreError):
        tr.commit()
    commit(other, lambda tr: tr.set(b"b", b"1"))
    assert read(database, b"a") is None
    other.close()
