"""Pause and resume: a queue, or one key of it."""

from __future__ import annotations

from celery_fdb.operations.deed import Outcome, Request
from kombu_fdb import Broker

__all__ = ["pause", "resume"]


def pause(broker: Broker, request: Request) -> Outcome:
    broker.queue(request.queue).pause(request.key)
    return Outcome(f"Paused {request}.")


def resume(broker: Broker, request: Request) -> Outcome:
    broker.queue(request.queue).resume(request.key)
    return Outcome(f"Resumed {request}.")
