"""SQLite's store on a small disk: it fills up, is emptied, and goes on."""

import os
import subprocess
from contextlib import closing

import pytest
from kit.conformance.store import commit, retry_on
from kit.disks import fill_queue, small_disk
from kombu import Connection, Exchange, Queue

from kombu_fdb.api.broker import Broker
from kombu_fdb.engine.metrics import samples
from kombu_fdb.engine.metrics.samples import SERIES, QueueSample, Sample
from kombu_fdb.errors import StoreError, StoreUnavailable
from kombu_fdb.process.client import close_clients
from kombu_fdb.store.retry import Retry
from kombu_fdb.store.sqlite.database import SqliteDatabase

HOUR = SERIES["hour"]

MB = 1024 * 1024
#: A disk that is full says so at once; on a busy machine everything else may take its time.
PATIENCE_S = 60.0
PATIENCE = dict.fromkeys(("connect_timeout", "operation_timeout", "publish_timeout"), PATIENCE_S)


@pytest.fixture(params=[3, 8, 16], ids="{} MB".format)
def disk(tmp_path, request):
    """A file system of its own."""
    with small_disk(tmp_path / "disk", request.param) as disk:
        yield disk
        close_clients()


def fill(database, size=20_000):
    """Until it is full; what was confirmed."""
    stored = []
    with pytest.raises(StoreUnavailable, match=r"disk is full.*Free space on the file system of"):
        while True:
            key = b"%06d" % len(stored)
            commit(database, lambda tr, key=key: (tr.fill(), tr.set(key, bytes(size))))
            stored.append(key)
    return stored


def work_off(queue, number):
    """So many messages; then there is room again."""
    for _ in range(number):
        job = queue.take(timeout=PATIENCE_S)
        assert job is not None
        job.ack()
    queue.put(b"again")


def keys(database):
    return [key for key, _ in commit(database, lambda tr: tr.get_range(b"0", b"9"))]


def test_a_disk_that_messages_filled_is_emptied_and_filled_again(disk):
    """It used to end for good where the log had grown to all that was left."""
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        for _ in range(3):
            stored = fill(database)
            assert keys(database) == stored
            for key in stored:
                commit(database, lambda tr, key=key: (tr.clear(key), tr.add(b"done", 1)))
            assert keys(database) == []


def test_much_of_a_small_disk_is_for_messages(disk):
    size = os.statvfs(disk).f_blocks * os.statvfs(disk).f_frsize
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        assert len(fill(database)) * 20_000 > size / 4


def test_a_full_disk_is_read_and_opened_by_others(disk):
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        stored = fill(database)
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        assert keys(database) == stored
        for key in stored[:5]:
            clear(database, key)
        commit(database, lambda tr: tr.set(b"again", bytes(20_000)))


