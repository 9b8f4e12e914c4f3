"""FoundationDB as a broker vendor for pytest-celery, in addition to Redis and RabbitMQ.

In a ``conftest.py``::

    import pytest
    from pytest_celery import CeleryBrokerCluster

    pytest_plugins = ["celery_fdb.contrib.pytest_celery"]

    @pytest.fixture
    def celery_broker_cluster(celery_fdb_broker):
        cluster = CeleryBrokerCluster(celery_fdb_broker)
        yield cluster
        cluster.teardown()

``celery_fdb_broker`` is a container of FoundationDB's own image that becomes a single-node cluster when it starts. Its
data is in memory and is lost when it stops. It needs Docker with containers that this host can reach by their addresses
(Linux), and a worker image with celery-fdb and a FoundationDB client of the same series. As with the other vendors, you
can override these fixtures: ``default_fdb_broker_cls``, ``_image``, ``_env``, ``_ports``, ``_command``.

Without Docker, use the fixtures of ``celery_fdb.contrib.pytest_plugin``: the same store, with workers as threads or
processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from pytest_celery.api.broker import CeleryTestBroker
from pytest_celery.api.container import CeleryTestContainer
from pytest_docker_tools import container, fxtr

#: The series of the client library that the binding here asks for; another one by ``FDB_IMAGE``.
DEFAULT_IMAGE = "foundationdb/foundationdb:7.3.79"
PORT = 4500
START_S = 60
READY = "celery-fdb: the cluster is ready"
#: The image's own script starts the server but does not make a database. After a restart there is one: no error then.
COMMAND = f"""
/var/fdb/scripts/fdb.bash &
until fdbcli --exec 'configure new single memory; waitopen' || fdbcli --timeout 5 --exec 'waitopen'; do sleep 0.2; done
echo '{READY}'
wait
"""


class FdbContainer(CeleryTestContainer):
    """The container's life and address."""

    @property
    def client(self) -> Any:
        """A :class:`kombu_fdb.Broker` on the store, to look into queues."""
        from kombu_fdb import Broker

        return Broker.open(self.host_url)

    @property
    def celeryconfig(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "host_url": self.host_url,
            "hostname": self.hostname,
            "port": self.port,
            "vhost": self.vhost,
        }

    @property
    def url(self) -> str:
        """The URL, the same inside and outside: a coordinator is known by one address only, so no port is mapped."""
        return f"{self.prefix()}docker:docker@{self.address}:{self.port}/{self.vhost}"

    @property
    def host_url(self) -> str:
        return self.url

    @property
    def hostname(self) -> str:
        return str(self.attrs["Config"]["Hostname"])

    @property
    def address(self) -> str:
        (network,) = self.attrs["NetworkSettings"]["Networks"].values()
        return str(network["IPAddress"])

    @property
    def port(self) -> int:
        return PORT

    @property
    def vhost(self) -> str:
        """The namespace."""
        return "0"

    @classmethod
    def command(cls, *args: str, **_: Any) -> list[str]:
        return ["bash", "-c", COMMAND, *args]

    @classmethod
    def version(cls) -> str:
        return cls.image().rpartition(":")[2]

    @classmethod
    def initial_env(cls) -> dict[str, str]:
        return {"FDB_NETWORKING_MODE": "container", "FDB_PORT": str(PORT), "FDB_PROCESS_CLASS": "unset"}

    @classmethod
    def image(cls) -> str:
        return os.environ.get("FDB_IMAGE", DEFAULT_IMAGE)

    @classmethod
    def ports(cls) -> dict[str, Any]:
        return {}

    @classmethod
    def prefix(cls) -> str:
        return "fdb://"

    @property
    def ready_prompt(self) -> str:
        return READY


@pytest.fixture
def celery_fdb_broker(default_fdb_broker: FdbContainer) -> Iterator[CeleryTestBroker]:
    broker = CeleryTestBroker(default_fdb_broker)
    yield broker
    broker.teardown()


@pytest.fixture
def default_fdb_broker_cls() -> type[FdbContainer]:
    return FdbContainer


@pytest.fixture
def default_fdb_broker_image(default_fdb_broker_cls: type[FdbContainer]) -> str:
    return default_fdb_broker_cls.image()


@pytest.fixture
def default_fdb_broker_env(default_fdb_broker_cls: type[FdbContainer]) -> dict[str, str]:
    return default_fdb_broker_cls.initial_env()


@pytest.fixture
def default_fdb_broker_ports(default_fdb_broker_cls: type[FdbContainer]) -> dict[str, Any]:
    return default_fdb_broker_cls.ports()


@pytest.fixture
def default_fdb_broker_command(default_fdb_broker_cls: type[FdbContainer]) -> list[str]:
    return default_fdb_broker_cls.command()


default_fdb_broker = container(
    image="{default_fdb_broker_image}",
    ports=fxtr("default_fdb_broker_ports"),
    environment=fxtr("default_fdb_broker_env"),
    network="{default_pytest_celery_network.name}",
    wrapper_class=FdbContainer,
    timeout=START_S,
    command=fxtr("default_fdb_broker_command"),
)
