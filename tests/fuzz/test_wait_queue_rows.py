"""One row of a wait queue of rivals is damaged, in its key or its value: those who wait go on, and get what comes.

The oracle. Looks, services, depositions, recoveries and the end of a session raise nothing but ``SessionLost``, and
a consumer that stands in the wait queue, and evicts a first one that does not serve, is served.
"""

from kit.conformance.queue import Bench
from kit.conformance.wait_queues import Rival
from kit.faults import FaultyDatabase
from store_rows import damage, telling

from kombu_fdb.engine.scheduling.wait_queue import ENDED, GRANTED
from kombu_fdb.keyspace.layout import range_of

SORTS = ("line", "demand", "served")
MOST_TURNS = 40


def test_a_damaged_row_of_a_wait_queue_stops_no_consumer(fuzz):
    def target(rng):
        bench, rivals = filled()
        row = rng.choice(rows_of(bench))
        damaged = damage(rng, bench, row)
        with telling(row, damaged):
            bench.put(b"new")
            wait(rivals[-1])
            end_all(bench, rivals)

    fuzz(target)


def filled():
    """A wait queue that has been served once."""
    bench = Bench(FaultyDatabase())
    rivals = [Rival(bench) for _ in range(4)]
    bench.put(b"a", b"b")
    rivals[0].serve()
    return bench, rivals


def rows_of(bench):
    keys = bench.engine.keys
    wholes = [(*range_of(keys._key(sort)), 0) for sort in SORTS]
    return [row for rows in bench.engine.transactions.read(lambda work: work.tr.get_ranges(wholes)) for row in rows]


def wait(rival):
    """Until it was served."""
    for _ in range(MOST_TURNS):
        sight = rival.look()
        if sight.stands == GRANTED or (sight.is_first and rival.serve(sight).deliveries):
            return
        if sight.stands == ENDED:
            rival.join()
        elif not sight.is_first:
            rival.engine.messages.evict(rival.demand, sight.first)
    raise AssertionError("no consumer serves it")


def end_all(bench, rivals):
    for each in rivals:
        each.collect()
        each.engine.messages.leave(each.demand)
        each.engine.sessions.recover(each.session, each.demand.first)
        each.engine.sessions.close(each.session)
    assert bench.counts()[2] == 0
