"""The store's conformance suite over a real FoundationDB."""

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import walk_stack
from unittest.mock import Mock

import pytest
from kit.conformance.queue import Bench
from kit.conformance.store import TIMEOUT_S, StoreConformance, arm, commit, read, retry_on
from kit.interruption import interrupt, runs_handlers

from kombu_fdb.errors import CommitUnknown, Conflict, LimitExceeded, StoreError, StoreUnavailable, TransactionTooOld
from kombu_fdb.model import ClaimTerms
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.store.foundationdb import binding
from kombu_fdb.store.foundationdb.database import FoundationDatabase, FoundationTransaction, explain_commit
from kombu_fdb.testing.clock import ManualClock
from kombu_fdb.testing.fdbserver import Cluster

pytestmark = pytest.mark.foundationdb


@pytest.fixture(scope="module")
def database(cluster):
    database = FoundationDatabase.open(cluster.cluster_file)
    yield database
    database.close()


class TestFoundationDB(StoreConformance):
    @pytest.fixture
    def second_handle(self, cluster):
        other = FoundationDatabase.open(connection_string=cluster.connection_string)
        yield other
        other.close()

    def aged(self, database, key):
        tr = database.begin(timeout_s=TIMEOUT_S)
        version = tr._tr.get_read_version().wait()
        tr.cancel()
        old = database.begin(timeout_s=TIMEOUT_S)
        old._tr.set_read_version(max(version - 50_000_000, 1))  # 50 s
        return old


@pytest.fixture
def own_cluster():
    """One that a test may stop."""
    with Cluster() as cluster:
        yield cluster


def test_a_cluster_that_stops_and_comes_back(own_cluster):
    database = FoundationDatabase.open(own_cluster.cluster_file)
    commit(database, lambda tr: tr.set(b"kept", b"1"))
    _, fired = arm(database, b"bell")
    own_cluster.stop()
    reading = database.begin(timeout_s=0.2)
    with pytest.raises(StoreUnavailable, match="within the deadline"):
        reading.get(b"kept")
    writing = database.begin(timeout_s=0.2)
    writing.set(b"lost", b"1")
    with pytest.raises(CommitUnknown) as unknown:
        writing.commit()
    assert unknown.value.in_flight
    with pytest.raises(StoreUnavailable, match="does not answer"):
        FoundationDatabase.open(own_cluster.cluster_file, timeout_s=0.2)
    own_cluster.start()
    assert read(database, b"kept") == b"1"
    commit(database, lambda tr: tr.set_versionstamped_value(b"bell"))
    assert fired.wait(TIMEOUT_S)
    database.close()


def test_a_locked_cluster_is_not_available(own_cluster):
    """And not an error that no caller expects: Celery's worker starts again and again until it is unlocked.

    The last read is not answered in time; what the cluster said before is the reason.
    """

    class LastRead(Clock):
        now_s = 0.0

        def monotonic(self):
            return self.now_s

        def sleep(self, seconds):
            os.kill(own_cluster.pid, signal.SIGSTOP)
            self.now_s = TIMEOUT_S - 0.001

    own_cluster._cli("lock")
    try:
        with pytest.raises(StoreUnavailable, match="Database is locked"):
            FoundationDatabase.open(own_cluster.cluster_file, timeout_s=TIMEOUT_S, clock=LastRead())
    finally:
        os.kill(own_cluster.pid, signal.SIGCONT)


def test_a_stalled_cluster_costs_the_deadline_only(own_cluster):
    database = FoundationDatabase.open(own_cluster.cluster_file)
    os.kill(own_cluster.pid, signal.SIGSTOP)
    tr = database.begin(timeout_s=0.2)
    with pytest.raises(StoreUnavailable):
        tr.get_range(b"", b"\xff", limit=1)
    retry = retry_on(database, b"t/")
    with pytest.raises((StoreUnavailable, CommitUnknown)):
        retry(lambda tr: tr.add(b"n", 1), timeout_s=0.2)
    os.kill(own_cluster.pid, signal.SIGCONT)
    commit(database, lambda tr: tr.set(b"a", b"1"))
    database.close()


