"""One row of a wait queue of competitors is damaged, in its key or its value: those who wait go on, and get what comes.

The oracle. Looks, services, depositions, recoveries and the end of a session raise nothing but ``SessionLost``, and
a consumer that stands in the wait queue, and evicts a first one that does not serve, is served.
"""

from kit.conformance.queue import Bench
from kit.conformance.wait_queues import Competitor
from kit.faults import FaultyDatabase
from store_rows import damage, telling

from kombu_fdb.engine.scheduling.wait_queue import ENDED, GRANTED
from kombu_fdb.keyspace.layout import range_of

SORTS = ("line", "demand", "served")
MOST_TURNS = 40


def test_a_damaged_row_of_a_wait_queue_stops_no_consumer(fuzz):
    def target(rng):
        bench, competitors = filled()
        row = rng.choice(rows_of(bench))
        damaged = damage(rng, bench, row)
        with telling(row, damaged):
            bench.put(b"new")
            wait(competitors[-1])
            end_all(bench, competitors)

    fuzz(target)


def filled():
    """A wait queue that has been served once."""
    bench = Bench(FaultyDatabase())
    competitors = [Competitor(bench) for _ in range(4)]
    bench.put(b"a", b"b")
    competitors[0].serve()
    return bench, competitors


def rows_of(bench):
    keys = bench.engine.keys
    wholes = [(*range_of(keys._key(sort)), 0) for sort in SORTS]
    return [row for rows in bench.engine.transactions.read(lambda work: work.tr.get_ranges(wholes)) for row in rows]


def wait(competitor):
    """Until it was served."""
    for _ in range(MOST_TURNS):
        sight = competitor.look()
        if sight.stands == GRANTED or (sight.is_first and competitor.serve(sight).deliveries):
            return
        if sight.stands == ENDED:
            competitor.join()
        elif not sight.is_first:
            competitor.engine.messages.evict(competitor.demand, sight.first)
    raise AssertionError("no consumer serves it")


def end_all(bench, competitors):
    for each in competitors:
        each.collect()
        each.engine.messages.leave(each.demand)
        each.engine.sessions.recover(each.session, each.demand.first)
        each.engine.sessions.close(each.session)
    assert bench.counts()[2] == 0
