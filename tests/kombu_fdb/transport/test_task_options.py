"""Options of celery-fdb that a task only seems to have (transport/worker.py)."""

import logging

import pytest
from celery import Celery, Task, signals

from celery_fdb import install
from celery_fdb.tasks import failures
from celery_fdb.tasks.task import Backoff
from kombu_fdb.transport.worker import OPTIONS, without_effect


class Own(Task):
    """A base class of the application."""

    abstract = True


class Scheduled(Backoff, Task):
    """As docs/tasks.md has it."""

    abstract = True


@pytest.fixture
def app(channel):
    """``channel``: a worker has one of our transport, too."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    yield app
    app.close()


class Worker:
    """As far as the signal's receivers look."""

    pool = None

    def __init__(self, app):
        self.app = app

    def on_close(self):
        pass


def charge(customer):
    pass


@pytest.mark.parametrize("base", [None, Own])
def test_options_without_their_task_class_are_found(app, base):
    for option in OPTIONS:
        app.task(charge, name=option, base=base, **{option: "1s"})
    assert without_effect(app) == [f"{option} ({option})" for option in sorted(OPTIONS)]


@pytest.mark.parametrize("base", [None, Own])
def test_options_that_work_are_not(app, base):
    install(app)
    app.conf.fdb_dead_letter_failures = True
    options = {"fair_key": "customer", "max_in_flight": 1, "rate_limit_key": "1/s", "dedup_id": "customer"}
    more = {"dedup_window": 5, "dead_letter": True, "backoff": "1s"}
    app.task(charge, name="shop.charge", base=base, acks_late=True, **options, **more)
    assert without_effect(app) == []


def test_parts_of_it_work_by_themselves(app):
    failures.install(app)
    app.conf.fdb_dead_letter_failures = True
    app.task(charge, name="a", base=Scheduled, backoff="1s", dead_letter=True)
    app.task(charge, name="b", backoff=3)  # its own, whatever it means
    assert without_effect(app) == []


def test_a_setting_without_effect_is_found(app):
    app.conf.fdb_dead_letter_failures = True
    assert without_effect(app) == ["the setting fdb_dead_letter_failures"]


def test_a_worker_that_starts_warns_once(app, caplog):
    for number in range(7):
        app.task(charge, name=f"shop.{number}", fair_key="customer")
    with caplog.at_level(logging.WARNING):
        signals.worker_ready.send(sender=Worker(app))
    (record,) = [each for each in caplog.records if "without effect" in each.message]
    assert "shop.0 (fair_key)" in record.message
    assert "and 2 more" in record.message
    assert "celery_fdb.install(app)" in record.message