def test_a_claim_whose_commit_met_a_stopped_server_leaves_no_orphaned_lease(own_cluster, monkeypatch):
    """The server goes on, the session recovers what it does not know of, and takes all there is."""
    bench = Bench(FoundationDatabase.open(own_cluster.cluster_file))
    bench.put(b"a", b"b")
    first = bench.engine.messages.reserve()
    commit = FoundationTransaction.commit

    def stopped(tr):
        os.kill(own_cluster.pid, signal.SIGSTOP)
        commit(tr)

    monkeypatch.setattr(bench.engine.transactions, "environment", replace(bench.environment, call_s=2.0))
    monkeypatch.setattr(FoundationTransaction, "commit", stopped)
    with pytest.raises(CommitUnknown):
        bench.engine.messages.claim(bench.session, ["q"], 1, terms=ClaimTerms(first=first))
    monkeypatch.undo()
    os.kill(own_cluster.pid, signal.SIGCONT)
    bench.engine.sessions.recover(bench.session, first)
    assert [each.payload for each in bench.take()] == [b"a", b"b"]
    assert bench.counts() == (0, 0, 2)
    bench.check()
    bench.database.close()


def test_what_the_errors_of_a_commit_mean():
    fdb = pytest.importorskip("fdb")
    for code, expected, in_flight in (
        (1007, TransactionTooOld, None),
        (1020, Conflict, None),
        (1021, CommitUnknown, False),
        (1031, CommitUnknown, True),
        (1039, CommitUnknown, True),
        (1009, StoreError, None),
        (1037, StoreError, None),
        (1213, StoreError, None),
        (2101, LimitExceeded, None),
        (2108, StoreUnavailable, None),
    ):
        error = explain_commit(fdb.FDBError(code), "Run `fdbcli`")
        assert type(error) is expected
        assert error.retryable == (expected not in (LimitExceeded, StoreUnavailable))
        assert error.attributes.get("in_flight") == in_flight
        assert ("fdbcli" in str(error)) == (expected in (StoreError, StoreUnavailable))
        assert type(pickle.loads(pickle.dumps(error))) is expected


def test_an_error_names_the_cluster_to_look_at(cluster):
    transaction = FoundationDatabase.open(cluster.cluster_file).begin(timeout_s=TIMEOUT_S)
    transaction._tr.cancel()
    with pytest.raises(StoreUnavailable, match=f"fdbcli -C {re.escape(cluster.cluster_file)} --exec status"):
        transaction.get(b"a")


def test_closing_cancels_the_watches(cluster):
    database = FoundationDatabase.open(cluster.cluster_file)
    _, silent = arm(database, b"bell/close")
    assert database.armed_watches == 1
    database.close()
    database.close()
    assert database.armed_watches == 0
    other = FoundationDatabase.open(cluster.cluster_file)
    _, fired = arm(other, b"bell/close")
    commit(other, lambda tr: tr.set_versionstamped_value(b"bell/close"))
    assert fired.wait(TIMEOUT_S)
    assert not silent.is_set()
    with pytest.raises(StoreUnavailable):
        database.begin(timeout_s=1)
    other.close()


def test_a_watch_that_the_client_refuses_fires(cluster):
    """So that its owner looks by itself, instead of waiting for a change that will not be reported."""
    database = FoundationDatabase.open(connection_string=cluster.connection_string)
    database._handle.options.set_max_watches(1)
    _, first = arm(database, b"bell/one")
    _, refused = arm(database, b"bell/two")
    assert refused.wait(TIMEOUT_S)
    assert not first.is_set()
    database.close()


