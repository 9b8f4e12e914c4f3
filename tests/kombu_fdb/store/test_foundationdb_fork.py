"""A process that has FoundationDB open forks: its children open it anew, and it goes on as if nothing had happened."""

import os
import struct
import sys
import threading

import pytest
from kit.conformance.store import TIMEOUT_S, Keys, arm, commit, read
from kit.processes import Program, fork, in_child, until

from kombu_fdb.errors import ForkedError
from kombu_fdb.store.foundationdb import binding as foundationdb_binding
from kombu_fdb.store.foundationdb.database import FoundationDatabase

pytestmark = [pytest.mark.foundationdb, pytest.mark.process]


@pytest.fixture
def database(cluster):
    database = FoundationDatabase.open(cluster.cluster_file)
    yield database
    database.close()


@pytest.fixture
def key(database):
    keys = Keys(b"fork/" + os.urandom(8) + b"/")
    yield keys
    commit(database, lambda tr: tr.clear_range(*keys.range()))


def use(parent, cluster_file, key, generations):
    """What a child does: the inherited handle refuses, a new one works; then the child's own child."""
    with pytest.raises(ForkedError):
        parent.begin(timeout_s=1)
    parent.close()
    own = FoundationDatabase.open(cluster_file)
    commit(own, lambda tr: tr.add(key(b"n"), 1))
    _, fired = arm(own, key(b"bell"))
    if generations > 1:
        in_child(lambda: use(own, cluster_file, key, generations - 1))
    commit(own, lambda tr: tr.set_versionstamped_value(key(b"bell")))
    assert fired.wait(TIMEOUT_S)
    own.close()


def test_children_and_their_children(database, cluster, key):
    in_child(lambda: use(database, cluster.cluster_file, key, 3))
    assert read(database, key(b"n")) == struct.pack("<q", 3)


def test_a_child_that_makes_its_own_copy(database, cluster, key, monkeypatch):
    """Where the parent could not make one, and where there are no files in memory."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    in_child(lambda: use(database, cluster.cluster_file, key, 2))
    assert read(database, key(b"n")) == struct.pack("<q", 2)


def test_a_system_that_runs_no_code_from_memory(database, cluster, key, monkeypatch):
    def no_library():
        fd = os.memfd_create("no library")
        os.write(fd, b"no library")
        return fd

    monkeypatch.setattr(foundationdb_binding._process, "spare_fd", -1)
    monkeypatch.setattr(foundationdb_binding, "_copy_to_memory", no_library)
    in_child(lambda: use(database, cluster.cluster_file, key, 1))
    assert read(database, key(b"n")) == struct.pack("<q", 1)


def test_forking_while_threads_commit(database, cluster, key):
    stop = threading.Event()
    done = [0] * 8

    def work(number):
        while not stop.is_set():
            commit(database, lambda tr: tr.add(key(b"parent"), 1))
            done[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(done))]
    for thread in threads:
        thread.start()
    children = []
    for _ in range(6):
        before = sum(done)
        children.append(fork(lambda: use(database, cluster.cluster_file, key, 2)))
        until(lambda before=before: sum(done) > before + 8)
    for child in children:
        child.join(TIMEOUT_S)
        assert child.exitcode == 0
    stop.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert read(database, key(b"n")) == struct.pack("<q", 12)
    assert read(database, key(b"parent")) == struct.pack("<q", sum(done))


def test_the_parents_watches_live_on(database, cluster, key):
    _, fired = arm(database, key(b"bell"))

    def child():
        own = FoundationDatabase.open(cluster.cluster_file)
        commit(own, lambda tr: tr.set_versionstamped_value(key(b"bell")))

    in_child(child)
    assert fired.wait(TIMEOUT_S)


def test_siblings_share_one_copy(database, cluster, key):
    if not hasattr(os, "memfd_create"):
        pytest.skip(f"{sys.platform} has no files in memory; each child makes its own copy")
    in_child(lambda: use(database, cluster.cluster_file, key, 1))
    spare = foundationdb_binding._process.spare_fd
    in_child(lambda: use(database, cluster.cluster_file, key, 1))
    assert spare >= 0
    assert foundationdb_binding._process.spare_fd == spare


def test_a_normal_exit_of_both(cluster):
    """The interpreter's farewell runs exit handlers and destroys what is left; neither may touch the dead library."""
    with Program(
        """
        import os, sys
        from kombu_fdb.store.foundationdb.database import FoundationDatabase
        database = FoundationDatabase.open(sys.argv[1])
        tr = database.begin(timeout_s=5)
        tr.get(b"a")
        pid = os.fork()
        if not pid:
            if os.fork():
                os.wait()
            else:
                FoundationDatabase.open(sys.argv[1])
            sys.exit(0)
        print(os.waitpid(pid, 0)[1])
        tr.set(b"fork/exit", b"")
        tr.commit()
        print("committed")
        """,
        cluster.cluster_file,
    ) as program:
        assert program.hear() == "0"
        assert program.hear() == "committed"
        assert program.end() == 0


def test_an_application_that_uses_the_binding_itself(cluster):
    with Program(
        """
        import os, sys
        import fdb
        fdb.api_version(710)
        fdb.open(sys.argv[1])[b"fork/app"] = b"1"
        from kombu_fdb.store.foundationdb.database import FoundationDatabase
        database = FoundationDatabase.open(sys.argv[1])
        pid = os.fork()
        if not pid:
            own = FoundationDatabase.open(sys.argv[1])
            print(own.begin(timeout_s=5).get(b"fork/app"))
            os._exit(0)
        os.waitpid(pid, 0)
        print(fdb.open(sys.argv[1])[b"fork/app"])
        """,
        cluster.cluster_file,
    ) as program:
        assert program.hear() == "b'1'"
        assert program.hear() == "b'1'"
        assert program.end() == 0
