"""What issue 2 calls proof with real processes, on every store this machine has."""

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
from kit.celery_versions import since_celery
from kombu.exceptions import OperationalError

from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.model import QueueCounts
from kombu_fdb.process.session_threads import BEATS
from kombu_fdb.routing.tables import Exchange, QueueDeclaration

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

prefork = ("-c", "2")


def once(broker, kind, names):
    return broker.count(kind) == dict.fromkeys(names, 1)


# -- fork ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ("--max-tasks-per-child", "1"),
        pytest.param(("--", "worker.pool_start_method=spawn"), marks=since_celery(5, 7)),  # imports everything anew
        pytest.param(("--", "worker.pool_start_method=fork"), marks=since_celery(5, 7)),
    ],
    ids=" ".join,
)
def test_children_publish_however_they_are_started(broker, app, start, until, options):
    worker = start(*prefork, *options)
    for number in range(3):
        app.spread.delay(f"s{number}", 3)
    names = [f"s{number}" for number in range(3)] + [f"s{n}-{m}" for n in range(3) for m in range(3)]
    until(lambda: len(broker.marks("run")) >= len(names), say=worker.log.read_text)
    assert once(broker, "run", names)
    pids = {mark.pid for mark in broker.marks("run")}
    assert "1" not in options or len(pids) == len(names), "each in a child of its own"
    assert worker.stop() == 0


@pytest.mark.parametrize("how", ["os.fork", "multiprocessing"])
def test_publish_in_parent_fork_publish_in_child(broker, how, engine):
    """A preloading web server, with one connection object made before the fork."""
    code = f"""
import os, sys, multiprocessing
sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
import acceptance_app, kombu
connection = acceptance_app.app.connection_for_write()
producer = connection.Producer(auto_declare=False)
def publish(who):
    acceptance_app.note.delay(who)
    producer.publish(who, routing_key="plain")
publish("parent")
def child():
    publish("child")
    if os.fork() == 0:
        publish("grandchild")
        os._exit(0)
    assert os.wait()[1] == 0
if {how!r} == "os.fork":
    if os.fork() == 0:
        child()
        os._exit(0)
    assert os.wait()[1] == 0
else:
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
publish("parent-again")
"""
    subprocess.run([sys.executable, "-c", code], env=broker.env, check=True, timeout=30)
    assert engine.inspect.counts("celery").ready == 4
    assert engine.inspect.counts("plain").ready == 4


def test_a_forked_child_leaves_the_parents_messages_alone(broker, app, until):
    with app.app.connection_for_read() as connection:
        connection.Producer().publish("held", routing_key="q")
        message = connection.SimpleQueue("q").get(timeout=10)
        child = multiprocessing.get_context("fork").Process(target=_child_exits_cleanly, args=(connection,))
        child.start()
        child.join(20)
        assert child.exitcode == 0
        message.ack()
        until(lambda: connection.default_channel.engine.inspect.counts("q").leased == 0)
        assert connection.default_channel.engine.inspect.counts("q").ready == 0
        assert connection.default_channel.client.lost_acks == 0


def _child_exits_cleanly(connection):
    connection.default_channel.queue_declare("from-the-child")
    connection.collect()
    connection.close()


# -- death -----------------------------------------------------------------------------------------------------------


def test_kill_9_in_the_middle_of_a_task(broker, app, start, until, engine):
    """The task runs again within session TTL + one sweep; nothing else runs twice."""
    victim = start(*prefork, "--prefetch-multiplier", "1")
    app.hold.delay("long")
    until(lambda: broker.marks("start", "long"))
    other = start(*prefork)
    for number in range(20):
        app.note.delay(f"n{number}")
    until(lambda: len(broker.marks("run")) >= 20)
    until(lambda: engine.inspect.counts("celery").leased == 1)  # a task whose ack did not make it in time may run again
    victim.kill()
    killed = time.time()
    until(lambda: len(broker.marks("start", "long")) == 2, say=other.log.read_text)
    took = broker.marks("start", "long")[1].time - killed
    # Four looks at an unchanged beat, over the TTL; the margin is for a busy machine, and far below any other way back.
    assert took < 2.0 + 2 * 0.3 + 20.0
    broker.allow("long")
    until(lambda: broker.marks("end", "long"))
    assert once(broker, "run", [f"n{number}" for number in range(20)])