def test_the_client_threads_see_no_python_error(cluster):
    """A callback that fails must not hurt FoundationDB's network thread, which serves everybody."""
    database = FoundationDatabase.open(cluster.cluster_file)
    tr = database.begin(timeout_s=TIMEOUT_S, read_only=True)
    watch = tr.watch(b"bell/broken")
    tr.commit()
    called = threading.Event()

    def broken():
        called.set()
        raise ZeroDivisionError

    watch.on_fire(broken)
    commit(database, lambda tr: tr.set_versionstamped_value(b"bell/broken"))
    assert called.wait(TIMEOUT_S)
    commit(database, lambda tr: tr.set(b"a", b"1"))
    database.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_a_wait_that_a_signal_ends_does_not_cut_the_next_ones_short(cluster, error):
    """Wherever it is struck: what was waited for may come when the thread waits for something else."""
    database, struck, main = FoundationDatabase.open(cluster.cluster_file), threading.Event(), threading.get_ident()

    def strike(_number, frame):
        names = [each.f_code.co_name for each, _ in walk_stack(frame)]
        # Not in a finalizer of garbage, where Python ignores exceptions: the wait would go on.
        if "block_until_ready" in names and "__del__" not in names and not struck.is_set():
            struck.set()
            raise error

    def send():
        while not struck.is_set():
            signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, strike)
    try:
        for key in (b"late/%d" % number for number in range(20)):
            tr = database._handle.create_transaction()
            change = tr.watch(key)
            tr.commit().wait()
            struck.clear()
            sender = threading.Thread(target=send)
            sender.start()
            with pytest.raises(error):
                change.wait()
            sender.join()
            for _ in range(2):
                commit(database, lambda tr, key=key: tr.set_versionstamped_value(key))
    finally:
        signal.signal(signal.SIGUSR1, before)
        database.close()


def test_a_wait_whose_callback_a_signal_ends_is_over():
    """Of an answer that came just before it was asked for: the library calls back at once, in the same thread."""

    class Future:
        came = False

        def is_ready(self):
            return self.came

        def on_ready(self, callback):
            self.came = callback is not None

    binding._wait_apart(Mock(Future=Future))
    waiter = threading.Thread(target=vars(Future)["block_until_ready"], args=(Future(),), daemon=True)
    waiter.start()
    waiter.join(TIMEOUT_S)
    assert not waiter.is_alive()


def test_an_exception_at_any_line_does_not_make_it_load_another_library(database):
    """``Thread.is_alive`` takes the thread for dead then, though its library serves the open databases."""
    module, files = binding.binding(), {str(each.__file__) for each in (binding, threading)}
    where, moment = "begin", 0
    while where:
        moment += 1
        where = interrupt(binding.binding, moment, files, strikes=runs_handlers)
        assert binding.binding() is module, where
    assert moment > 3
    commit(database, lambda tr: tr.set(b"a", b"1"))


OPENED = """
from kombu_fdb import Broker
import sys
with Broker.open(sys.argv[1]) as broker:
    broker.queue("q").put(b"a")
    print(broker.queue("q").take(5).payload)
"""