def test_space_that_others_free_is_found_without_a_restart(disk):
    size = os.statvfs(disk).f_blocks * os.statvfs(disk).f_frsize
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(size // 2))
        stored = fill(database)
        assert keys(database) == stored
        ballast.unlink()
        commit(database, lambda tr: tr.set(b"after", bytes(20_000)))
        more = fill(database)
        assert len(more) > len(stored)


def test_acks_on_a_disk_that_others_filled(disk):
    """As far as the room in SQLite's log reaches, which has been used once."""
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        for number in range(40):
            put(database, b"%06d" % number)
        for _ in range(400):  # the log reaches its size, and begins anew
            commit(database, lambda tr: tr.set(b"again", os.urandom(20_000)))
        take_all(disk / "ballast")
        for number in range(5):
            clear(database, b"%06d" % number)
        (disk / "ballast").unlink()
        commit(database, lambda tr: tr.set(b"after", bytes(20_000)))


def test_a_disk_that_others_filled_while_the_file_grew_is_emptied(disk):
    """The log could not be copied, as it takes space to make the file grow."""
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        stored = [b"%06d" % number for number in range(60)]
        for key in stored:
            put(database, key)
        take_all(disk / "ballast")
        for key in stored:
            clear(database, key)
            take_all(disk / f"ballast-{key!r}")
        assert keys(database) == []


def test_a_store_is_opened_on_a_disk_that_others_filled(disk):
    """It needs a log and an index of it."""
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        put(database, b"000001")
    take_all(disk / "ballast")
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        clear(database, b"000001")
        assert keys(database) == []


def test_no_more_space_is_held_than_a_copy_of_the_log_takes(disk):
    held = []
    for number in (60, 1):  # who closes the file last copies the log
        with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
            for each in range(number):
                put(database, b"%06d" % each)
                held.append((disk / "b.db-lock").stat().st_size)
    assert max(held) > held[-1] > 0


def test_space_is_held_in_no_file_that_took_the_locks_descriptor(tmp_path):
    """While a database is closed, its helper may close the lock's descriptors before the last writer has ended."""
    with closing(SqliteDatabase.open(str(tmp_path / "b.db"))) as database:
        commit(database, lambda tr: tr.set(b"a", bytes(50_000)))
        file = database.file
        assert file._writer is not None
        file.lock.close_files()
        others = [(tmp_path / str(number)).open("wb+") for number in range(2)]
        file.space.bound(file._writer, 0.0)
        assert [os.fstat(each.fileno()).st_size for each in others] == [0, 0]
        for each in others:
            each.close()
    assert (tmp_path / "b.db-lock").stat().st_size > 0


def put(database, key):
    commit(database, lambda tr: tr.set(key, bytes(5_000)))


def clear(database, key):
    commit(database, lambda tr: tr.clear(key))


def take_all(path):
    with path.open("wb", buffering=0) as ballast:
        for size in (65536, 4096):
            try:
                while ballast.write(bytes(size)) == size:
                    pass
            except OSError:
                pass


@pytest.mark.timeout(600)
def test_workers_empty_a_full_broker(disk):
    with Broker.open(f"fdb+sqlite:///{disk}/b.db", **PATIENCE) as broker:
        queue = broker.queue("q")
        work_off(queue, fill_queue(queue, 20_000))
        assert queue.count() == 1


def test_the_reserve_is_not_for_who_fills_the_file(disk):
    """Half of it is for transactions that only write, so that a process can start; half for those that also clear."""

    def put(tr, *keys):
        for key in keys:
            tr.set(key, bytes(65_000))

    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        stored = fill(database, 1_000)
        with pytest.raises(StoreUnavailable, match="disk is full"):
            commit(database, lambda tr: (tr.fill(), tr.clear(stored[0]), put(tr, b"a")))
        commit(database, lambda tr: put(tr, b"a"))
        with pytest.raises(StoreUnavailable, match="disk is full"):
            commit(database, lambda tr: put(tr, b"b", b"c"))
        commit(database, lambda tr: (tr.clear(stored[0]), put(tr, b"b", b"c")))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("disk", "size"), [(3, 100), (3, 1_200)], indirect=["disk"])
def test_a_consumer_starts_on_a_disk_full_of_small_messages(disk, size):
    """Its session, its role and its declarations need pages, too."""
    url = f"fdb+sqlite:///{disk}/b.db"
    with Broker.open(url, **PATIENCE) as broker:
        fill_queue(broker.queue("q"), size)
    close_clients()
    with Connection(url, transport_options=PATIENCE) as connection:
        reply = Queue("reply", Exchange("control", "fanout"), message_ttl=300, expires=10, auto_delete=True)
        with connection.Consumer([reply], on_message=lambda message: message.ack()):
            connection.Producer().publish("hello", exchange="control")
            connection.drain_events(timeout=PATIENCE_S)
    with Broker.open(url, **PATIENCE) as broker:
        work_off(broker.queue("q"), broker.queue("q").count())


def test_a_deletion_on_a_full_disk_waits_for_a_reader(disk, monkeypatch):
    """A reader keeps the log from beginning anew; an ack at that moment used to fail."""
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        retry, refused = retry_on(database, b"token/"), []
        stored = fill(database)
        reader = database.begin(timeout_s=PATIENCE_S, read_only=True)
        reader.get(stored[0])

        def finish(*_):
            refused.append(True)
            reader.cancel()
            return True

        monkeypatch.setattr(Retry, "_pause", finish)
        for key in stored:
            retry(lambda tr, key=key: (tr.clear(key), tr.add(b"done", 1)), timeout_s=PATIENCE_S)
        assert keys(database) == []
        assert refused, "the reader was not in the way, so this shows nothing"


def test_a_publication_on_a_full_disk_is_refused_at_once(disk, monkeypatch):
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        retry = retry_on(database, b"token/")
        fill(database)
        monkeypatch.setattr(Retry, "_pause", lambda *_: pytest.fail("it was tried again"))
        with pytest.raises(StoreUnavailable, match="disk is full"):
            retry(lambda tr: (tr.fill(), tr.set(b"more", bytes(60_000))), timeout_s=PATIENCE_S)


