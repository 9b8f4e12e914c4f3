"""What each verb asks of SQLite, exactly: which statements, and of how many rows each.

A number goes down, or there is a reason. Rows that one statement stores or deletes are written by one prepared
statement, without a way back to Python's compiler in between; each row still costs SQLite about 3 us, each page that it
stands on about 8.
"""

from itertools import groupby

import pytest
from kit.conformance.queue import Bench

from kombu_fdb.model import ClaimTerms, Publication
from kombu_fdb.routing.tables import Exchange
from kombu_fdb.store.sqlite.database import SqliteDatabase
from kombu_fdb.testing.clock import ManualClock

#: Message, counter, bell, version.
STORED = 4
#: The version and the counter, at once.
READ = "SELECT 1"


@pytest.fixture
def database(tmp_path):
    """Of which time stands still: it looks at the disk once."""
    database = SqliteDatabase.open(str(tmp_path / "broker.db"), clock=ManualClock())
    yield database
    database.close()


@pytest.fixture
def bench(database):
    bench = Bench(database)
    bench.warm_up()
    return bench


def statements(bench, verb):
    """As they come, those of one kind that follow each other with their number.

    Of ``INSERT`` and ``DELETE`` that is the number of rows: one prepared statement stores or deletes all of them.
    """
    assert isinstance(bench.database, SqliteDatabase)
    (writer,) = bench.database.file.connections()[-1:]
    told = []
    writer.set_trace_callback(lambda sql: told.append(sql.split()[0]))
    try:
        verb()
    finally:
        writer.set_trace_callback(None)
    counted = ((kind, len(list(same))) for kind, same in groupby(told))
    return [kind if kind in ("BEGIN", "COMMIT") else f"{kind} {number}" for kind, number in counted]


def tasks(number):
    return [Publication("", "q", b"a", task_id=f"t{each}") for each in range(number)]


def publish(bench, publications):
    return statements(bench, lambda: bench.engine.publisher.publish(publications))


def test_publish(bench):
    assert publish(bench, [Publication("", "q", b"a")]) == ["BEGIN", READ, f"INSERT {STORED}", "COMMIT"]
    assert publish(bench, tasks(1)) == ["BEGIN", READ, f"INSERT {STORED + 1}", "COMMIT"]


def test_publish_to_a_named_exchange(bench):
    bench.engine.queues.declare_exchange(Exchange("x", "direct"))
    bench.engine.queues.bind("q", "x", "k")
    batch = [Publication("x", "k", b"a")] * 100
    bench.engine.publisher.publish(batch)
    epoch_too = "SELECT 2"
    assert publish(bench, batch[:1]) == ["BEGIN", epoch_too, f"INSERT {STORED}", "COMMIT"]
    assert publish(bench, batch) == ["BEGIN", epoch_too, f"INSERT {100 + STORED - 1}", "COMMIT"]


def test_a_batch(bench):
    assert publish(bench, tasks(100)) == ["BEGIN", READ, f"INSERT {100 + 100 + STORED - 1}", "COMMIT"]


def test_claim_and_ack(bench):
    bench.engine.publisher.publish(tasks(30))
    held = []

    def claim():
        terms = ClaimTerms(acks=list(held))
        held[:] = [each.lease for each in bench.engine.messages.claim(bench.session, ["q"], 10, terms=terms)]

    # Session, mark and control, at once; the leases that are acknowledged; the head; counters.
    assert statements(bench, claim) == ["BEGIN", "SELECT 3", "DELETE 10", "INSERT 12", "COMMIT"]
    assert statements(bench, claim) == ["BEGIN", "SELECT 4", f"DELETE {20 + 10}", "INSERT 11", "COMMIT"]
    # The counter of the leased ones ends with them.
    ack = statements(bench, lambda: bench.engine.messages.ack(held))
    assert ack == ["BEGIN", "SELECT 2", f"DELETE {20 + 1}", "COMMIT"]
