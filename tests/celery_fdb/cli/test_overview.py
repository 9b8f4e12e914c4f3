import dataclasses

import pytest

from celery_fdb.inspection.overview import look


def view(overview, name):
    return next(queue for queue in overview.queues if queue.name == name)


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


def test_rates_are_measured_by_key(broker):
    jobs = broker.queue("jobs")
    jobs.put("a", key="alice")
    broker._engine.upkeep.flush_totals()
    before = look(broker, top_keys=1)
    jobs.put_many("bc", key="alice")
    jobs.put("d", key="bob")
    jobs.take(0).ack()
    broker._engine.upkeep.flush_totals()
    after = dataclasses.replace(look(broker, top_keys=1), taken_ms=before.taken_ms + 2000)
    assert after.key_rates(before) == {
        "jobs": {"alice": {"published": 1.0, "claimed": 0.5, "acked": 0.5}, "bob": {"published": 0.5}}
    }
    assert before.key_rates(before) == {}


def test_an_undeclared_queue_that_was_empty_has_the_rate_of_what_came_since(broker, monkeypatch):
    """Until something comes it is gone, and its totals are not: a duty forgets them, and here not meanwhile."""
    monkeypatch.setattr(type(broker._engine.upkeep), "trim_totals", lambda _upkeep: iter(()))
    jobs = broker.queue("jobs")
    jobs.put_many("abc", key="k")
    for job in jobs.take_many(3, 0):
        job.ack()
    broker._engine.upkeep.flush_totals()
    before = look(broker, top_keys=1)
    assert before.queues == []
    assert "jobs" not in str(before.as_json())
    jobs.put("d", key="k")
    broker._engine.upkeep.flush_totals()
    after = dataclasses.replace(look(broker, top_keys=1), taken_ms=before.taken_ms + 1000)
    rates = {"published": 1.0, "claimed": 0.0, "acked": 0.0}
    assert after.rates(before) == {"jobs": {**rates, "growth": 1.0}}
    assert after.key_rates(before) == {"jobs": {"k": rates}}


def test_a_queue_that_began_anew_has_no_negative_rate(broker):
    jobs = broker.queue("jobs")
    jobs.put_many("abc")
    broker._engine.upkeep.flush_totals()
    before = look(broker)
    jobs.drop()
    jobs.put("d")
    broker._engine.upkeep.flush_totals()
    after = dataclasses.replace(look(broker), taken_ms=before.taken_ms + 1000)
    assert after.rates(before)["jobs"]["published"] == 0
