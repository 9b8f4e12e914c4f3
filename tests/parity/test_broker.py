"""The broker itself: what it shares, and what importing it costs."""

import pytest
from kit.processes import run_python

import kombu_fdb
from kombu_fdb import Broker
from kombu_fdb.errors import InvalidArgument, StoreUnavailable


def test_importing_the_package_loads_nothing():
    script = (
        "import sys, kombu_fdb; print([name for name in sys.modules if name.startswith(('kombu_', 'kombu', 'fdb'))])"
    )
    found = run_python("-c", script).stdout
    assert found.strip() == "['kombu_fdb']"


def test_importing_the_broker_loads_no_framework():
    script = "import sys; from kombu_fdb import Broker; print({'kombu', 'celery', 'fdb', 'sqlite3'} & set(sys.modules))"
    found = run_python("-c", script).stdout
    assert found.strip() == "set()"


def test_every_exported_name_is_there():
    assert {getattr(kombu_fdb, name).__name__ for name in kombu_fdb.__all__} == set(kombu_fdb.__all__)


def test_brokers_of_a_process_share_one_session_that_opens_with_the_first_take(tmp_path):
    url = f"fdb+sqlite:///{tmp_path}/broker.db"
    with Broker.open(url) as one, Broker.open(url) as other:
        assert one._client is other._client
        one.queue("q").put_many("ab")
        assert one._engine.sessions.beats() == [], "no heartbeat for a producer"
        job = one.queue("q").take(0)
        others = other.queue("q").take(0)
        assert len(one._engine.sessions.beats()) == 1
        other.close()
        assert one.queue("q").stats().ready == 1, "only its own go back"
        assert "held" in repr(others)
        job.ack()
    with pytest.raises(StoreUnavailable):
        one.queue("q").put("c")
    one.close()


@pytest.mark.parametrize(
    "values",
    [
        *({"delay": -1}, {"ttl": 0}, {"ttr": -1}, {"priority": 10}, {"priority": 1.5}),
        *({"key": 7}, {"task_id": 7}, {"dedup_id": 7}),
    ],
)
def test_senseless_arguments_store_nothing(tmp_path, values):
    with Broker.open(f"fdb+sqlite:///{tmp_path}/broker.db") as broker:
        with pytest.raises(InvalidArgument):
            broker.queue("q").put("a", **values)
        with pytest.raises(InvalidArgument, match="is bytes or a str"):
            broker.queue("q").put({"order": 7})
        with pytest.raises(InvalidArgument, match="rate"):
            broker.queue("q").limit("acme", rate="1/m")
        assert broker.queue("q").stats().delayed == broker.queue("q").count() == 0
