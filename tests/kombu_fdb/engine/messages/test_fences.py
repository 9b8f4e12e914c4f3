"""What is done in the name of a session that was fenced leaves nothing in its name: each verb, late and in between."""

from contextlib import suppress
from itertools import count

import pytest
from kit.conformance.invariants import check_counts, check_whereabouts
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase
from kit.whole.stage import Sizes, Stage, store_of
from kit.whole.verbs import WRITES

from kombu_fdb.errors import QueueNotFound, SessionLost
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.routing.tables import QueueDeclaration


@pytest.fixture(scope="module")
def store():
    return store_of(Sizes(messages=3, keys=2, bindings=2, consumers=2, queues=2))


def end(stage):
    """What the sweep of another process does with the session of the one that acts."""
    sessions = stage.observer.sessions
    for session, beat, _ in sessions.beats():
        if session == stage.session:
            assert sessions.fence(session, beat)
    sessions.leave_role("promoter", stage.session)
    sessions.release(stage.session)


def rows_in_its_name(stage):
    found = stage.observer.upkeep.rows(range_of(stage.keys.prefix))
    forms = {stage.session, stage.session.replace(b"\x00", b"\x00\xff")}  # in a value, and packed into a key
    return [row for row in found if any(form in part for form in forms for part in row)]


@pytest.mark.parametrize("name", WRITES)
def test_a_session_that_was_fenced_leaves_nothing_in_its_name(store, name):
    """It is fenced before the verb, just before each of its commits, and behind it."""
    for commits in count(-1):
        stage, left = Stage(store), [commits]

        def fence(stage=stage, left=left):
            left[0] -= 1
            if left[0] < 0:
                stage.database.before_commit = None
                end(stage)

        stage.database.before_commit = fence
        if commits < 0:
            fence()
        with suppress(SessionLost, QueueNotFound):
            WRITES[name](stage)
        is_over = stage.database.before_commit is not None
        if is_over:
            stage.database.before_commit = None
            end(stage)
        assert rows_in_its_name(stage) == [], f"behind {commits} commits"
        check_counts(stage.observer)
        check_whereabouts(stage.observer)
        if is_over:
            break


def test_its_late_cancel_deletes_no_queue_that_another_process_has_declared_since():
    bench = Bench(FaultyDatabase())
    vanishing = QueueDeclaration("vanishing", auto_delete=True)
    bench.engine.queues.declare(vanishing, owner=(bench.session, "tag"))
    bench.engine.sessions.close(bench.session)
    bench.engine.queues.declare(vanishing)
    with suppress(SessionLost):
        bench.engine.queues.remove_consumer(bench.session, "vanishing", "tag")
    assert bench.engine.inspect.queue("vanishing") is not None
