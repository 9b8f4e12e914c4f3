"""An exception at any moment leaves the store usable: by this process, by others, and with nothing half-done in it.

Python runs signal handlers between two calls, and Celery's soft time limit raises out of one. A greenlet is killed
where it waits. Here an exception comes at *each* instruction of the driver in turn, which is more than Python can do.
"""

import contextlib
import gc
import importlib.util
import struct
import threading
from pathlib import Path

import pytest
from kit.conformance.store import TIMEOUT_S, arm, retry_on
from kit.faults import Interrupted
from kit.interruption import interrupt
from kit.processes import Program

from kombu_fdb import store
from kombu_fdb.errors import KombuFDBError, StoreError
from kombu_fdb.store.sqlite.database import SqliteDatabase

pytestmark = pytest.mark.process

STORE = frozenset(map(str, Path(store.__file__ or "").parent.rglob("*.py")))
#: The lock is free at once, or it is free never.
AT_ONCE_S = 2.0

OTHER = """
    import sys
    from kombu_fdb.store.sqlite.database import SqliteDatabase
    database = SqliteDatabase.open(sys.argv[1])
    while sys.stdin.readline():
        tr = database.begin(timeout_s=2)
        try:
            tr.add(b"other", 1)
            tr.commit()
            print("written")
        except Exception as error:
            print(repr(error))
        finally:
            tr.cancel()
"""


def both(value):
    def body(tr):
        tr.set(b"a", struct.pack(">I", value))
        tr.get(b"a")
        tr.set_versionstamped_key(b"q/", b"", b"")
        tr.get_range(b"a", b"b")  # writes what was noted so far
        tr.set(b"b", struct.pack(">I", value))
        tr.add(b"sum", 1)
        tr.clear(b"gone")
        tr.set_versionstamped_value(b"bell")

    return body


class Bench:
    """The store under test, and another process beside it."""

    def __init__(self, path, other):
        self.path = path
        self.database = SqliteDatabase.open(path)
        self.other = other
        self.retry = retry_on(self.database, b"r/")
        self.number = 0

    def put(self):
        self.retry(both(self.number), timeout_s=AT_ONCE_S)

    def get(self):
        self.retry.read(lambda tr: tr.get(b"a"), timeout_s=AT_ONCE_S)

    def get_number(self):
        """The last one that was committed."""
        return int(struct.unpack(">I", self.retry.read(lambda tr: tr.get(b"a"), timeout_s=AT_ONCE_S) or bytes(4))[0])

    def cancel(self):
        def body(tr):
            both(self.number)(tr)
            raise KombuFDBError("changed my mind")

        with pytest.raises(KombuFDBError):
            self.retry(body, timeout_s=AT_ONCE_S)

    def watch(self):
        self.retry.read(lambda tr: tr.watch(b"bell"), timeout_s=AT_ONCE_S).cancel()

    def open_and_close(self):
        other = SqliteDatabase.open(self.path, synchronous="full", timeout_s=AT_ONCE_S)
        try:
            retry_on(other, b"r/")(both(self.number), timeout_s=AT_ONCE_S)
        finally:
            other.close()

    def interrupt(self, work, moment):
        self.number += 1
        return interrupt(work, moment, STORE, per="opcode")

    def check(self, where):
        """Others write at once, we write at once, and what was interrupted has happened wholly or not at all."""
        self.other.tell()
        assert self.other.hear() == "written", where
        values = self.retry.read(lambda tr: tr.get_many([b"a", b"b"]), timeout_s=AT_ONCE_S)
        assert values[0] == values[1], where
        self.retry(lambda tr: tr.add(b"own", 1), timeout_s=AT_ONCE_S)


@pytest.fixture
def bench(tmp_path):
    path = str(tmp_path / "broker.db")
    SqliteDatabase.open(path).close()
    with Program(OTHER, path) as other:
        bench = Bench(path, other)
        bench.put()
        yield bench
        bench.database.close()


#: Every so-many-th instruction of the longer ones, so that all of them take seconds.
STRIDES = {"put": 1, "get": 1, "cancel": 1, "watch": 2, "open_and_close": 3}


#: Python 3.13 warns of a connection that was interrupted before it had an owner; the collector closes it.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <sqlite3.Connection:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", STRIDES)
def test_an_exception_at_any_instruction(bench, name):
    work = getattr(bench, name)
    work()
    moment = 1
    while where := bench.interrupt(work, moment):
        bench.check(where)
        moment += STRIDES[name]
    gc.collect()  # here, not in another test's name
    assert moment > 50 * STRIDES[name]
    assert not bench.database.file.running


def test_what_was_half_written_is_never_committed(bench):
    """Even if the body takes an exception out of a signal handler for one of its own, and goes on."""

    def body(tr):
        tr.set(b"a", struct.pack(">I", bench.number))
        tr.set(b"b", struct.pack(">I", bench.number))
        with contextlib.suppress(Interrupted):
            tr.get_range(b"a", b"b")

    def work():
        with contextlib.suppress(StoreError):
            bench.retry(body, timeout_s=AT_ONCE_S)

    moment, refused = 1, 0
    while where := bench.interrupt(work, moment):
        bench.check(where)
        refused += bench.get_number() != bench.number
        moment += 1
    assert refused > 50


