"""The small examples, run as their pages say."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from kit.processes import run_python

from kombu_fdb import Broker

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command, exit_code=0):
    return run_python(*command, exit_code=exit_code).stdout


@pytest.mark.process
def test_fair_tenants(url):
    out = run(EXAMPLES / "fair_tenants.py", "--broker", url)
    table = re.findall(r"^ *(\w+) +\d+ +(\d+) of \d+ +(\d+) of", out, re.MULTILINE)
    rows = {name: (int(plain), int(fair)) for name, plain, fair in table}
    assert len(rows) == 10
    assert all(plain > 300 for name, (plain, _) in rows.items() if name != "noisy"), "without keys they wait"
    assert all(fair <= 50 for name, (_, fair) in rows.items() if name != "noisy"), "with keys they don't"
    assert "verdict: with keys every quiet tenant was done" in out


@pytest.mark.process
def test_fair_tenants_finds_what_is_not_fair(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import fair_tenants

    noisy_first = ["noisy"] * 300 + fair_tenants.QUIET * 5
    assert fair_tenants.report({"plain": noisy_first, "fair": noisy_first}) == 1
    assert "too late" in capsys.readouterr().out
    assert fair_tenants.report({"plain": noisy_first, "fair": noisy_first[:-1]}) == 1
    assert "not all tasks ran" in capsys.readouterr().out
    sys.modules.pop("fair_tenants")


@pytest.mark.process
def test_plain_kombu(url):
    kombu = EXAMPLES / "plain_kombu"
    assert "and 5 orders" in run(kombu / "producer.py", url, 5)
    lines = run(kombu / "consumer.py", url, 5).splitlines()
    orders = [line for line in lines if line.startswith("order")]
    assert sorted(orders) == [f"order {n} by customer{n % 2}" for n in range(5)]
    assert "rejected {'no': 'order'}" in lines
    with Broker.open(url) as broker:
        assert broker.queue("orders.dead").stats().ready == 1


@pytest.fixture
def service(monkeypatch, url):
    for module in ("fastapi", "httpx2"):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    monkeypatch.setenv("INVOICES_BROKER", url)
    monkeypatch.syspath_prepend(str(EXAMPLES / "fastapi_publisher"))
    import app
    from fastapi.testclient import TestClient

    with TestClient(app.api) as client:
        yield client
    sys.modules.pop("app")


def test_fastapi_publishes_each_request_once(service, url):
    assert service.get("/health").json()["broker"].startswith("fdb")
    order = {"customer": "alice", "order": 42}
    first = service.post("/invoices", json=order, headers={"Idempotency-Key": "a1"})
    assert first.status_code == 202
    assert service.post("/invoices", json=order, headers={"Idempotency-Key": "a1"}).status_code == 202
    assert service.post("/invoices", json={"customer": "bob", "order": 43}).status_code == 202
    assert service.post("/invoices", json={"customer": "bob"}).status_code == 422
    with Broker.open(url) as broker:
        found = broker.queue("celery").peek(10)
        assert [each.key for each in found] == ["alice", "bob"]


@pytest.mark.parametrize("url", ["fdb+sqlite:////nowhere/broker.db"])
def test_fastapi_without_its_store(service):
    answer = service.post("/invoices", json={"customer": "alice", "order": 42})
    assert answer.status_code == 503
    assert "mkdir -p /nowhere" in answer.json()["error"]
    assert service.get("/health").status_code == 503


@pytest.mark.process
@pytest.mark.foundationdb
def test_the_order_and_its_task_are_stored_or_neither(cluster):
    environ = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    done = run_python(EXAMPLES / "transactional_enqueue.py", cluster.cluster_file, env=environ)
    assert done.stdout.splitlines() == ["order 2: not paid", "1 order and 1 task are stored"]
