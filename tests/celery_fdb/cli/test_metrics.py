"""The collector, the endpoint, and the dashboard that reads it."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import closing, suppress
from pathlib import Path

import pytest
from kit.duties import sweep
from kit.processes import DEADLINE_S
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from celery_fdb.history.views.metrics import make_collector as make_collector_of_tasks
from celery_fdb.inspection import metrics
from celery_fdb.inspection.metrics import NAMES, OTHER, BrokerCollector, make_collector
from kombu_fdb.errors import OptionError

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "examples" / "grafana" / "celery-fdb.json"


@pytest.fixture
def collector(url):
    collector = make_collector(url)
    yield collector
    collector.close()


def samples(collector):
    """Name and labels -> value, as Prometheus reads them."""
    registry = CollectorRegistry()
    registry.register(collector)
    return parsed(generate_latest(registry).decode())


def parsed(text):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found, name, **labels):
    return found[name, tuple(sorted(labels.items()))]


def test_messages_by_state_ages_and_consumers(collector, broker):
    jobs = broker.queue("jobs")
    jobs.put_many("abc")
    jobs.put("d", delay=3600)
    jobs.take(0).bury()
    jobs.take(0)
    jobs.pause()
    found = samples(collector)
    for state in ("ready", "delayed", "leased", "dead"):
        assert value(found, "celery_fdb_queue_messages", queue="jobs", state=state) == 1, state
    assert 0 <= value(found, "celery_fdb_queue_oldest_seconds", queue="jobs") < 60
    assert value(found, "celery_fdb_queue_paused", queue="jobs") == 1
    assert value(found, "celery_fdb_sessions", state="open") == 1
    assert value(found, "celery_fdb_up") == 1
    assert ("celery_fdb_queue_messages", (("queue", "jobs.dead"), ("state", "ready"))) not in found


HAPPENED = {"published": 5, "claimed": 4, "acked": 1, "returned": 2, "dead_lettered": 1, "lost_leases": 1}


def test_what_happened_is_counted_over_all_processes(collector, another, broker):
    jobs = broker.queue("jobs")
    jobs.put_many("abcde")
    jobs.take(0).ack()
    jobs.take(0).release()
    jobs.take(0).bury()
    lost = jobs.take(0)
    sweep(another(), broker)
    with pytest.raises(Exception, match="lease"):
        lost.ack()
    for each in (broker, another()):
        each._engine.upkeep.flush_totals()
    found = samples(collector)
    for name, number in HAPPENED.items():
        assert value(found, f"celery_fdb_{name}_total", queue="jobs") == number, name
    assert value(found, "celery_fdb_late_settlements_total") == 1


def test_the_series_of_keys_are_bounded_and_lose_no_message(url, broker):
    jobs = broker.queue("jobs")
    for number in range(8):
        jobs.put_many("x" * (number + 1), key=f"k{number}")
    jobs.put("nobody's")
    broker._engine.upkeep.flush_totals()
    with closing(make_collector(url, keys=2)) as collector:
        found = samples(collector)
    for name, of_no_key, labels in (("messages", 1, {"state": "ready"}), ("published_total", 0, {})):
        keys = {dict(each)["key"] for full, each in found if full == f"celery_fdb_key_{name}"}
        assert keys == {"k7", "k6", OTHER}
        others = value(found, f"celery_fdb_key_{name}", queue="jobs", key=OTHER, **labels)
        assert others == 36 - 15 + of_no_key


def test_messages_without_a_key_are_among_the_other_keys(collector, broker):
    jobs = broker.queue("jobs")
    jobs.put("a", key="k")
    jobs.put_many("bc")
    jobs.limit_every_key(max_in_flight=1)
    held = jobs.take_many(2, 0)
    found = samples(collector)
    numbers = {
        (dict(labels)["key"], dict(labels)["state"]): number
        for (name, labels), number in found.items()
        if name == "celery_fdb_key_messages"
    }
    assert len(held) == 2
    assert numbers == {("k", "ready"): 0, ("k", "leased"): 1, (OTHER, "ready"): 1, (OTHER, "leased"): 1}


def test_what_happened_is_counted_by_key(collector, broker, another):
    jobs = broker.queue("jobs")
    jobs.put_many("abcd", key="k")
    jobs.put("nobody's")
    held = {job.payload: job for job in jobs.take_many(5, 0)}
    held[b"a"].ack()
    held[b"b"].release()
    held[b"c"].bury()
    held[b"nobody's"].ack()
    sweep(another(), broker)
    broker._engine.upkeep.flush_totals()
    found = samples(collector)
    for name, number in {**HAPPENED, "published": 4}.items():
        assert value(found, f"celery_fdb_key_{name}_total", queue="jobs", key="k") == number, name
        assert value(found, f"celery_fdb_key_{name}_total", queue="jobs", key=OTHER) == 0, "it has a key or it has none"


def test_the_series_of_queues_are_bounded_and_lose_no_message(url, broker, monkeypatch):
    monkeypatch.setattr(metrics, "QUEUES", 2)
    for number in range(4):
        broker.queue(f"q{number}").put_many("x" * (number + 1))
    with closing(make_collector(url)) as collector:
        found = samples(collector)
    queues = {dict(labels)["queue"] for name, labels in found if name == "celery_fdb_queue_messages"}
    assert queues == {"q3", "q2", OTHER}
    assert value(found, "celery_fdb_queue_messages", queue=OTHER, state="ready") == 3


def test_the_counter_of_the_other_queues_grows_by_what_happens_in_them(url, broker, monkeypatch):
    """Prometheus takes it for a rate if a queue comes or goes, and each fall for a counter that began anew."""
    monkeypatch.setattr(metrics, "QUEUES", 1)
    broker.declare("a").put_many("xxx")
    broker.declare("b").put_many("xx")
    with closing(make_collector(url)) as collector:
        for longest, published in (("a", 3), ("b", 2 + 4)):
            broker._engine.upkeep.flush_totals()
            found = samples(collector)
            assert value(found, "celery_fdb_published_total", queue=longest) == published
            assert value(found, "celery_fdb_published_total", queue=OTHER) == 2
            broker.queue("a").purge()
            broker.queue("b").put_many("xxxx")


def test_what_is_named_as_the_others_are_is_one_of_them(url, broker):
    """Prometheus refuses a scrape with a series that is there twice."""
    broker.queue("(other)").put_many("xyz", key="k")
    broker.queue("jobs").put_many("xx", key=OTHER)
    broker.queue("jobs").put("x", key="k")
    broker._engine.upkeep.flush_totals()
    with closing(make_collector(url)) as collector:
        registry = CollectorRegistry()
        registry.register(collector)
        text = generate_latest(registry).decode()
    series = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert sorted(series) == sorted(set(series))
    found = parsed(text)
    assert value(found, "celery_fdb_queue_messages", queue=OTHER, state="ready") == 3
    assert value(found, "celery_fdb_published_total", queue=OTHER) == 3
    assert value(found, "celery_fdb_key_messages", queue="jobs", key=OTHER, state="ready") == 2
    assert value(found, "celery_fdb_key_published_total", queue="jobs", key=OTHER) == 2


def test_reply_queues_have_no_series(collector, broker):
    broker.declare("reply", auto_delete=True).put("a")
    broker.declare("passing", arguments={"x-expires": 60_000}).put("a")
    assert not any("queue" in dict(labels) for _, labels in samples(collector))


def test_a_store_that_does_not_answer_is_down_and_no_error():
    collector = make_collector("fdb+sqlite:////nosuch/folder/broker.db")
    assert samples(collector)[("celery_fdb_up", ())] == 0


@pytest.mark.parametrize("make", [make_collector, make_collector_of_tasks], ids=["broker", "tasks"])
def test_a_mistake_is_told_when_the_collector_is_made(make):
    with pytest.raises(OptionError, match="scheme"):
        make("redis://")
    with pytest.raises(OptionError, match="session_ttl"):
        make("fdb://", sesion_ttl=3)


def test_a_store_that_comes_back_is_up_again(broker):
    answers = [None, broker]

    def open_broker():
        if (answer := answers.pop(0)) is None:
            raise metrics.KombuFDBError("away")
        return answer

    collector = BrokerCollector(open_broker)
    assert samples(collector)[("celery_fdb_up", ())] == 0
    assert samples(collector)[("celery_fdb_up", ())] == 1


def test_all_names_are_exported_and_no_others(collector, broker):
    broker.queue("jobs").put("a", key="k")
    broker._engine.upkeep.flush_totals()
    assert {name for name, _ in samples(collector)} == NAMES


@pytest.mark.process
@pytest.mark.parametrize(
    ("options", "address", "is_open"),
    [
        ([], "127.0.0.1", False),
        (["--address", "localhost"], "localhost", False),
        (["--address", "::1"], "::1", False),
        (["--address", "0.0.0.0"], "0.0.0.0", True),
        (["--address", "::"], "::", True),
        (["--address", "metrics.internal"], "metrics.internal", True),
    ],
)
def test_the_endpoint_is_this_machines_unless_another_address_is_named(run, monkeypatch, options, address, is_open):
    class Server:
        server_port = 9808

        def __init__(self, address, _handler):
            bound.append(address[0])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def set_app(self, _app):
            pass

        serve_forever = shutdown = __exit__

    bound = []
    monkeypatch.setattr("celery_fdb.cli.servers._Server", Server)
    monkeypatch.setattr("celery_fdb.cli.servers._wait_for_the_end", lambda: None)
    result = run("metrics", *options)
    assert (result.code, bound) == (0, [address])
    assert ("there is no password" in result.err) == is_open


def test_the_endpoint_serves_until_it_is_told_to_end(url, broker):
    broker.queue("jobs").put("a")
    command = [sys.executable, "-m", "celery_fdb", "--broker", url, "metrics", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        address = re.search(r"http://\S+", process.stderr.readline())[0]
        with urllib.request.urlopen(address, timeout=DEADLINE_S) as answer:
            found = parsed(answer.read().decode())
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    assert value(found, "celery_fdb_queue_messages", queue="jobs", state="ready") == 1


# -- totals ------------------------------------------------------------------------------------------------------------


def test_totals_are_added_with_the_next_write_after_a_second(another, monkeypatch):
    broker = another()
    engine = broker._engine
    broker.queue("jobs").put("a")
    assert engine.inspect.totals() == {}, "not at once"
    monkeypatch.setattr(engine.transactions.totals, "next_s", 0.0)
    broker.queue("jobs").put("b")
    assert engine.inspect.totals() == {"jobs": {"published": 2}}, "what happened before, and its own"
    broker.queue("jobs").put("c")
    assert engine.inspect.totals() == {"jobs": {"published": 2}}


def test_what_is_left_is_added_when_the_store_is_closed(another, broker):
    other = another()
    other.queue("jobs").put_many("ab")
    other.queue("jobs").take(0).ack()
    other.close()
    assert broker._engine.inspect.totals() == {"jobs": {"published": 2, "claimed": 1, "acked": 1}}


@pytest.mark.parametrize("verb", [lambda *_: 1 / 0, lambda *_: None], ids=["fails", "writes nothing"])
def test_a_transaction_that_fails_or_writes_nothing_counts_nothing_and_loses_nothing(another, monkeypatch, verb):
    """Nor is it made to write."""
    broker = another()
    broker.queue("jobs").put("a")
    monkeypatch.setattr(broker._engine.transactions.totals, "next_s", 0.0)
    with suppress(ZeroDivisionError):
        broker._engine.transactions.write(verb)
    assert broker._engine.inspect.totals() == {}
    broker._engine.upkeep.flush_totals()
    assert broker._engine.inspect.totals() == {"jobs": {"published": 1}}


def test_totals_of_queues_that_are_gone_are_forgotten(broker):
    for name in ("stays", "goes"):
        broker.queue(name).put("a")
    broker._engine.upkeep.flush_totals()
    broker.queue("goes").drop()
    assert set(broker._engine.inspect.totals()) == {"stays"}
    broker._engine.transactions.totals.note(
        {("goes", "dead"): 1, ("", "late"): 1, ("stays", "conflicts"): 1, ("stays", "returned"): 1}
    )
    broker._engine.upkeep.flush_totals()
    assert list(broker._engine.upkeep.trim_totals())
    assert set(broker._engine.inspect.totals()) == {"stays", ""}


# -- the dashboard -----------------------------------------------------------------------------------------------------


def queries(node):
    if isinstance(node, dict):
        for name, child in node.items():
            if name in {"expr", "definition"}:
                yield child
            else:
                yield from queries(child)
    elif isinstance(node, list):
        for child in node:
            yield from queries(child)


def test_the_dashboard_names_only_metrics_that_are_exported_and_all_of_them():
    named = {
        name for query in queries(json.loads(DASHBOARD.read_text())) for name in re.findall(r"celery_fdb_\w+", query)
    }
    assert named == NAMES


def test_the_dashboards_panels_have_ids_titles_and_room_of_their_own():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({each["id"] for each in panels}) == len({each["title"] for each in panels}) == len(panels)
    cells = [
        (x, y)
        for each in panels
        for x in range(each["gridPos"]["x"], each["gridPos"]["x"] + each["gridPos"]["w"])
        for y in range(each["gridPos"]["y"], each["gridPos"]["y"] + each["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
