"""A broker, a Celery app that publishes to it, and an action done to it."""

import pytest

from celery_fdb.operations.action import ASKED_FIELD as FIELD
from celery_fdb.operations.action import Request, log_audit
from celery_fdb.operations.catalogue import ACTIONS


@pytest.fixture
def app(url, new_app):
    return new_app(url, backend="cache+memory://")


@pytest.fixture
def do(broker):
    """An action, as a page does it: asked, and confirmed. One that goes on was asked before."""
    before = {}

    def do(name, queue="q", **given):
        action, request = ACTIONS[name], Request(queue, **given)
        if request.mark and name in before:
            request = request._replace(fields={**request.fields, FIELD: before[name]})
        else:
            request = action.ask(broker, request)
            before[name] = request.fields.get(FIELD, "")
        return action.perform(broker, request, log_audit("ann"))

    return do


@pytest.fixture
def spots(broker):
    """Where the messages of a queue stand."""

    def spots(state="ready", queue="q"):
        return [each.spot for each in broker.queue(queue).page(500, state=state).messages]

    return spots


@pytest.fixture(autouse=True)
def _jobs_are_kept(jobs_are_kept):
    """In each test here."""