def test_a_task_longer_than_ten_ttls_starts_once(broker, app, start, until):
    broker.options.update(session_ttl=1.0, sweep_interval=0.2)
    start(*prefork)
    start(*prefork)
    app.hold.delay("long", 10.0)
    until(lambda: broker.marks("end", "long"))
    assert len(broker.marks("start", "long")) == 1


def freeze(worker, engine):
    """Outside of a transaction: on SQLite, no process writes while another stands still in one of its own."""
    for attempt in itertools.count():
        os.killpg(worker.process.pid, signal.SIGSTOP)
        try:
            engine.queues.declare(QueueDeclaration(f"frozen{attempt}"))
        except StoreUnavailable:
            os.killpg(worker.process.pid, signal.SIGCONT)
            # A process that is stopped again at once, on a busy machine, never runs to the end of its transaction.
            engine.queues.declare(QueueDeclaration(f"thawed{attempt}"))
        else:
            return


def test_a_worker_frozen_for_longer_than_its_ttl(broker, app, start, until, engine):
    """Another one takes over, once; thawed, its late ack changes nothing, and it works on."""
    frozen = start("-c", "1", name="frozen")
    app.hold.delay("long")
    until(lambda: broker.marks("start", "long"))
    other = start("-c", "1", name="other")
    freeze(frozen, engine)
    until(lambda: len(broker.marks("start", "long")) == 2)
    os.killpg(frozen.process.pid, signal.SIGCONT)
    until(lambda: frozen.said("declared dead"), say=frozen.log.read_text)
    broker.allow("long")
    until(lambda: len(broker.marks("end", "long")) == 2)
    until(lambda: frozen.said("too late"), say=frozen.log.read_text)
    assert not other.said("too late")
    until(lambda: engine.inspect.counts("celery").leased == 0)
    other.stop()
    app.note.delay("after")
    until(lambda: broker.marks("run", "after"), say=frozen.log.read_text)
    assert app.app.control.ping(timeout=30, destination=["frozen@test"]), "its pidbox was declared again"


def test_warm_shutdown_hands_unstarted_messages_back(broker, app, start, until, engine):
    worker = start("-c", "1", "--prefetch-multiplier", "8")
    app.hold.delay("first")
    for number in range(7):
        app.note.delay(f"n{number}")
    until(lambda: broker.marks("start", "first") and engine.inspect.counts("celery").leased == 8)
    worker.process.send_signal(signal.SIGTERM)
    until(lambda: worker.said("Warm shutdown"))
    broker.allow("first")
    worker.wait_end()
    done = broker.count("run")
    counts = engine.inspect.counts("celery")
    assert (counts.ready + sum(done.values()), counts.leased) == (7, 0), "at once, not after a TTL"
    start("-c", "1")
    until(lambda: once(broker, "run", [f"n{number}" for number in range(7)]))


def test_cold_shutdown_hands_started_messages_back(broker, app, start, until):
    worker = start("-c", "1", name="a")
    app.hold.delay("first")
    until(lambda: broker.marks("start", "first"))
    # Celery cancels what its main process knows to run; it waits for a task whose start it has not heard of.
    inspect = app.app.control.inspect(timeout=30, destination=["a@test"])
    until(lambda: (inspect.active() or {}).get("a@test"))
    worker.process.send_signal(signal.SIGQUIT)
    worker.wait_end()
    assert not worker.said("Error on terminating")
    # At once; or, where the store was too slow for a worker that ends, when another one has seen it silent.
    start("-c", "1")
    until(lambda: len(broker.marks("start", "first")) >= 2)
    broker.allow("first")
    until(lambda: broker.marks("end", "first"))


# -- time ------------------------------------------------------------------------------------------------------------


