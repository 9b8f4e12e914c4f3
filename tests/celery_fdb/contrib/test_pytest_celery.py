"""The pytest-celery vendor: all of it but the container, which needs Docker; then the container too."""

import inspect
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from kit.processes import run_python

pytest.importorskip("pytest_celery", reason="pytest-celery is not installed")

from kombu import Connection
from pytest_celery import CeleryBrokerCluster, CeleryTestBroker, RedisContainer

from celery_fdb.contrib.pytest_celery import COMMAND, READY, FdbContainer

ROOT = Path(__file__).parents[3]
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT)}

CONFTEST = """
import pytest
from pytest_celery import CeleryBrokerCluster

pytest_plugins = ["celery_fdb.contrib.pytest_celery"]

@pytest.fixture
def celery_broker_cluster(celery_fdb_broker):
    cluster = CeleryBrokerCluster(celery_fdb_broker)
    yield cluster
    cluster.teardown()
"""


class Attributes(FdbContainer):
    """A container as ``docker inspect`` describes it."""

    def __init__(self, address):
        self._container = type("Container", (), {"name": "fdb", "id": "0123456789abcdef"})()
        self._address = address

    @property
    def attrs(self):
        return {"Config": {"Hostname": "0123"}, "NetworkSettings": {"Networks": {"net": {"IPAddress": self._address}}}}


def docker_unavailable_reason():
    if shutil.which("docker") is None:
        return "docker is not on PATH"
    answers = subprocess.run(["docker", "info"], capture_output=True, timeout=30, check=False).returncode == 0
    return None if answers else "no Docker daemon answers"


def public(cls):
    return {name for name in vars(cls) if not name.startswith("_")}


def test_the_container_has_what_the_redis_vendors_has():
    assert public(RedisContainer) <= public(FdbContainer)
    for name in ("command", "image", "initial_env", "ports", "prefix", "version"):
        assert inspect.ismethod(getattr(FdbContainer, name)), name
    assert FdbContainer.version() == "7.3.79"


def test_another_image_by_the_environment(monkeypatch):
    monkeypatch.setenv("FDB_IMAGE", "registry/fdb:7.4.1")
    assert (FdbContainer.image(), FdbContainer.version()) == ("registry/fdb:7.4.1", "7.4.1")


def test_a_node_configures_celery():
    node = CeleryTestBroker(Attributes("172.17.0.2"))
    assert node.config()["url"] == "fdb://docker:docker@172.17.0.2:4500/0"
    assert node.config(vhost="7")["host_url"] == "fdb://docker:docker@172.17.0.2:4500/7"
    assert CeleryBrokerCluster(node).config()["urls"] == ["fdb://docker:docker@172.17.0.2:4500/0"]
    assert Connection(node.config()["url"]).get_transport_cls().driver_name == "celery-fdb"


def test_pytest_finds_the_fixtures(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    options = ("--fixtures", "-v", "--rootdir", tmp_path)
    done = run_python("-m", "pytest", *options, tmp_path, cwd=tmp_path, env=ENVIRON, exit_code=None)
    for name in ("celery_fdb_broker", "default_fdb_broker_cls", "default_fdb_broker_command", "default_fdb_broker"):
        assert f"\n{name} " in done.stdout, done.stdout[-2000:] + done.stderr


@pytest.fixture
def as_in_the_container(tmp_path):
    """The container's command, with a server of this machine instead of the image's start script."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    cluster_file = tmp_path / "fdb.cluster"
    cluster_file.write_text(f"docker:docker@{address}\n")
    server = tmp_path / "fdb.bash"
    server.write_text(f"#!/bin/sh\nexec fdbserver -p {address} -C {cluster_file} -d {tmp_path}/data -L {tmp_path}\n")
    server.chmod(0o700)
    process = subprocess.Popen(
        ["bash", "-c", COMMAND.replace("/var/fdb/scripts/fdb.bash", str(server))],
        env={**os.environ, "FDB_CLUSTER_FILE": str(cluster_file)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process, address
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.foundationdb
@pytest.mark.process
def test_the_containers_command_makes_a_cluster(as_in_the_container):
    process, address = as_in_the_container
    for line in process.stdout:
        if line.strip() == READY:
            break
    else:
        pytest.fail("it ended")
    with Connection(f"fdb://docker:docker@{address}/0") as connection:
        connection.SimpleQueue("q").put("hello")
        assert connection.SimpleQueue("q").get(timeout=10).payload == "hello"


@pytest.mark.process
def test_a_container(tmp_path):
    reason = docker_unavailable_reason()
    if reason:
        pytest.skip(reason)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(
        "def test_it(celery_fdb_broker):\n"
        "    with celery_fdb_broker.container.client as broker:\n"
        "        broker.queue('q').put(b'hello')\n"
        "        assert broker.queue('q').take(timeout=10).payload == b'hello'\n"
    )
    done = run_python("-m", "pytest", tmp_path, cwd=tmp_path, env=ENVIRON, exit_code=None)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
