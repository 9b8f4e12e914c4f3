"""A broker, a Celery app that publishes to it, and an action done to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_fdb.operations.action import ASKED_FIELD as FIELD
from celery_fdb.operations.action import Outcome, Request, log_audit
from celery_fdb.operations.catalogue import ACTIONS
from kombu_fdb import Broker, Spot


@pytest.fixture
def app(url: str, new_app: Callable[..., Celery]) -> Celery:
    return new_app(url, backend="cache+memory://")


@pytest.fixture
def do(broker: Broker) -> Callable[..., Outcome]:
    """An action, as a page does it: asked, and confirmed. One that goes on was asked before."""
    before: dict[str, str] = {}

    def do(name: str, queue: str = "q", **given: Any) -> Outcome:
        action, request = ACTIONS[name], Request(queue, **given)
        if request.mark and name in before:
            request = request._replace(fields={**request.fields, FIELD: before[name]})
        else:
            request = action.ask(broker, request)
            before[name] = request.fields.get(FIELD, "")
        return action.perform(broker, request, log_audit("ann"))

    return do


@pytest.fixture
def spots(broker: Broker) -> Callable[..., list[Spot]]:
    """Where the messages of a queue stand."""

    def spots(state: Any = "ready", queue: str = "q") -> list[Spot]:
        return [each.spot for each in broker.queue(queue).page(500, state=state).messages]

    return spots


@pytest.fixture(autouse=True)
def _jobs_are_kept(jobs_are_kept: None) -> None:
    """In each test here."""