def test_a_client_library_of_several_versions(cluster, tmp_path):
    """FoundationDB's multi-version client, which tells each process once that it has chosen one of them."""
    library = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libfdb_c" in line)
    shutil.copy(library, tmp_path / "libfdb_c_other.so")
    environment = {**os.environ, "FDB_NETWORK_OPTION_EXTERNAL_CLIENT_DIRECTORY": str(tmp_path)}
    url = f"fdb:///{cluster.cluster_file}"
    done = subprocess.run(
        [sys.executable, "-c", OPENED, url], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "b'a'\n", done.stderr


class TestReadVersions:
    """A transaction that has read nothing takes the version of this process's last commit, for a tenth of a second."""

    KEY = b"read-versions/key"

    @pytest.fixture
    def clock(self):
        return ManualClock()

    @pytest.fixture
    def database(self, cluster, clock):
        database = FoundationDatabase.open(cluster.cluster_file, clock=clock)
        self.given(database)
        yield database
        database.close()

    def given(self, database, *steps):
        """Commit a transaction of these steps and a write. The version that it was given; None if it asked for one."""
        tr = database.begin(timeout_s=TIMEOUT_S)
        spy = tr._tr = Mock(wraps=tr._tr)
        for step in steps:
            step(tr)
        tr.set(self.KEY, b"")
        tr.commit()
        given = spy.set_read_version.call_args
        return None if given is None else given.args[0]

    def test_it_takes_that_of_the_last_commit(self, database):
        for _ in range(3):
            last = database.committed[-1]
            assert self.given(database, lambda tr: tr.add_read_conflict_key(self.KEY)) == last < database.committed[-1]

    @pytest.mark.parametrize(
        "step",
        [lambda tr: tr.get(b"a"), lambda tr: tr.get_range(b"a", b"b", snapshot=True), lambda tr: tr.watch(b"a")],
        ids=["get", "range", "watch"],
    )
    def test_one_that_has_read_asks(self, step, database):
        assert self.given(database, step) is None

    def test_the_cluster_is_asked_ten_times_a_second(self, database, clock):
        """So it can throttle a process that does nothing but publish."""
        asked = 0
        for _ in range(100):
            clock.advance(0.01)
            asked += self.given(database) is None
        assert 9 <= asked <= 11

    def test_after_an_error_it_asks(self, database):
        with pytest.raises(Conflict):
            self.given(
                database,
                lambda tr: tr.get(self.KEY),
                lambda _: FoundationTransaction.commit(self.writing(database)),
            )
        assert self.given(database) is None

    def writing(self, database):
        tr = database.begin(timeout_s=TIMEOUT_S)
        tr.set(self.KEY, b"")
        return tr

    def test_what_others_have_written_since_is_a_conflict(self, database, cluster):
        other = FoundationDatabase.open(cluster.cluster_file)
        commit(other, lambda tr: tr.set(self.KEY, b"theirs"))
        with pytest.raises(Conflict):
            self.given(database, lambda tr: tr.add_read_conflict_key(self.KEY))
        other.close()

    def test_one_that_is_too_old_is_refused_and_asks_the_next_time(self, database):
        """As after a recovery of the cluster, which lets its versions jump by a hundred seconds."""
        old = max(database.committed[-1] - 50_000_000, 1)  # 50 s
        database.committed.clear()
        database.committed.append(old)
        retry = retry_on(database, b"read-versions/")
        with pytest.raises((TransactionTooOld, Conflict)):  # the latter in a cluster that is younger
            self.given(database, lambda tr: tr.add_read_conflict_key(self.KEY))
        database.recent_until = database.clock.monotonic() + 1
        assert retry(lambda tr: tr.set(self.KEY, b"again"), timeout_s=TIMEOUT_S) is None
        assert read(database, self.KEY) == b"again"

    def test_a_cluster_that_was_made_anew_counts_from_the_beginning(self, database, cluster):
        """With a version that is still to come, a transaction would see no conflict."""
        database.committed.append(database.committed[-1] + 10**12)
        self.given(database)
        other = FoundationDatabase.open(cluster.cluster_file)
        commit(other, lambda tr: tr.set(self.KEY, b"theirs"))
        with pytest.raises(Conflict):
            self.given(database, lambda tr: tr.add_read_conflict_key(self.KEY))
        other.close()

    def test_a_commit_that_a_signal_handler_interrupts_does_not_go_on(self, database):
        """The traceback refers to the transaction, which could still get the read version that it waits for."""
        calls = []

        class Waiting:
            def __getattr__(self, name):
                return lambda *_: calls.append(name)

            def commit(self):
                return self

            def wait(self):
                raise KeyboardInterrupt

        tr = database.begin(timeout_s=TIMEOUT_S)
        tr.set(self.KEY, b"x")
        tr._tr = Waiting()
        with pytest.raises(KeyboardInterrupt):
            tr.commit()
        assert calls[-1] == "reset"

    def test_threads_that_only_write_never_conflict(self, cluster):
        """A token that one has given back is the next one's, with a version that has seen its last commit."""
        database = FoundationDatabase.open(cluster.cluster_file)
        retry, lost = retry_on(database, b"read-versions/"), list[int]()

        def write():
            for number in range(100):
                retry(lambda tr: tr.set(self.KEY, b""), timeout_s=TIMEOUT_S, on_conflict=partial(lost.append, number))

        threads = [threading.Thread(target=write) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert lost == []
        database.close()
