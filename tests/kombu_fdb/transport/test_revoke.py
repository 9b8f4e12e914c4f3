"""``revoke`` of a waiting task acts in the store, with no worker running."""

import pickle

import pytest
from celery import Celery, chord
from celery.exceptions import ChordError, TaskRevokedError


def depth(broker):
    counts = broker.queue("q").stats()
    return counts.ready + counts.delayed


def test_a_revoked_task_is_gone_from_the_store(app, broker):
    kept = app.tasks["send"].delay()
    later = app.tasks["send"].apply_async(countdown=3600)
    later.revoke()
    assert later.state == "REVOKED"
    assert kept.state == "PENDING"
    assert depth(broker) == 1


def test_several_ids_and_true_counts(app, broker):
    ids = [app.tasks["send"].delay().id for _ in range(3)]
    assert app.control.cancel([*ids, "unknown"]) == 3
    assert app.control.cancel(ids) == 0
    assert depth(broker) == 0


def test_what_a_worker_holds_is_left_to_it(app, broker):
    sent = app.tasks["send"].delay()
    job = broker.queue("q").take(0)
    assert app.control.cancel(sent.id) == 0
    assert sent.state == "PENDING"
    job.ack()


def test_revoking_on_certain_workers_leaves_the_store_alone(app, broker):
    sent = app.tasks["send"].delay()
    app.control.revoke(sent.id, destination=["one@host"])
    assert depth(broker) == 1


def test_a_chord_hears_of_its_revoked_part(app, broker, monkeypatch):
    told = []
    monkeypatch.setattr(app.backend, "on_chord_part_return", lambda request, state, result: told.append(state))
    header = [app.tasks["send"].s(1), app.tasks["send"].s(2)]
    result = chord(header)(app.tasks["send"].s())
    result.parent[0].revoke()
    assert told == ["REVOKED"]


@pytest.mark.parametrize("held", [False, True])
def test_a_chord_of_our_own_backend_fails_with_its_revoked_part(url, broker, held):
    """``held``: a worker that has it, and dies, was told before. It has stored the state, and counted nothing."""
    app = Celery(broker=url, backend=url, set_as_current=False, control="celery_fdb.control:Control")

    @app.task(name="send", shared=False)
    def send(*args):
        return args

    result = chord([send.s(1), send.s(2)])(send.s())
    if held:
        job = broker.queue("celery").take(0)
        app.backend.mark_as_revoked(result.parent[0].id, "revoked")
        job.release()
    for part in result.parent:
        part.revoke()
        with pytest.raises(TaskRevokedError):
            part.get(timeout=10)
    with pytest.raises(ChordError, match="TaskRevokedError"):
        result.get(timeout=10, follow_parents=False)
    app.pool.force_close_all()
    app.close()


@pytest.mark.parametrize(("reported", "state"), [(True, "FAILURE"), (False, "REVOKED")])
def test_a_dead_letter_keeps_the_result_that_was_reported(app, broker, reported, state):
    """Its chord was told then. If its worker died each time, no result was."""
    sent = app.tasks["send"].delay()
    broker.queue("q").take(0).bury()
    if reported:
        app.backend.mark_as_failure(sent.id, ValueError("broken"))
    assert app.control.cancel(sent.id) == 1
    assert sent.state == state


def test_a_body_that_the_app_does_not_accept_is_not_decoded(app, broker, monkeypatch, caplog):
    monkeypatch.setattr(pickle, "loads", lambda *_, **__: pytest.fail("unpickled"))
    sent = app.tasks["send"].apply_async((1,), serializer="pickle")
    assert app.control.cancel(sent.id) == 1
    assert sent.state == "REVOKED"
    assert "its chord is not updated" in caplog.text


def test_a_message_that_is_no_task_has_no_result(app, broker):
    with app.connection_for_write() as connection:
        connection.SimpleQueue("q").put("text", message_id="m1")
    assert app.control.cancel("m1") == 1
    assert app.AsyncResult("m1").state == "PENDING"


def test_another_broker_is_celerys_business():
    app = Celery(broker="memory://", set_as_current=False, control="celery_fdb.control:Control")
    assert app.control.cancel("unknown") == 0
    app.control.revoke("unknown")
    app.close()
