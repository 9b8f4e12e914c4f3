"""A store that can't be used, as a Celery or kombu user meets it: the right class of error, and the fix in its text."""

import pytest
from celery import Celery
from kit.disks import small_disk
from kombu import Connection, Queue
from kombu.exceptions import OperationalError

from kombu_fdb.errors import ClientUnusable, FormatError
from kombu_fdb.store.sqlite.database import SqliteDatabase

#: kombu tries to connect three times by default.
ONCE = {"max_retries": 1, "interval_start": 0, "interval_step": 0}


@pytest.fixture
def url(tmp_path):
    return f"fdb+sqlite:///{tmp_path}/broker.db"


def written_by_a_newer_version(url):
    with Connection(url) as connection:
        key = connection.default_channel.engine.keys.format
    database = SqliteDatabase.open(url.removeprefix("fdb+sqlite://"))
    tr = database.begin(timeout_s=5)
    tr.set(key, b"999")
    tr.commit()
    database.close()


def test_a_store_written_by_a_newer_version(url):
    written_by_a_newer_version(url)
    with Connection(url) as connection:
        with pytest.raises(FormatError, match="Upgrade celery-fdb"):
            connection.ensure_connection(max_retries=1)
        assert issubclass(FormatError, connection.channel_errors), "not to be retried: waiting does not help"


def test_delay_on_it(url):
    written_by_a_newer_version(url)
    app = Celery("bad", broker=url)
    with pytest.raises(FormatError, match="Upgrade celery-fdb"):
        app.send_task("anything", retry=False)


@pytest.mark.parametrize(
    ("name", "options", "error", "advice"),
    [
        ("missing/broker.db", ONCE, OperationalError, "mkdir"),
        ("notes.txt", ONCE, OperationalError, r"not a (SQLite )?database"),
        ("broker.db", {"sesion_ttl": 5}, ValueError, "session_ttl"),
    ],
)
def test_a_wrong_setting(tmp_path, name, options, error, advice):
    notes = tmp_path / "notes.txt"
    notes.write_text("not a database, " * 100)
    app = Celery("bad", broker=f"fdb+sqlite:///{tmp_path}/{name}")
    app.conf.broker_transport_options = options
    with pytest.raises(error, match=advice):
        app.send_task("anything", retry=False)
    assert notes.read_text().startswith("not a database")


def test_a_cluster_that_does_not_answer():
    """Within the deadline. A machine without FoundationDB's client says how to get it, as trying again is no use."""
    app = Celery("bad", broker="fdb://test:test@127.0.0.1:9")
    app.conf.broker_connection_timeout = 1
    with pytest.raises((OperationalError, ClientUnusable), match=r"doctor|fdbserver|libfdb_c|cluster") as raised:
        app.send_task("anything", retry=False)
    if isinstance(raised.value, ClientUnusable):
        assert "Install the package foundationdb-clients" in str(raised.value)


def test_a_full_disk_loses_nothing_and_work_goes_on(tmp_path):
    """Publishing is refused; what was confirmed is consumed, and when there is space again publishing works."""
    with small_disk(tmp_path / "disk", 24) as disk:
        publish_and_consume(f"fdb+sqlite:///{disk}/broker.db", disk / "ballast")


def publish_and_consume(url, ballast):
    confirmed = []
    with Connection(url) as connection, Connection(url) as consuming:
        producer = connection.Producer()
        queue = Queue("q")(connection.default_channel)
        queue.declare()
        ballast.write_bytes(bytes(12_000_000))
        with pytest.raises(connection.connection_errors, match=r"disk is full.*Free space"):
            for number in range(1000):
                producer.publish({"number": number, "data": "x" * 20_000}, routing_key="q")
                confirmed.append(number)
        ballast.unlink()
        producer.publish({"number": -1}, routing_key="q")
        seen = []

        def on_message(message):
            seen.append(message.payload["number"])
            message.ack()

        with consuming.Consumer([Queue("q")], on_message=on_message):
            while len(seen) < len(confirmed) + 1:
                consuming.drain_events(timeout=60)
    assert seen == [*confirmed, -1]