def test_eta_tasks_wait_in_the_store(broker, app, start, until, engine):
    start(*prefork, name="a")
    start(*prefork, name="b")
    due = time.time() + 8
    for number in range(20):
        app.note.apply_async((f"eta{number}",), countdown=due - time.time())
    assert engine.inspect.counts("celery").delayed == 20
    inspect = app.app.control.inspect(timeout=30, destination=["a@test", "b@test"])
    for held in (inspect.scheduled(), inspect.reserved()):
        assert held == {"a@test": [], "b@test": []}
    assert engine.inspect.counts("celery").leased == 0
    until(lambda: len(broker.marks("run")) >= 20)
    assert once(broker, "run", [f"eta{number}" for number in range(20)])
    times = [mark.time for mark in broker.marks("run")]
    assert min(times) >= due - 0.05
    assert max(times) < due + 20


def test_a_task_with_an_eta_outlives_a_lost_connection(broker, app, start, until, pool):
    """Celery drops it, and keeps it in its timer (transport/worker.py): seed 4007 of the box never ran two."""
    worker = start(pool=pool, app="lost_connection_app")
    app.note.apply_async(("x",), countdown=0.2)
    until(lambda: worker.said("the test has cut the connection"))
    until(lambda: broker.marks("run", "x"))


def test_a_task_whose_start_was_not_read_outlives_a_lost_connection(broker, app, start, until, engine, monkeypatch):
    """Celery forgets it, and its child runs it all the same (transport/worker.py)."""
    monkeypatch.setenv("HELD_UP_LOSES", "1")
    app.note.delay("x")
    worker = start("-c", "1", app="held_up_app")
    until(lambda: worker.said("the test has cut the connection"))
    until(lambda: engine.inspect.counts("celery") == QueueCounts())
    app.note.delay("y")
    until(lambda: broker.marks("run", "y"))
    assert once(broker, "run", ["x", "y"])


def test_a_task_whose_start_was_not_read_keeps_its_child(broker, app, start, until, monkeypatch):
    """With a child that Celery took for idle, the next task would wait."""
    monkeypatch.setenv("HELD_UP_LOSES", "1")
    app.hold.delay("x")
    worker = start("-c", "2", app="held_up_app")
    until(lambda: worker.said("the test has cut the connection"))
    app.hold.delay("y")
    until(lambda: broker.marks("start", "y"))
    app.note.delay("z")
    broker.allow("y")
    until(lambda: broker.marks("run", "z"))
    assert not broker.marks("end", "x")


def test_a_task_of_which_a_lost_child_had_a_part_outlives_a_lost_connection(
    broker, app, start, until, engine, monkeypatch
):
    monkeypatch.setenv("HALF_WRITTEN_KILLS", "1")
    monkeypatch.setenv("HALF_WRITTEN_LOSES", "1")
    app.note.apply_async(("x",), headers={"more": "than a pipe holds" * 20_000})
    worker = start("-c", "1", app="half_written_app")
    until(lambda: worker.said("the test has cut the connection"))
    until(lambda: engine.inspect.counts("celery") == QueueCounts())
    assert once(broker, "run", ["x"])


def test_retries_wait_in_the_store(broker, app, start, until):
    start(*prefork)
    app.flaky.delay("f")
    until(lambda: broker.marks("done", "f"))
    assert len(broker.marks("run", "f")) == 3


def test_an_expired_task_does_not_run(broker, app, start, until, engine):
    app.note.apply_async(("gone",), expires=0.2)
    app.note.apply_async(("gone-with-eta",), countdown=0.4, expires=0.2)
    started = time.time()
    until(lambda: time.time() > started + 0.5)
    start(*prefork)
    app.note.delay("here")
    until(lambda: broker.marks("run", "here"))
    until(lambda: engine.inspect.counts("celery") == QueueCounts())
    assert once(broker, "run", ["here"])


def test_beat(broker, start, until):
    start("-c", "1", "-B", name="beating")
    until(lambda: len(broker.marks("run", "tick")) >= 3)


# -- many ------------------------------------------------------------------------------------------------------------


def test_two_publishers_two_workers_each_task_once(broker, app, start, until):
    code = """
import acceptance_app, sys
for number in range(1000):
    acceptance_app.note.delay(f"{sys.argv[1]}-{number}")
"""
    start(*prefork)
    start(*prefork)
    publishers = [subprocess.Popen([sys.executable, "-c", code, who], env=broker.env) for who in ("p", "q")]
    for publisher in publishers:
        assert publisher.wait(200) == 0
    until(lambda: len(broker.marks("run")) >= 2000, say=lambda: len(broker.marks("run")))
    assert once(broker, "run", [f"{who}-{number}" for who in "pq" for number in range(1000)])


