"""From the file to a cluster with no downtime, as docs/how-to/file-to-cluster.md tells it, with tasks all the while."""

import os
import signal
from contextlib import contextmanager
from dataclasses import replace

import pytest
from celery import Celery
from kit.processes import run_python

from kombu_fdb import Broker

pytestmark = [pytest.mark.process, pytest.mark.foundationdb]


@contextmanager
def publisher(url):
    with Celery("publisher", broker=url, set_as_current=False) as app:
        app.conf.task_ignore_result = True
        yield lambda name, task="note", **options: app.send_task(f"acceptance_app.{task}", args=(name,), **options)


def take_over(source, target):
    return run_python("-m", "celery_fdb", "--broker", target, "import", "--from", source, exit_code=None)


@pytest.mark.parametrize("broker", ["sqlite"], indirect=True)
def test_every_task_runs_once_while_a_shop_moves(broker, cluster, start, until):
    target = replace(broker, url=f"fdb://{cluster.connection_string}/{os.urandom(6).hex()}")
    with publisher(broker.url) as to_file, publisher(target.url) as to_cluster:
        old = start("-c", "2", name="old")
        to_file("tomorrow", countdown=86_400)
        to_file("long", task="hold")
        until(lambda: broker.marks("start", "long"))

        start("-c", "2", name="new", at=target)
        for number in range(30):  # a fleet in the middle of its deployment
            to_file(f"file-{number}")
            to_cluster(f"cluster-{number}")
        assert "the source is in use" in take_over(broker.url, target.url).stderr

        old.process.send_signal(signal.SIGTERM)  # it still has the long one
        to_cluster("meanwhile")
        until(lambda: broker.marks("run", "meanwhile"))
        assert not broker.marks("end", "long")
        broker.allow("long")
        assert old.wait_end() == 0
        moved = take_over(broker.url, target.url)
        assert moved.returncode == 0, moved.stderr

        names = {f"{where}-{number}" for where in ("file", "cluster") for number in range(30)} | {"meanwhile"}
        until(lambda: names <= broker.count("run").keys(), say=lambda: names - broker.count("run").keys())
    assert set(broker.count("run").values()) == {1}
    assert broker.count("end") == {"long": 1}
    assert delayed(target.url) == 1
    assert "already imported" in take_over(broker.url, target.url).stderr


def delayed(url):
    with Broker.open(url) as opened:
        return opened.queue("celery").stats().delayed
