"""What a session says of itself, what it owns, and what ends with it."""

import pytest

from kombu_fdb.engine import session, topology
from kombu_fdb.errors import QueueNotFound, SessionLost, StoreFull
from kombu_fdb.routing.tables import QueueDeclaration


def end(bench):
    assert bench.engine.sessions.fence(bench.session, bench.beats()[bench.session])
    bench.engine.sessions.release(bench.session)
    assert not bench.engine.sessions.forget_part(bench.session)


def test_where_there_is_no_room_for_what_it_consumes_it_says_only_that_it_lives(bench, monkeypatch):
    real = session.beat

    def refuse(work, session_id, ttl_s, consumed, most):
        if consumed:
            raise StoreFull
        return real(work, session_id, ttl_s, consumed, most)

    monkeypatch.setattr(session, "beat", refuse)
    before = bench.beats()[bench.session]
    assert bench.engine.sessions.beat(bench.session, ttl_s=7.0, consumed=["q"])
    ((of, beat, ttl_s),) = bench.engine.sessions.beats()
    assert (of, ttl_s, session.consumed_of(beat)) == (bench.session, 7.0, [])
    assert beat != before


def test_queues_whose_names_fit_into_no_beat_do_not_stop_it(bench):
    """100 names of 255 bytes are allowed, and JSON takes six for each control character."""
    before = bench.beats()[bench.session]
    assert bench.engine.sessions.beat(bench.session, consumed=[f"{number:055}" + "\x01" * 200 for number in range(100)])
    assert bench.beats()[bench.session] != before


def test_a_queue_with_an_owner_ends_with_it_though_it_never_consumed(bench):
    bench.engine.queues.declare(QueueDeclaration("own", exclusive=True), owner=(bench.session, "tag"))
    bench.engine.queues.remove_consumer(bench.session, "own", "another")
    assert "own" in bench.engine.inspect.queues()
    end(bench)
    assert "own" not in bench.engine.inspect.queues()


@pytest.mark.parametrize("consumed", [False, True])
def test_a_queue_that_the_next_session_has_declared_outlives_the_last_one(bench, *, consumed):
    """A client whose session was ended by others goes on before its entries are dropped, and consumes later."""
    declaration, session_id = QueueDeclaration("own", exclusive=True, auto_delete=True), bench.session
    bench.engine.queues.declare(declaration, owner=(session_id, f"{topology.OWNER}1"))
    if consumed:
        bench.engine.queues.add_consumer(session_id, "own", "tag")
    assert bench.engine.sessions.fence(session_id, bench.beats()[session_id])
    following = bench.engine.sessions.open({})
    bench.engine.queues.declare(declaration, owner=(following, f"{topology.OWNER}2"))
    bench.engine.sessions.release(session_id)
    bench.engine.sessions.forget_part(session_id)
    bench.engine.queues.add_consumer(following, "own", "tag", declared=True)
    bench.engine.queues.remove_consumer(following, "own", "tag")
    assert "own" not in bench.engine.inspect.queues()


def test_an_owner_that_was_fenced_gets_no_queue(bench):
    end(bench)
    with pytest.raises(SessionLost):
        bench.engine.queues.declare(QueueDeclaration("own", exclusive=True), owner=(bench.session, "tag"))
    assert "own" not in bench.engine.inspect.queues()


def test_a_fenced_session_adds_no_consumer(bench):
    """Nothing would remove it any more, and an auto-delete queue would stay for ever."""
    bench.engine.queues.declare(QueueDeclaration("own", auto_delete=True))
    end(bench)
    with pytest.raises(SessionLost):
        bench.engine.queues.add_consumer(bench.session, "own", "tag")
    assert bench.engine.queues.delete("own", if_unused=True) == 0


def test_a_temporary_queue_that_has_vanished_gets_no_consumer(bench):
    with pytest.raises(QueueNotFound, match="Declare it again"):
        bench.engine.queues.add_consumer(bench.session, "own", "tag", declared=True)
    bench.engine.queues.add_consumer(bench.session, "own", "tag")


def test_a_session_with_many_consumers_is_forgotten_in_parts(bench):
    for number in range(120):
        bench.engine.queues.declare(QueueDeclaration(f"q{number}", exclusive=True), owner=(bench.session, "tag"))
    end(bench)
    assert bench.engine.inspect.queues() == {}