# -- control ---------------------------------------------------------------------------------------------------------


def test_remote_control(broker, app, start, until, engine):
    worker = start(*prefork, name="w")
    control = app.app.control
    queues = until(lambda: set(engine.inspect.queues()))
    assert control.ping(timeout=30, destination=["w@test"]) == [{"w@test": {"ok": "pong"}}]
    app.hold.delay("busy")
    until(lambda: broker.marks("start", "busy"))
    inspect = control.inspect(timeout=3, destination=["w@test"])
    until(lambda: [task["args"] for task in inspect.active()["w@test"]] == [["busy"]])
    stats = inspect.stats()["w@test"]
    assert stats["broker"]["transport"] == "fdb"
    json.dumps(stats)
    assert "password" not in stats["broker"]
    broker.allow("busy")
    until(lambda: set(engine.inspect.queues()) - {"celery"} <= queues)  # reply queues are gone
    control.shutdown(destination=["w@test"])
    worker.wait_end()
    until(lambda: not [name for name in engine.inspect.queues() if "pidbox" in name or "celeryev" in name])


def test_a_pool_that_is_restarted_leaves_nothing_of_what_it_had_in_hand(broker, app, start, until, engine):
    start(*prefork, name="w")
    for name in ("one", "two"):
        app.hold.delay(name)
    until(lambda: len(broker.marks("start")) == 2)
    names = [f"n{number}" for number in range(6)]
    for name in names:
        app.note.delay(name)
    until(lambda: engine.inspect.counts("celery").leased == 8)
    for _ in range(2):
        reply = app.app.control.broadcast("pool_restart", reply=True, timeout=30, limit=1, destination=["w@test"])
        assert reply == [{"w@test": {"ok": "reload started"}}]
    broker.allow("one")
    broker.allow("two")
    until(lambda: len(broker.marks("run")) >= len(names), say=lambda: broker.count("run"))
    until(lambda: engine.inspect.counts("celery") == QueueCounts())
    assert once(broker, "run", names)
    assert once(broker, "end", ["one", "two"])


def test_killed_inspectors_leave_no_queues(broker, app, start, until, engine):
    broker.options.update(session_ttl=1.0, sweep_interval=0.2)
    start("-c", "1")
    before = set(engine.inspect.queues())
    code = """
import acceptance_app
acceptance_app.app.control.inspect(timeout=600, destination=["nobody@nowhere"]).ping()
"""
    clients = [subprocess.Popen([sys.executable, "-c", code], env=broker.env) for _ in range(3)]
    try:
        until(lambda: len(set(engine.inspect.queues()) - before) >= len(clients))
    finally:
        for client in clients:
            client.kill()
            client.wait()
    until(
        lambda: set(engine.inspect.queues()) <= before | {"celery"}, say=lambda: set(engine.inspect.queues()) - before
    )


def test_mingle_and_gossip(broker, start, until):
    one = start("-c", "1", name="one", mingle=True)
    other = start("-c", "1", name="other", mingle=True)
    assert other.said("mingle: sync with 1 nodes")
    until(lambda: one.said("joined the party") or one.said("sync with other@test"), say=one.log.read_text)


# -- pools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["solo", "threads", "gevent", "eventlet"], indirect=True)
def test_pools(broker, app, start, until, pool):
    worker = start("-c", "4", pool=pool, name="w")
    app.spread.delay("s", 5)
    for number in range(20):
        app.note.delay(f"n{number}")
    names = ["s", *(f"s-{n}" for n in range(5)), *(f"n{n}" for n in range(20))]
    until(lambda: len(broker.marks("run")) >= len(names), say=lambda: (broker.count("run"), worker.log.read_text()))
    assert once(broker, "run", names)
    assert app.app.control.ping(timeout=30, destination=["w@test"]) == [{"w@test": {"ok": "pong"}}]
    worker.stop()


@pytest.mark.foundationdb
@pytest.mark.parametrize("broker", ["fdb"], indirect=True)
def test_eventlet_is_refused_on_a_cluster(start, until):
    """The network thread of FoundationDB's binding does not run beside monkey-patched threads."""
    pytest.importorskip("eventlet")
    refused = start("-c", "4", pool="eventlet", wait=False)
    until(lambda: refused.said("patched by eventlet"))