BUSY = """
    import sys, threading
    from kombu_fdb.store.sqlite.database import SqliteDatabase
    from kit.conformance.store import retry_on
    database = SqliteDatabase.open(sys.argv[1])
    retry = retry_on(database, b"busy/")
    def work():
        while True:
            retry(lambda tr: tr.add(b"busy", 1), timeout_s=20)
    for _ in range(2):
        threading.Thread(target=work, daemon=True).start()
    print("busy")
    sys.stdin.readline()
"""


def test_an_exception_while_others_take_turns(bench):
    """Then it also comes while the helper thread waits for the lock, or has just got it."""
    with Program(BUSY, bench.path) as busy:
        assert busy.hear() == "busy"
        for moment in range(1, 1200, 3):
            bench.check(bench.interrupt(bench.put, moment))
    assert bench.database.file.lock._helper is not None


def test_a_commit_that_was_interrupted_wakes_all_the_same(bench):
    """At worst when they next compare: no process believes in a roll-back that did not happen."""
    moment, woken = 1, 0
    while True:
        before = bench.retry.read(lambda tr: tr.get(b"a"), timeout_s=AT_ONCE_S)
        _, fired = arm(bench.database, b"bell")
        where = bench.interrupt(bench.put, moment)
        if bench.retry.read(lambda tr: tr.get(b"a"), timeout_s=AT_ONCE_S) != before:
            assert fired.wait(TIMEOUT_S), where
            woken += 1
        if not where:
            break
        moment += 23
    assert woken > 5


SIGNALLED = """
    import random, signal, sys, time
    from kombu_fdb.store.sqlite.database import SqliteDatabase
    from kit.conformance.store import retry_on

    class SoftTimeLimitExceeded(Exception):
        pass

    def handler(*_):
        raise SoftTimeLimitExceeded

    database = SqliteDatabase.open(sys.argv[1])
    retry = retry_on(database, b"r/")
    signal.signal(signal.SIGALRM, handler)
    rng, hits, done = random.Random(7), 0, 0

    def body(tr):
        tr.set_versionstamped_key(b"q/", b"", b"x" * 300)
        tr.add(b"count", 1)
        tr.set_versionstamped_value(b"bell")

    while hits < 600:
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.00001, 0.0004))
                while True:
                    retry(body, timeout_s=2)
                    done += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except SoftTimeLimitExceeded:
            hits += 1
    print(f"interrupted {hits}")
    sys.stdin.readline()
"""


def test_soft_time_limits_while_publishing(bench):
    """As in Celery's prefork children; each of them used to stop every process of the host."""
    with Program(BUSY, bench.path) as busy, Program(SIGNALLED, bench.path) as program:
        assert busy.hear() == "busy"
        assert program.hear() == "interrupted 600"
        bench.check("after the signals")
        rows = bench.retry.read(lambda tr: tr.get_range(b"q/", b"q0"), timeout_s=AT_ONCE_S)
        count = bench.retry.read(lambda tr: tr.get(b"count"), timeout_s=AT_ONCE_S)
        assert count is not None
        assert int.from_bytes(count, "little") == len([value for _, value in rows if value])


GREENLETS = """
    from gevent import monkey; monkey.patch_all()
    import random, sys, gevent
    from kombu_fdb.store.sqlite.database import SqliteDatabase
    from kit.conformance.store import retry_on
    database = SqliteDatabase.open(sys.argv[1])
    retry = retry_on(database, b"r/")
    rng = random.Random(3)

    def body(tr):
        tr.add(b"a", 1)
        gevent.sleep(0)  # while it has the lock
        tr.add(b"b", 1)

    for _ in range(100):
        greenlets = [gevent.spawn(retry, body, timeout_s=20) for _ in range(6)]
        for _ in range(rng.randrange(8)):
            gevent.sleep(0)
        for victim in rng.sample(greenlets, 3):
            victim.kill(block=rng.random() < 0.5)
        gevent.joinall(greenlets)
    print("killed")
    sys.stdin.readline()
"""


@pytest.mark.skipif(importlib.util.find_spec("gevent") is None, reason="gevent is not installed")
def test_killed_greenlets(bench):
    with Program(GREENLETS, bench.path) as program:
        assert program.hear() == "killed"
        bench.check("after the kills")


def test_threads_of_a_process_go_on_after_an_interruption(bench):
    """The interrupted turn is passed on to a thread that waits already."""
    for moment in range(1, 2000, 97):
        thread = threading.Thread(target=bench.retry, args=(both(moment),), kwargs={"timeout_s": TIMEOUT_S})
        thread.start()
        where = bench.interrupt(bench.put, moment)
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), where
        bench.check(where)
