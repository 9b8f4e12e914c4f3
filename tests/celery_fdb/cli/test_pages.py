"""docs/cli.md and docs/metrics.md: their commands and code run. Their tables: ``tests/test_docs.py``."""

import re
import shlex
from pathlib import Path

import pytest
from celery import Celery
from prometheus_client import REGISTRY

from celery_fdb.cli import HOMES
from celery_fdb.history.options import History
from celery_fdb.history.views import metrics as by_task
from celery_fdb.history.views.runs import history_of
from celery_fdb.inspection.metrics import NAMES
from kombu_fdb import Broker

DOCS = Path(__file__).parents[3] / "docs"
CLI, METRICS = DOCS / "cli.md", DOCS / "metrics.md"


def test_the_page_names_only_metrics_that_are_exported():
    assert set(re.findall(r"celery_fdb_\w+", METRICS.read_text())) == NAMES | set(by_task.NAMES)


class Shop:
    """The page's app, as Celery hands it to its commands, and what its pages speak of."""

    no_color = True

    def __init__(self, url, directory):
        self.app = Celery("shop", broker=url, set_as_current=False)
        self.directory = directory
        task_id = iter(re.findall(r"[0-9a-f]{8}-[0-9a-f-]+", CLI.read_text()))
        self.waiting, self.dead = next(task_id), next(each for each in task_id if each.startswith("0d9c"))

    def fill(self, broker):
        history_of(broker).set_settings(History())
        for number in range(3):
            self.app.send_task("shop.pay", headers={"fair_key": f"tenant-{number + 6}"})
        self.app.send_task("shop.pay", task_id=self.dead, priority=9)
        for job in broker.queue("celery").take_many(10, 0):
            job.bury(error="boom")
        broker.close()
        self.app.send_task("shop.pay", headers={"fair_key": "tenant-7"})
        for other in ("broker", "other"):
            with Broker.open(f"fdb+sqlite:///{self.directory}/{other}.db") as embedded:
                embedded.queue("celery").put(other)
        self.app.send_task("shop.pay", task_id=self.waiting, countdown=1000)

    def arguments(self, line):
        """A line of the page, with its places in this test's directory."""
        words = shlex.split(re.sub(r"/var/(lib|backups)/shop", str(self.directory), line))
        return words[4:] if words[0] == "celery" else words[3:]


@pytest.fixture
def shop(url, another, tmp_path):
    shop = Shop(url, tmp_path / "shop")
    (tmp_path / "shop").mkdir()
    shop.fill(another())
    yield shop
    shop.app.pool.force_close_all()
    shop.app.close()


def test_the_commands_on_the_page_run(run, shop):
    lines = re.findall(r"^\$ (.*)$", CLI.read_text(), re.MULTILINE)
    assert len(lines) > 30
    for line in lines:
        result = run(*shop.arguments(line), broker=None, obj=shop)
        assert result.code == 0, f"{line}: {result.err}"
    spoken = {shlex.split(line)[line.startswith("python") + 4] for line in lines}
    assert spoken >= set(HOMES) - {"export", "web", "tour"}, "each command is shown"


@pytest.mark.filterwarnings("ignore::DeprecationWarning:opentelemetry.*")
def test_the_code_on_the_page_of_metrics_runs(url, broker):
    before = set(REGISTRY._collector_to_names)
    names = {"url": url}
    for block in re.findall(r"```python\n(.*?)```", METRICS.read_text(), re.DOTALL):
        exec(compile(block, "metrics.md", "exec"), names)
    (collector,) = set(REGISTRY._collector_to_names) - before
    assert REGISTRY.get_sample_value("celery_fdb_up") == 1
    REGISTRY.unregister(collector)
    collector.close()
