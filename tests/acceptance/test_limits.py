"""Queue arguments that bound workers, with real ones."""

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture
def arguments(broker):
    """Of the default queue, as publisher and workers declare it: fill it before the app is used."""
    return broker.queue_arguments


def test_one_active_worker_and_its_successor(broker, arguments, start, until, request):
    """The second one does nothing until the first is killed; then it begins with what the first had not finished."""
    arguments["x-single-active-consumer"] = True
    with_app = request.getfixturevalue("app")
    first = start("--prefetch-multiplier", "1", pool="solo")
    with_app.hold.delay("long")
    until(lambda: broker.marks("start", "long"))
    second = start("--prefetch-multiplier", "1", pool="solo")
    for number in range(5):
        with_app.note.delay(f"n{number}")
    first.kill()
    broker.allow("long")
    until(lambda: len(broker.marks("run")) == 5, say=second.log.read_text)
    marks = [mark for mark in broker.marks() if mark.pid == second.process.pid]
    assert [mark.name for mark in marks] == ["long", "long", "n0", "n1", "n2", "n3", "n4"]
    assert len(broker.marks()) == len(marks) + 1


def test_a_task_over_the_consumer_timeout_runs_elsewhere_too(broker, arguments, start, until, request):
    """As the documentation warns. The late worker's ack changes nothing, and it works on."""
    arguments["x-consumer-timeout"] = 1000
    with_app = request.getfixturevalue("app")
    engine = request.getfixturevalue("engine")
    slow = start("--prefetch-multiplier", "1", pool="solo")
    with_app.hold.delay("long")
    until(lambda: broker.marks("start", "long"))
    other = start("--prefetch-multiplier", "1", pool="solo")
    until(lambda: len(broker.marks("start", "long")) == 2, say=other.log.read_text)
    assert {mark.pid for mark in broker.marks("start", "long")} == {slow.process.pid, other.process.pid}
    broker.allow("long")
    until(lambda: slow.said("was settled after its time to run"), say=slow.log.read_text)
    assert other.stop() == 0
    with_app.note.delay("next")
    until(lambda: broker.marks("run", "next"), say=slow.log.read_text)
    until(lambda: engine.inspect.counts("celery").leased == 0)
    assert slow.log.read_text().count("was settled after its time to run") == 1
