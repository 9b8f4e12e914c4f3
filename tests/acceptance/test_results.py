"""The result backend with real workers, on every store this machine has."""

import statistics
import sys
import threading
import time
from datetime import UTC, datetime

import pytest
from celery import chain, chord, group, states
from celery.exceptions import ChordError, TaskRevokedError
from celery.result import GroupResult
from kit.celery_versions import CELERY

from kombu_fdb.keyspace.layout import range_of

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
#: No deadline of these tests is tight; what is measured is measured.
LONG_S = 90.0


def keys_left(tasks):
    store = tasks.app.backend.store
    return [key for key, _ in store._read(lambda tr: tr.get_range(*range_of(store.keys.prefix)))]


# -- states and results ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_results_groups_and_chords_in_every_pool(tasks, work, pool):
    work(pool=pool)
    assert tasks.add.delay(1, 2).get(timeout=LONG_S) == 3
    many = group(tasks.add.s(each, each) for each in range(50))()
    assert many.get(timeout=LONG_S) == [2 * each for each in range(50)]
    body = chord([tasks.add.s(each, each) for each in range(10)])(tasks.total.s())
    assert body.get(timeout=LONG_S) == 90
    assert tasks.large.delay(1_000_000).get(timeout=LONG_S) == "x" * 1_000_000
    with pytest.raises(ValueError, match="broken"):
        tasks.fail.delay("broken").get(timeout=LONG_S)


def test_a_child_for_each_task(tasks, work, broker, until):
    work("--max-tasks-per-child", "1")
    assert chord([tasks.add.s(each, 1) for each in range(6)])(tasks.total.s()).get(timeout=LONG_S) == 21
    ids = tasks.spawn.delay(3).get(timeout=LONG_S)
    assert [tasks.app.AsyncResult(each).get(timeout=LONG_S) for each in ids] == [3, 4, 5]
    assert len({mark.pid for mark in broker.marks("run")}) == len(broker.marks("run"))


def test_started_progress_and_the_end_are_seen_as_they_happen(tasks, work, broker, until):
    work()
    result = tasks.wait.delay("a")
    until(lambda: broker.marks("start", "a"))
    assert result.state == states.STARTED
    assert result.info["hostname"] == "w0@test"
    broker.allow("a")
    assert result.get(timeout=LONG_S) == "a"
    told = []
    assert tasks.progress.delay().get(timeout=LONG_S, on_message=lambda meta: told.append(meta["status"])) == "done"
    assert told[-1] == states.SUCCESS


def test_get_wakes_at_once(tasks, work, broker, until):
    """From the end of the task to the return of ``get`` in another process: no interval is waited for."""
    work()
    took = []
    for name in map(str, range(10)):
        result = tasks.wait.delay(name)
        until(lambda name=name: broker.marks("start", name))
        thread = threading.Timer(0.05, broker.allow, (name,))
        thread.start()
        result.get(timeout=LONG_S)
        took.append(time.time() - broker.marks("end", name)[0].time)
        thread.join()
    assert statistics.median(took) < 0.25, took  # Celery polls each 0.5 s


def test_a_result_over_the_maximum_is_a_failure_that_names_the_fix(tasks, work, monkeypatch):
    monkeypatch.setenv("RESULTS_OPTIONS", '{"max_message_size": 100000}')
    work()
    with pytest.raises(Exception, match=r"the result is too large .*max_message_size in"):
        tasks.large.delay(100_000).get(timeout=LONG_S)
    assert tasks.large.delay(90_000).get(timeout=LONG_S) == "x" * 90_000


def test_forgotten_and_expired_results_leave_no_key(tasks, work, until):
    worker = work()
    tasks.app.conf.result_expires = 1
    results = group(tasks.large.s(200_000) for _ in range(4))()
    results.save()
    assert GroupResult.restore(results.id, app=tasks.app).get(timeout=LONG_S)
    body = chord([tasks.add.s(each, each) for each in range(4)])(tasks.total.s())
    body.get(timeout=LONG_S)
    assert worker.stop() == 0
    assert keys_left(tasks)
    results.forget()
    results.delete()
    body.forget()
    assert keys_left(tasks) == []


LONG_AGO = datetime(2001, 1, 1, tzinfo=UTC)


def test_a_task_that_expired_is_revoked(tasks, work, broker):
    """As on Redis: its caller is told, with and without an ETA, even if it expired before it was sent."""
    expired = [
        tasks.add.apply_async((1, 1), expires=LONG_AGO),
        tasks.add.apply_async((2, 2), expires=0.001),
        tasks.add.apply_async((3, 3), countdown=0.2, expires=0.1),
    ]
    work()
    for each in expired:
        with pytest.raises(TaskRevokedError, match="expired"):
            each.get(timeout=LONG_S)
    assert tasks.add.apply_async((4, 4), expires=3600).get(timeout=LONG_S) == 8
    assert [mark.name for mark in broker.marks("run")] == ["add-4-4"]


