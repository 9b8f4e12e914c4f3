"""The copies of a large dead letter, whose source may go while they are made."""

import random

from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase

from kombu_fdb.model import Publication
from kombu_fdb.routing.tables import Exchange, QueueDeclaration

GRAVES = ("one", "two", "three")


def test_a_copy_that_was_cut_short_is_begun_anew():
    """The message is acknowledged between two parts of its copy; its id comes again, from outside of the store."""
    bench = Bench(FaultyDatabase())
    bench.engine.queues.declare_exchange(Exchange("dlx", "fanout"))
    for grave in GRAVES:
        bench.engine.queues.declare(QueueDeclaration(grave))
        bench.engine.queues.bind(grave, "dlx", "")
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-dead-letter-exchange": "dlx"}))
    publication = Publication("", "q", random.Random(1).randbytes(4_000_000), message_id=b"m" * 16)
    bench.engine.publisher.publish([publication])
    (held,) = bench.take(1)
    acknowledge_at_commit(bench, 2, held.lease)
    assert bench.engine.messages.reject([held.lease]) == [False]
    assert len(bench.engine.upkeep.rows(bench.engine.keys.all_copies)) == 2
    bench.engine.publisher.bury_copy("q", publication)
    for grave in GRAVES:
        (letter,) = bench.take(9, grave)
        assert letter.payload == publication.payload


def acknowledge_at_commit(bench, number, lease):
    database, other, left = bench.database, bench.another(), [number]
    assert isinstance(database, FaultyDatabase)

    def hook():
        left[0] -= 1
        if not left[0]:
            database.before_commit = None
            assert other.messages.ack([lease]) == [True]

    database.before_commit = hook
