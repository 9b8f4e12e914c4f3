"""Chords, without a worker: what one would do is done by hand, so that it can die, freeze or repeat itself."""

import logging
import time

import pytest
from celery import chain, chord, group, states
from celery.app.trace import build_tracer
from celery.exceptions import ChordError
from kombu.exceptions import OperationalError

from celery_fdb import brokers
from celery_fdb.results import backend as backend_module
from celery_fdb.results import chords
from celery_fdb.results.records import LAST_PLACE
from kombu_fdb.testing.clock import ManualClock


def run_all(app, received):
    """What a worker does with each, but without an ack."""
    for each in received:
        task = app.tasks[each.request.task]
        build_tracer(task.name, task, app=app)(each.id, each.args, each.kwargs, each.fields)


def header(app, number=3):
    return [app.tasks["add"].s(place, place) for place in range(number)]


def test_header_tasks_that_run_twice_publish_one_body(app, receive):
    chord(header(app))(app.tasks["total"].s())
    received = receive(app)
    run_all(app, received + received[:2])
    assert len(receive(app)) == 1
    run_all(app, received)
    assert receive(app) == []


@pytest.mark.parametrize("died", ["before the look", "before the body was published"])
@pytest.mark.parametrize("rescue", ["redelivery", "other worker"])
def test_a_worker_that_dies_with_the_last_part_loses_no_chord(
    app, backend, receive, clock_of_backend, died, rescue, scan
):
    result = chord(header(app))(app.tasks["total"].s())
    *others, last = receive(app)
    run_all(app, others)
    with pytest.MonkeyPatch.context() as dying:
        if died == "before the look":
            dying.setattr(backend, "on_chord_part_return", lambda *_: None)
        else:
            dying.setattr(backend, "publish_body", lambda *_: None)
        run_all(app, [last])
    assert receive(app) == []
    if rescue == "redelivery":
        run_all(app, others)
        run_all(app, [last])
    else:
        backend.tend()
        assert died == "before the look" or receive(app) == []
        clock_of_backend.advance(chords.CLAIM_MS / 1000)
        backend.tend()
    (body,) = receive(app)
    assert (body.id, body.args) == (result.id, [[0, 2, 4]])
    backend.tend()
    assert receive(app) == []
    result.parent.forget()
    assert scan(backend.store) == []