def test_a_task_that_expired_fails_its_chord(tasks, work, broker):
    expired = tasks.add.s(1, 1).set(expires=LONG_AGO)
    result = chord([expired, tasks.add.s(2, 2)])(tasks.total.s())
    work()
    with pytest.raises(ChordError, match=r"TaskRevokedError\('expired'\)"):
        result.get(timeout=LONG_S, follow_parents=False)
    assert not broker.marks("run", "total")


# -- chords: CHORD-ONCE, CHORD-SURE ----------------------------------------------------------------------------------


def test_chords_of_every_kind(tasks, work, broker):
    work()
    add, total = tasks.add, tasks.total
    assert chord([add.s(each, each) for each in range(200)])(total.s()).get(timeout=LONG_S) == 39_800
    nested = chord([add.s(1, 1), chord([add.s(2, 2), add.s(3, 3)], total.s())], total.s())
    assert nested.apply_async().get(timeout=LONG_S) == 12
    assert (group(add.s(1, 1), add.s(2, 2)) | total.s() | add.s(1)).apply_async().get(timeout=LONG_S) == 7
    upgraded = chain(add.s(1, 1), group(add.s(1), add.s(2)), total.s(), add.s(10))
    assert upgraded.apply_async().get(timeout=LONG_S) == 17
    assert chord([add.s(1, 1), add.s(2, 2)], total.s() | add.s(1)).apply_async().get(timeout=LONG_S) == 7
    spread = chord([add.s(1, 1), add.s(2, 2)], group(total.s(), total.s())).apply_async()
    assert spread.get(timeout=LONG_S) == [6, 6]


def test_a_chord_with_an_error(tasks, work, broker, until):
    work()
    sig = chord([tasks.add.s(1, 1), tasks.fail.s("broken")], tasks.total.s().on_error(tasks.report.s()))
    result = sig.apply_async()
    with pytest.raises(ChordError, match="broken"):
        result.get(timeout=LONG_S, follow_parents=False)
    until(lambda: broker.marks("run", "report"))
    nested = chord([tasks.add.s(1, 1), chord([tasks.fail.s("inner")], tasks.total.s())], tasks.total.s())
    with pytest.raises(ChordError, match="inner"):
        nested.apply_async().get(timeout=LONG_S, follow_parents=False)
    assert not broker.marks("run", "total")


def test_a_header_task_whose_process_is_killed_runs_again(tasks, work, broker):
    work()
    result = chord([tasks.add.s(1, 1), tasks.die_once.s(5), tasks.add.s(2, 2)])(tasks.total.s())
    assert result.get(timeout=LONG_S) == 11
    assert len(broker.marks("run", "die-5")) == 2
    assert len(broker.marks("run", "total")) == 1


def test_killed_between_the_last_part_and_the_body(tasks, work, broker, until):
    """The sweeper publishes the body, once: Celery finds the success stored, and before 5.7 runs the task once more."""
    worker = work()
    result = chord([tasks.add.s(1, 1), tasks.die_before_body.s(5)])(tasks.total.s())
    until(result.parent.results[0].ready)
    broker.allow("die")
    assert result.get(timeout=LONG_S) == 7
    assert len(broker.marks("run", "total")) == 1
    if CELERY >= (5, 7) and len(broker.marks("run", "die-5")) == 1:  # else its session had ended: a busy machine
        until(lambda: worker.said("was complete and abandoned"))


def test_a_killed_worker_loses_no_chord(tasks, work, broker, until):
    """kill -9 of master and children in the middle of a chord; another worker finishes it."""
    victim = work()
    result = chord([tasks.wait.s("held"), *[tasks.add.s(each, 0) for each in range(30)]])(tasks.report.s())
    until(lambda: broker.marks("start", "held"))
    until(lambda: len(broker.marks("run")) >= 10)
    victim.kill()
    work()
    broker.allow("held")
    result.get(timeout=LONG_S)
    assert len(broker.marks("run", "report")) == 1


def test_greenlets_wait_side_by_side(tasks, work, broker, tmp_path):
    """Under gevent a waiting ``get`` lets the others run."""
    import subprocess

    work()
    code = """
from gevent import monkey; monkey.patch_all()
import gevent, os, sys
sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
import results_app as tasks
ticks = []
def tick():
    while True:
        ticks.append(1)
        gevent.sleep(0.01)
ticker = gevent.spawn(tick)
held = tasks.wait.delay("held")
jobs = [gevent.spawn(lambda n=n: tasks.add.delay(n, 1).get(timeout=30)) for n in range(20)]
blocked = gevent.spawn(lambda: held.get(timeout=30))
gevent.joinall(jobs, timeout=30, raise_error=True)
assert [job.value for job in jobs] == list(range(1, 21))
assert not blocked.ready()
before = len(ticks)
gevent.sleep(0.2)
assert len(ticks) > before + 5, "the hub is blocked"
tasks.mark("ready", "gevent")
open(os.path.join(tasks.DIRECTORY, "allow-held"), "w").close()
blocked.join(timeout=30)
assert blocked.value == "held"
"""
    subprocess.run([sys.executable, "-c", code], env=broker.env, check=True, timeout=60)
