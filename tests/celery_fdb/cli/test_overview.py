import dataclasses
import json
import os

import pytest

from celery_fdb.inspection.overview import look, look_at_keys
from kombu_fdb.errors import QueueNotFound


def view(overview, name):
    return next(queue for queue in overview.queues if queue.name == name)


def test_an_empty_broker_has_nothing_to_show(broker):
    overview = look(broker)
    assert (overview.queues, overview.sessions) == ([], [])
    assert overview.total("ready") == 0


def test_messages_are_shown_by_state_with_the_dead_beside_their_queue(broker):
    jobs = broker.declare("jobs", arguments={"x-max-length": 100})
    jobs.put_many(["a", "b", "c"])
    jobs.put("later", delay=3600)
    jobs.take(0).bury()
    jobs.take(0)
    queue = view(look(broker), "jobs")
    assert (queue.ready, queue.delayed, queue.leased, queue.dead) == (1, 1, 1, 1)
    assert (queue.declared, queue.arguments) == (True, {"x-max-length": 100})
    assert view(look(broker), "jobs.dead").dead_of == "jobs"
    assert [each.name for each in look(broker).live_queues] == ["jobs"]


def test_a_queue_of_which_only_dead_letters_are_left_is_shown(broker):
    jobs = broker.queue("jobs")
    jobs.put("a")
    jobs.take(0).bury()
    assert view(look(broker), "jobs").dead == 1


@pytest.mark.parametrize("key", ["", "alice"])
def test_the_oldest_message_counts_whatever_its_priority(broker, key):
    jobs = broker.queue("jobs")
    jobs.put("old", key=key, priority=0)
    first = look(broker)
    assert view(first, "jobs").oldest_age_s < 60
    published_ms = first.taken_ms - 1000 * view(first, "jobs").oldest_age_s
    jobs.put("new", priority=9)
    second = look(broker)
    assert second.taken_ms - 1000 * view(second, "jobs").oldest_age_s == pytest.approx(published_ms, abs=1)


def test_an_empty_queue_has_no_age(broker):
    broker.queue("jobs").put("later", delay=3600)
    assert view(look(broker), "jobs").oldest_age_s is None


def test_sessions_say_who_they_are_and_what_they_hold(broker):
    jobs = broker.queue("jobs")
    jobs.put_many(["a", "b"])
    jobs.take_many(2, 0)
    (session,) = look(broker, held=True).sessions
    assert (session.pid, session.open, session.leased) == (os.getpid(), True, 2)
    assert session.ttl_s == 30
    assert look(broker).sessions[0].leased is None


def test_keys_come_longest_first_and_over_many_pages(broker, monkeypatch):
    jobs = broker.queue("jobs")
    for number in range(7):
        jobs.put_many(["x"] * (number + 1), key=f"k{number}")
    jobs.limit("idle", paused=True)
    page = broker._engine.inspect.key_page
    monkeypatch.setattr(
        broker._engine.inspect, "key_page", lambda queue, *, limit, **kept: page(queue, limit=min(limit, 3), **kept)
    )
    found = look_at_keys(broker, "jobs")
    assert [(key, each.ready) for key, each in found.items()] == [
        *((f"k{n}", n + 1) for n in range(6, -1, -1)),
        ("idle", 0),
    ]
    assert found["idle"].limits.paused
    assert [*look_at_keys(broker, "jobs", top=2)] == ["k6", "k5"]
    assert [*view(look(broker, top_keys=1), "jobs").keys] == ["k6"]


def test_an_unknown_queue_is_refused(broker):
    with pytest.raises(QueueNotFound, match="nosuch"):
        look(broker, queues=["nosuch"])


def test_rates_are_measured_between_two_looks(broker):
    jobs = broker.queue("jobs")
    jobs.put("a")
    broker._engine.metrics.flush()
    before = look(broker)
    jobs.put_many("bcd")
    for job in jobs.take_many(2, 0):
        job.ack()
    broker._engine.metrics.flush()
    after = dataclasses.replace(look(broker), taken_ms=before.taken_ms + 2000)
    assert after.rates(before) == {"jobs": {"published": 1.5, "claimed": 1.0, "acked": 1.0, "growth": 0.5}}
    assert before.rates(before) == {}


def test_rates_are_measured_by_key(broker):
    jobs = broker.queue("jobs")
    jobs.put("a", key="alice")
    broker._engine.metrics.flush()
    before = look(broker, top_keys=1)
    jobs.put_many("bc", key="alice")
    jobs.put("d", key="bob")
    jobs.take(0).ack()
    broker._engine.metrics.flush()
    after = dataclasses.replace(look(broker, top_keys=1), taken_ms=before.taken_ms + 2000)
    assert after.key_rates(before) == {
        "jobs": {"alice": {"published": 1.0, "claimed": 0.5, "acked": 0.5}, "bob": {"published": 0.5}}
    }
    assert before.key_rates(before) == {}


def test_a_queue_that_began_anew_has_no_negative_rate(broker):
    jobs = broker.queue("jobs")
    jobs.put_many("abc")
    broker._engine.metrics.flush()
    before = look(broker)
    jobs.drop()
    jobs.put("d")
    broker._engine.metrics.flush()
    after = dataclasses.replace(look(broker), taken_ms=before.taken_ms + 1000)
    assert after.rates(before)["jobs"]["published"] == 0


def test_all_of_it_is_json_without_secrets(broker, url):
    broker.queue("jobs").put("a", key="k")
    text = json.dumps(look(broker, top_keys=3).as_json())
    assert json.loads(text)["queues"][0]["keys"][0]["key"] == "k"
    if url.startswith("fdb://"):
        assert url.partition("@")[0].rpartition(":")[2] not in text