@pytest.mark.parametrize("knows", ["one", "none"])
@pytest.mark.parametrize("shape", ["task", "chain", "group", "chord"])
def test_an_abandoned_chord_is_left_to_a_worker_that_knows_its_body(make_app, receive, knows, shape):
    """Another application at the same store has another queue for it, and workers that discard it."""
    app, other = make_app(), make_app(task_default_queue="other")
    clock = app.backend._clock = other.backend._clock = ManualClock(wall_ms=time.time_ns() // 1_000_000)
    total, add = app.tasks["total"], app.tasks["add"]
    shapes = {
        "task": total.s,
        "chain": lambda: chain(total.s(), add.s(1)),
        "group": lambda: group(total.s(), total.s()),
        "chord": lambda: chord([total.s()], add.s(1)),
    }
    chord(header(app))(shapes[shape]())
    with pytest.MonkeyPatch.context() as dying:
        dying.setattr(app.backend, "publish_body", lambda *_: None)
        run_all(app, receive(app))
    other.tasks.pop("total")
    for _ in range(20):  # more often than every ten seconds no worker looks
        clock.advance(chords.CLAIM_MS / 1000)
        other.backend.tend()
    clock.advance(backend_module.LEFT_S)
    (app if knows == "one" else other).backend.tend()
    assert bool(receive(app)) is (knows == "one")
    with other.connection_for_read() as connection:
        connection.default_channel.queue_declare("other")
        assert (connection.default_channel.basic_get("other") is None) is (knows == "one")


def test_a_chord_whose_body_cannot_be_read_delays_no_other(app, backend, receive, clock_of_backend, caplog):
    """As one of another application that has another serializer. Its look comes first."""
    backend.store.open_chord("!", b"\x80\x04", 0)
    backend.store.enlarge_chord("!", size=0)
    result = chord(header(app))(app.tasks["total"].s())
    with pytest.MonkeyPatch.context() as dying:
        dying.setattr(backend, "publish_body", lambda *_: None)
        run_all(app, receive(app))
    clock_of_backend.advance(chords.CLAIM_MS / 1000)
    backend.tend()
    (body,) = receive(app)
    assert body.id == result.id
    assert "The body of chord ! can't be published by this worker" in caplog.text


def test_two_that_publish_at_the_same_time_publish_once(app, backend, receive):
    """A worker froze between its claim and the body; another took over; it thaws."""
    chord(header(app, 2))(app.tasks["total"].s())
    first, second = receive(app)
    run_all(app, [first])
    publish_body, callbacks = backend.publish_body, []
    backend.publish_body = lambda *arguments: callbacks.append(arguments)
    run_all(app, [second])
    join, results = backend._join, []

    def join_while_the_other_publishes(*arguments):
        results.append(join(*arguments))
        if len(results) == 1:
            publish_body(*callbacks[0])
        return results[-1]

    backend._join = join_while_the_other_publishes
    publish_body(*callbacks[0])
    assert results == [[0, 2], [0, 2]]
    assert len(receive(app)) == 1


@pytest.mark.parametrize("ignored", [False, True])
def test_a_part_whose_error_is_too_large_fails_the_chord(make_app, receive, ignored):
    app = make_app(result_backend_transport_options={"max_message_size": 5000})

    @app.task(name="fail", ignore_result=ignored)
    def fail():
        raise ValueError("y" * 5000)

    result = chord([fail.s(), app.tasks["add"].s(1, 1)])(app.tasks["total"].s())
    run_all(app, receive(app))
    with pytest.raises(ChordError, match="raised ResultTooLarge"):
        app.AsyncResult(result.id).get(timeout=5)


def test_results_that_are_ignored_still_make_a_chord(app, receive):
    signatures = [each.set(ignore_result=True) for each in header(app)]
    chord(signatures)(app.tasks["total"].s())
    received = receive(app)
    assert all(each.request.ignore_result for each in received)
    run_all(app, received)
    assert receive(app)[0].args == [[0, 2, 4]]


def test_large_results_of_a_header_are_stored_once(app, backend, receive, scan):
    chord(header(app, 2))(app.tasks["total"].s())
    for each in receive(app):
        backend.mark_as_done(each.id, "x" * 300_000, request=each.request)
    (body,) = receive(app)
    assert body.args == [["x" * 300_000] * 2]


def test_a_large_result_that_was_forgotten_fails_the_chord(app, backend, receive):
    result = chord(header(app, 2))(app.tasks["total"].s())
    first, second = receive(app)
    backend.mark_as_done(first.id, "x" * 300_000, request=first.request)
    app.AsyncResult(first.id).forget()
    backend.mark_as_done(second.id, 1, request=second.request)
    with pytest.raises(ChordError, match="forgotten"):
        result.get(timeout=5, follow_parents=False)


@pytest.mark.parametrize("state", [states.SUCCESS, states.FAILURE])
def test_a_state_that_a_part_sets_while_it_runs_counts_nothing(app, receive, state):
    """As with Redis: the part counts when its task returns, with what that returns."""

    @app.task(name="early", bind=True)
    def early(self):
        self.update_state(state=state, meta=ValueError("early") if state == states.FAILURE else 1)
        return 5

    chord([early.s(), app.tasks["add"].s(1, 1)])(app.tasks["total"].s())
    first, second = receive(app)
    run_all(app, [second, first])
    (body,) = receive(app)
    assert body.args == [[5, 2]]


def test_a_failed_part_fails_the_body(app, backend, receive, scan):
    result = chord(header(app))(app.tasks["total"].s().on_error(app.tasks["report"].s()))
    first, *others = receive(app)
    backend.mark_as_failure(first.id, ValueError("broken"), request=first.request)
    assert result.state == states.PENDING, "all have to return first"
    run_all(app, others)
    with pytest.raises(ChordError, match=r"Dependency .* raised ValueError\('broken'\)"):
        result.get(timeout=5, follow_parents=False)
    (errback,) = receive(app)
    assert errback.request.task == "report"
    run_all(app, others)
    assert receive(app) == []
    assert not [key for key in scan(backend.store) if b"chord" in key]


def test_a_body_that_can_not_be_published_fails(app, receive, monkeypatch):
    result = chord(header(app))(app.tasks["total"].s())
    received = receive(app)
    monkeypatch.setattr(backend_module, "publish_callback", lambda *_: 1 / 0)
    run_all(app, received)
    with pytest.raises(ChordError, match="Callback error: ZeroDivisionError"):
        result.get(timeout=5, follow_parents=False)


def test_results_that_no_message_holds_fail_the_body(make_app, receive):
    app = make_app(broker_transport_options={"max_message_size": 100_000})
    result = chord(header(app))(app.tasks["total"].s())
    for each in receive(app):
        app.backend.mark_as_done(each.id, "x" * 50_000, request=each.request)
    with pytest.raises(ChordError, match="message is too large"):
        result.get(timeout=5, follow_parents=False)


def test_a_broker_that_is_down_is_waited_for(app, backend, receive, clock_of_backend, monkeypatch):
    def fail(*_):
        raise OperationalError("down")

    chord(header(app))(app.tasks["total"].s())
    received = receive(app)
    with monkeypatch.context() as broken:
        broken.setattr(backend_module, "publish_callback", fail)
        run_all(app, received)
    assert receive(app) == []
    clock_of_backend.advance(chords.CLAIM_MS / 1000)
    backend.tend()
    assert len(receive(app)) == 1


def test_groups_inside_of_a_header_keep_their_shape(app, backend, receive, scan):
    add, total = app.tasks["add"], app.tasks["total"]
    result = chord([add.s(5, 5), chain(add.s(1, 1), group(add.s(2), add.s(3)))], total.s()).apply_async()
    first = receive(app)
    run_all(app, first)
    run_all(app, receive(app))
    (body,) = receive(app)
    assert (body.id, body.args) == (result.id, [[10, [4, 5]]])
    result.parent.forget()
    app.AsyncResult(first[1].id).forget()
    for each in result.parent.results[1]:
        each.forget()
    assert scan(backend.store) == []


@pytest.mark.parametrize("kind", ["group", "chain", "chord"])
def test_bodies_of_several_messages_are_published_at_once(app, backend, receive, kind):
    total, errback = app.tasks["total"], app.tasks["errback"]
    bodies = {
        "group": group([total.s(), total.s(), total.s()]),
        "chain": chain(total.s(), errback.s(), errback.s()),
        "chord": chord([total.s(), total.s()], errback.s()),
    }
    chord(header(app, 2), bodies[kind]).apply_async()
    received = receive(app)
    publish, published = backend.client.engine.publisher._publish, []

    def count(publications, *arguments, **options):
        published.append(len(publications))
        return publish(publications, *arguments, **options)

    backend.client.engine.publisher._publish = count
    run_all(app, received)
    assert published == [{"group": 3, "chain": 1, "chord": 2}[kind]]
    assert all(each.args == [[0, 2]] for each in receive(app))


def test_a_nested_chord_with_a_group_for_its_body_fails_the_outer_one(app, backend, receive):
    add, total = app.tasks["add"], app.tasks["total"]
    inner = chord(header(app, 2), group(add.s(1), add.s(2)))
    result = chord([inner, add.s(5, 5)])(total.s())
    first, second, other = receive(app)
    backend.mark_as_failure(first.id, ValueError("no"), request=first.request)
    run_all(app, [second, other])
    assert (result.state, receive(app)) == (states.FAILURE, [])


@pytest.mark.parametrize("shape", ["group", "task and group", "chord into a group", "group, task and group"])
def test_a_chain_that_would_end_in_a_group_fails_the_outer_chord(app, receive, shape):
    """Celery tells the chord of none of the group's members, which never run."""
    add, total, fail = app.tasks["add"], app.tasks["total"], app.tasks["errback"]

    def end():
        return group(add.s(1), add.s(2))

    shapes = {
        "group": lambda: chain(fail.si(), end()),
        "task and group": lambda: chain(fail.si(), add.s(1), end()),
        "chord into a group": lambda: chain(fail.si(), chord(header(app, 2), end())),
        "group, task and group": lambda: chain(group(fail.si(), add.s(3, 3)), total.s(), end()),
    }
    result = chord([shapes[shape](), add.s(5, 5)])(total.s())
    for each in receive(app):
        if each.request.task == fail.name:
            app.backend.mark_as_failure(each.id, ValueError("no"), request=each.request)
        else:
            run_all(app, [each])
    assert (result.state, receive(app)) == (states.FAILURE, [])


@pytest.mark.parametrize("shape", ["chain", "chain into a group"])
def test_a_chain_that_is_revoked_before_its_end_fails_the_outer_chord(app, receive, shape):
    """As does one that has expired: the rest of it never runs."""
    add, total, first = app.tasks["add"], app.tasks["total"], app.tasks["errback"]
    end = add.si(1, 1) if shape == "chain" else group(add.si(1, 1), add.si(2, 2))
    result = chord([chain(first.si(), end), add.s(5, 5)])(total.s())
    for each in receive(app):
        if each.request.task == first.name:
            app.backend.mark_as_revoked(each.id, "expired", request=each.request)
        else:
            run_all(app, [each])
    with pytest.raises(ChordError, match="TaskRevokedError"):
        app.AsyncResult(result.id).get(timeout=5)
    assert receive(app) == []


def test_who_waits_for_a_chord_gets_the_error_of_its_header(app, backend, receive):
    """Also if it comes between two looks: ``get`` asks for that of the parents when something has happened."""
    result = chord(header(app, 2))(app.tasks["total"].s())
    first, second = receive(app)
    run_all(app, [second])
    backend.mark_as_failure(first.id, ValueError("no"), request=first.request)
    assert result.state == states.FAILURE
    with pytest.raises(ValueError, match="no"):
        backend.wait_for_pending(result, timeout=60, on_interval=result._maybe_reraise_parent_error)
    with pytest.raises(ChordError):
        backend.wait_for_pending(result, timeout=60)


def test_slow_error_callbacks_are_called_once(app, backend, receive, clock_of_backend, monkeypatch):
    """Those with three arguments run here and now; another process takes the chord for abandoned after its claim."""
    monkeypatch.setattr(backend_module, "RENEW_S", 0.001)
    calls = []

    @app.task(name="slow")
    def slow(request, exc, traceback):
        calls.append(exc)
        for _ in range(3):
            clock_of_backend.advance(0.9 * chords.CLAIM_MS / 1000)
            look = backend.store.keys.look(clock_of_backend.wall_ms() + chords.CLAIM_MS, group_id)
            deadline = time.monotonic() + 60
            while backend.store._read(lambda tr, key=look: tr.get(key)) is None:
                assert time.monotonic() < deadline, "the claim was not renewed"
        backend.tend()

    result = chord(header(app, 2))(app.tasks["total"].s().on_error(app.tasks["slow"].s()))
    group_id = result.parent.id
    first, second = receive(app)
    backend.mark_as_failure(first.id, ValueError("no"), request=first.request)
    run_all(app, [second])
    assert (len(calls), result.state) == (1, states.FAILURE)


def test_each_part_prolongs_a_chord(make_app, receive, scan):
    app = make_app(result_expires=6)
    backend = app.backend
    backend._clock = clock = ManualClock(wall_ms=time.time_ns() // 1_000_000)
    add, total = app.tasks["add"], app.tasks["total"]
    shape = chain(add.si(1, 1), group(add.s(2), add.s(3)))
    result = chord([*header(app, 4), shape])(total.s())
    received = receive(app)
    for each in received:
        clock.advance(2)
        backend.store.sweep()
        run_all(app, [each])
    run_all(app, receive(app))
    (body,) = receive(app)
    assert (body.id, body.args) == (result.id, [[0, 2, 4, 6, [4, 5]]])
    clock.advance(20)
    backend.store.sweep()
    assert scan(backend.store) == []


def test_each_part_prolongs_the_large_results_of_the_others(make_app, receive):
    app = make_app(result_expires=6)
    backend = app.backend
    backend._clock = clock = ManualClock(wall_ms=time.time_ns() // 1_000_000)
    chord(header(app, 4))(app.tasks["total"].s())
    for each in receive(app):
        backend.mark_as_done(each.id, "x" * 100_000, request=each.request)
        clock.advance(4)
        backend.store.sweep()
    (body,) = receive(app)
    assert body.args == [["x" * 100_000] * 4]


def test_a_task_joins_its_chord(app, backend, receive):
    chord(header(app, 2))(app.tasks["total"].s())
    first, second = receive(app)
    joining = (
        app.tasks["add"]
        .s(7, 7)
        .set(group_id=first.request.group, group_index=None, chord=first.request.chord, task_id="joined")
    )
    backend.add_to_chord(first.request.group, joining.freeze())
    run_all(app, [first, second])
    assert receive(app) == []
    joining.delay()
    (third,) = receive(app)
    assert third.request.group_index in {None, LAST_PLACE}
    run_all(app, [third])
    assert receive(app)[0].args == [[0, 2, 14]]


def test_a_body_that_only_pickle_can_carry(make_app, receive):
    app = make_app(task_serializer="pickle", accept_content=["pickle", "json"], result_accept_content=["json"])
    chord(header(app, 2))(app.tasks["errback"].s({1, 2}))
    run_all(app, receive(app))
    assert list(receive(app)[0].args) == [[0, 2], {1, 2}]


def test_another_broker_gets_the_body_too(make_app, receive, tmp_path, scan):
    """Without a common transaction: published, then deleted."""
    app = make_app(backend=f"fdb+sqlite:///{tmp_path}/other.db")
    result = chord(header(app))(app.tasks["total"].s())
    received = receive(app)
    run_all(app, received)
    assert [each.args for each in receive(app)] == [[[0, 2, 4]]]
    run_all(app, received)
    assert receive(app) == []
    result.parent.forget()
    assert scan(app.backend.store) == []


def test_parts_that_return_at_the_same_time_are_not_late(app, backend, receive, caplog, monkeypatch):
    """Two workers: both parts are stored, and the second publishes the body before the first looks."""
    chord(header(app, 2))(app.tasks["total"].s())
    first, second = receive(app)
    look = backend.on_chord_part_return

    def look_after_the_other(*arguments, **options):
        monkeypatch.setattr(backend, "on_chord_part_return", look)
        run_all(app, [second])
        look(*arguments, **options)

    monkeypatch.setattr(backend, "on_chord_part_return", look_after_the_other)
    run_all(app, [first])
    assert len(receive(app)) == 1
    assert "is over or has expired" not in caplog.text


def test_a_part_that_comes_too_late_says_so(app, backend, receive, clock_of_backend, caplog, monkeypatch):
    # Ten days pass for all workers: else the session of this one would tell that the backend's clock is ahead.
    monkeypatch.setattr(brokers, "common_ms", lambda _sessions, own_ms: own_ms)
    caplog.set_level(logging.INFO, "celery_fdb.results.backend")
    chord(header(app))(app.tasks["total"].s())
    received = receive(app)
    clock_of_backend.advance(10 * 86_400)
    backend.cleanup()
    run_all(app, received)
    assert "is over or has expired" in caplog.text
    assert receive(app) == []
