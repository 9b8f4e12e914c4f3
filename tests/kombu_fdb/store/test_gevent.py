"""The stores in a process that gevent patched: every wait lets other greenlets run. Needs gevent itself."""

import importlib.util

import pytest
from kit.processes import Program

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("gevent") is None, reason="gevent is not installed"),
]

#: ``ticks`` grows while greenlets can run.
PRELUDE = """
from gevent import monkey; monkey.patch_all()
import os, sys, threading, gevent
ticks = 0
def tick():
    global ticks
    while True:
        ticks += 1
        gevent.sleep(0.001)
gevent.spawn(tick)
from kombu_fdb.errors import StoreUnavailable
from kit.conformance.store import arm, commit, read
"""

SQLITE = (
    PRELUDE
    + """
from kombu_fdb.store.sqlite.database import SqliteDatabase
database = SqliteDatabase.open(sys.argv[1])
_, fired = arm(database, b"bell")
print("armed")
before = ticks
assert fired.wait(20)
assert ticks > before
print("woken")
sys.stdin.readline()
before = ticks
tr = database.begin(timeout_s=2)
try:
    tr.get(b"a")
except StoreUnavailable:
    print("refused")
assert ticks > before
sys.stdin.readline()
gevent.joinall([gevent.spawn(lambda: commit(database, lambda tr: tr.add(b"n", 1))) for _ in range(50)])
print(int.from_bytes(read(database, b"n"), "little"))
database.close()
"""
)

FOUNDATIONDB = (
    PRELUDE
    + """
from kombu_fdb.store.foundationdb.database import FoundationDatabase
database = FoundationDatabase.open(sys.argv[1])
before = ticks
gevent.joinall([gevent.spawn(lambda: commit(database, lambda tr: tr.add(b"gevent", 1))) for _ in range(50)])
print(int.from_bytes(read(database, b"gevent"), "little"))
_, fired = arm(database, b"gevent/bell")
gevent.spawn_later(0.05, lambda: commit(database, lambda tr: tr.set_versionstamped_value(b"gevent/bell")))
assert fired.wait(20)
assert ticks > before
print("woken")
pid = os.fork()
if not pid:
    commit(FoundationDatabase.open(sys.argv[1]), lambda tr: tr.clear(b"gevent"))
    os._exit(0)
print(os.waitpid(pid, 0)[1], read(database, b"gevent"))
"""
)

INTERRUPTED = """
from gevent import monkey; monkey.patch_all()
import gevent
from unittest.mock import Mock
from kombu_fdb.store.foundationdb import binding
class Future:
    came = False
    def is_ready(self):
        return self.came
    def on_ready(self, callback):
        self.came = True
binding._wait_in_greenlets(Mock(Future=Future))
with gevent.Timeout(20):
    Future().block_until_ready()
print("over")
"""

HOLDER = """
import sys
from kombu_fdb.store.sqlite.database import SqliteDatabase
database = SqliteDatabase.open(sys.argv[1])
tr = database.begin(timeout_s=20)
tr.set_versionstamped_value(b"bell")
tr.commit()
tr = database.begin(timeout_s=20)
tr.set(b"held", b"1")
tr.get(b"a")
print("holding")
sys.stdin.readline()
tr.commit()
print("committed")
sys.stdin.readline()
"""


def test_sqlite(tmp_path):
    path = str(tmp_path / "broker.db")
    with Program(SQLITE, path) as patched:
        assert patched.hear() == "armed"
        with Program(HOLDER, path) as holder:
            assert holder.hear() == "holding"
            assert patched.hear() == "woken"
            patched.tell()
            assert patched.hear() == "refused"
            holder.tell()
            assert holder.hear() == "committed"
        patched.tell()
        assert patched.hear() == "50"
        assert patched.end() == 0


@pytest.mark.foundationdb
def test_foundationdb(cluster):
    with Program(FOUNDATIONDB, cluster.cluster_file) as patched:
        assert patched.hear() == "50"
        assert patched.hear() == "woken"
        assert patched.hear() == "0 None"
        assert patched.end() == 0


def test_a_wait_for_foundationdb_whose_callback_a_signal_ends_is_over():
    """As in ``test_foundationdb.py``."""
    with Program(INTERRUPTED) as patched:
        assert patched.hear() == "over"
        assert patched.end() == 0