def test_a_full_disk_is_purged(disk):
    """In one go, not message by message."""
    with Broker.open(f"fdb+sqlite:///{disk}/b.db", **PATIENCE) as broker:
        queue = broker.queue("q")
        for size in (20_000, 3_000):
            stored = fill_queue(queue, size)
            assert queue.purge() == stored
        queue.put(b"again")
        assert queue.count() == 1


@pytest.mark.parametrize("disk", [3], indirect=True)
def test_pages_that_are_freed_fill_the_reserve_first(disk):
    """Else those who clear would take the reserve, and those who fill what they free, page by page."""
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        stored = fill(database)
        moved = [b"moved%d" % number for number in range(6)]
        commit(database, lambda tr: (tr.clear(stored[0]), *(tr.set(key, bytes(20_000)) for key in moved)))
        commit(database, lambda tr: tr.clear(stored[1]))
        with pytest.raises(StoreUnavailable, match="disk is full"):
            commit(database, lambda tr: (tr.fill(), tr.set(b"new", bytes(15_000))))
        commit(database, lambda tr: [tr.clear(key) for key in stored[2:20]])
        commit(database, lambda tr: (tr.fill(), tr.set(b"new", bytes(15_000))))


@pytest.mark.parametrize("disk", [3], indirect=True)
def test_messages_that_die_with_a_long_story_take_no_page_from_those_that_start(disk):
    """Each dead letter is larger than the message was: it used to take the whole reserve, and all claims failed."""
    url = f"fdb+sqlite:///{disk}/b.db"
    with Broker.open(url, **PATIENCE) as broker:
        queue = broker.queue("q")
        left = fill_queue(queue, 1_000)
        with pytest.raises(StoreError, match="disk is full"):
            while job := queue.take(timeout=PATIENCE_S):
                job.bury(error="y" * 2_000)
                left -= 1
    close_clients()
    with Broker.open(url, **PATIENCE) as broker:
        work_off(broker.queue("q"), left)
        assert broker.queue("q.dead").purge()


@pytest.fixture
def full(disk):
    """A broker that messages have filled to the reserve."""
    with Broker.open(f"fdb+sqlite:///{disk}/b.db", **PATIENCE) as broker:
        for size in (20_000, 100):
            fill_queue(broker.queue("q"), size)
        yield broker


@pytest.mark.parametrize("disk", [3], indirect=True)
def test_samples_take_no_page_of_the_reserve(full):
    """One each quarter of a minute took all of it in some minutes, and then no consumer could start."""
    engine = full.queue("q")._engine
    queues = {f"queue-{number:03}": QueueSample(1, 2, 3, 4, {}) for number in range(50)}
    with pytest.raises(StoreError, match="disk is full"):
        for moment in range(HOUR.slots):
            later = Sample(moment * HOUR.step_s * 1000, queues)
            engine.transactions.write(lambda work, later=later: samples.write(work, [HOUR], later))
    for number in range(50):
        full.declare(f"queue-{number:03}")


@pytest.mark.parametrize("disk", [3], indirect=True)
def test_results_that_wait_for_a_day_take_no_page_of_the_reserve(full):
    """Those of ``rpc://`` that are never fetched; the replies to a remote control are soon gone."""
    full.declare("result", arguments={"x-message-ttl": 86_400_000, "x-expires": 86_400_000})
    full.declare("reply", arguments={"x-message-ttl": 300_000, "x-expires": 10_000})
    with pytest.raises(StoreError, match="disk is full"):
        full.queue("result").put(b"x" * 6_000)
    full.queue("reply").put(b"x" * 6_000)


@pytest.mark.parametrize("disk", [3], indirect=True)
def test_a_disk_without_inodes_says_so(disk):
    """There is none for the log: the advice used to be to change the rights of the file."""
    subprocess.run(["mount", "-o", "remount,nr_inodes=6", str(disk)], check=True)
    with pytest.raises(StoreUnavailable, match=r"disk is full.*no inode left"):
        SqliteDatabase.open(str(disk / "b.db"))
    subprocess.run(["mount", "-o", "remount,nr_inodes=100", str(disk)], check=True)
    with closing(SqliteDatabase.open(str(disk / "b.db"))) as database:
        commit(database, lambda tr: tr.set(b"after", b""))
