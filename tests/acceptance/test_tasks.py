"""The task side with real processes: claims for free slots, two beats."""

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.mark.parametrize("late", [True, False])
def test_a_busy_worker_leaves_the_rest_to_a_free_one(broker, app, start, until, monkeypatch, late):
    """Celery's own prefetch would keep some of them behind the long task."""
    monkeypatch.setenv("ACCEPTANCE_FREE_SLOTS", "1")
    if not late:
        monkeypatch.setenv("ACCEPTANCE_EARLY", "1")
    busy = start("-c", "1", "--prefetch-multiplier", "4", name="busy")
    app.hold.delay("long")
    until(lambda: broker.marks("start", "long"), say=busy.log.read_text)
    for number in range(12):
        app.note.delay(f"n{number}")
    start("-c", "1", "--prefetch-multiplier", "4", name="free")
    until(lambda: len(broker.marks("run")) == 12, say=lambda: broker.count("run"))
    assert not broker.marks("end", "long")
    broker.allow("long")
    until(lambda: broker.marks("end", "long"))
    app.note.delay("after")
    until(lambda: broker.marks("run", "after"))


def test_slots_that_become_free_are_used(broker, app, start, until, monkeypatch):
    monkeypatch.setenv("ACCEPTANCE_FREE_SLOTS", "1")
    start("-c", "2")
    for number in range(50):
        app.note.delay(f"n{number}")
    until(lambda: len(broker.marks("run")) == 50, say=lambda: broker.count("run"))


def test_two_beats_publish_one_message_per_tick(app, launch, until):
    """Never two of one tick, although both send all of them."""
    beats = [launch(f"beat{n}", "beat", "-S", "celery_fdb.beat.Scheduler", "-s", f"schedule{n}") for n in range(2)]

    def ticks(beat):
        return int(beat.log.read_text().count("Sending due task"))

    until(lambda: min(map(ticks, beats)) >= 7, say=beats[0].log.read_text)  # the last may not be sent yet
    for each in beats:
        each.kill()
    ids = _once_ids(app)
    assert len(ids) == len(set(ids)) >= 6
    assert len(ids) <= sum(map(ticks, beats)) - 5, "the other beat's were not stored"


def _once_ids(app):
    found = []
    with app.app.connection_for_read() as connection:
        channel = connection.channel()
        while (message := channel.basic_get("celery", no_ack=True)) is not None:
            found.append(message.headers["once_id"])
    return found