# -- a task that lets nothing else run ---------------------------------------------------------------------------------


computing_pools = pytest.mark.parametrize("pool", ["solo", "threads", "gevent", "eventlet"], indirect=True)


@pytest.fixture
def computing(pool, broker, app, start, until, engine):
    """A worker that does nothing but compute, and the name of its task.

    On SQLite a task may begin just as another thread of its worker writes, which keeps everybody from writing until it
    ends. Then it is another task's turn.
    """
    worker = start("-c", "1", "--prefetch-multiplier", "1", name="computing", pool=pool)
    names = (f"long-{number}" for number in itertools.count())
    while True:
        name = next(names)
        (broker.directory / "computing").write_bytes(b"\0")
        app.compute.delay(name)
        until(lambda name=name: broker.marks("start", name), say=worker.log.read_text)
        try:
            engine.queues.declare_exchange(Exchange("writable", "fanout"))
        except StoreUnavailable:
            allow_computing(broker)
            until(lambda name=name: broker.marks("end", name))
        else:
            return worker, name


def allow_computing(broker):
    with (broker.directory / "computing").open("r+b") as shared:  # in place: it is mapped
        shared.write(b"\1")


def beats(engine):
    return {session_id: beat for session_id, beat, _ in engine.sessions.beats()}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process computes")
@computing_pools
def test_a_task_that_lets_nothing_else_run_runs_once(computing, broker, start, until, engine):
    """Its worker can't beat. The others see that it computes, for six times as long as a session may be silent."""
    worker, task = computing
    ((silent, _),) = beats(engine).items()
    start("-c", "1", name="other")
    seen = {}

    def others_beat_often():
        for session_id, beat in beats(engine).items():
            seen.setdefault(session_id, set()).add(beat)
        return any(len(each) > 6 * BEATS for session_id, each in seen.items() if session_id != silent)

    until(others_beat_often)
    assert len(seen[silent]) <= BEATS, "it does let others run"
    assert silent in beats(engine)
    allow_computing(broker)
    until(lambda: broker.marks("end", task))
    until(lambda: engine.inspect.counts("celery").leased == 0, say=worker.log.read_text)
    assert broker.count("start")[task] == 1
    assert not worker.said("declared dead")


@computing_pools
def test_when_it_is_frozen_it_runs_elsewhere(computing, broker, start, until, engine):
    worker, task = computing
    start("-c", "1", name="other")
    freeze(worker, engine)
    until(lambda: broker.count("start")[task] == 2)
    allow_computing(broker)
    until(lambda: broker.marks("end", task))
    until(lambda: engine.inspect.counts("celery").leased == 0)


# -- failure ---------------------------------------------------------------------------------------------------------


@pytest.mark.foundationdb
@pytest.mark.own_cluster
@pytest.mark.parametrize("broker", ["fdb"], indirect=True)
def test_fdbserver_stopped_and_started_under_load(broker, app, start, until):
    broker.options.update(publish_timeout=1.0, operation_timeout=1.0, session_ttl=3.0, sweep_interval=0.5)
    app.app.conf.broker_transport_options = broker.options
    worker = start(*prefork)
    app.hold.delay("across")
    for number in range(100):
        app.note.delay(f"before{number}")
    until(lambda: broker.marks("start", "across"))
    broker.cluster.stop()
    for options, most_s in (({"retry": False}, 4), ({"retry": False}, 4), ({}, 10)):
        began = time.monotonic()
        with pytest.raises(OperationalError):
            app.note.apply_async(("meanwhile",), **options)
        assert time.monotonic() - began < most_s, "within its deadline, every time"
    broker.cluster.start()
    until(lambda: _publishes(app, "after"), timeout_s=20)
    names = [f"before{number}" for number in range(100)]
    until(lambda: broker.marks("run", "after") and set(names) <= set(broker.count("run")), say=worker.log.read_text)
    broker.allow("across")
    until(lambda: broker.marks("end", "across"))
    assert worker.process.poll() is None


def _publishes(app, name):
    try:
        app.note.apply_async((name,), retry=False)
    except OperationalError:
        return False
    return True
