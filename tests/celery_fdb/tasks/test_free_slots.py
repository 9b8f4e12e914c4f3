"""How many tasks a worker claims that claims only what it can run (celery_fdb/tasks/free_slots.py)."""

from types import SimpleNamespace

from celery.worker import state
from celery.worker.consumer import Consumer

from celery_fdb.tasks import free_slots


class Channel:
    def __init__(self):
        self.limited = []

    def limit_slots(self, free):
        self.limited.append(free)


def consumer(processes, autoscaler=None):
    controller = SimpleNamespace(max_concurrency=2, autoscaler=autoscaler)
    return SimpleNamespace(controller=controller, pool=SimpleNamespace(num_processes=processes))


def test_slots_are_the_processes_that_there_are_or_may_be(monkeypatch):
    """Remote control changes both: ``pool_grow`` the pool's, ``autoscale`` the autoscaler's."""
    monkeypatch.setattr(state, "reserved_requests", {"one that runs"})
    channel, autoscaler = Channel(), SimpleNamespace(max_concurrency=2)
    free_slots._count(consumer(4), channel)
    free_slots._count(consumer(1, autoscaler), channel)
    autoscaler.max_concurrency = 6
    free_slots._count(consumer(1, autoscaler), channel)
    assert channel.limited == [3, 1, 5]


class Request:
    id, name = "a", "task"


def test_a_task_that_goes_on_after_a_lost_connection_has_its_slot():
    """Celery takes all from its reserved requests; since 5.7, not those whose start it has read."""
    channel, running = Channel(), Request()
    state.task_reserved(running)
    Consumer.on_close(SimpleNamespace(controller=None, timer=None, task_buckets={}, pool=None))
    state.task_accepted(running)
    free_slots._count(consumer(4), channel)
    state.task_ready(running)
    free_slots._count(consumer(4), channel)
    assert channel.limited == [3, 4]
