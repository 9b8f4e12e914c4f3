"""A FastAPI service that publishes, and the tasks of its worker."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from celery import Celery
from fastapi import FastAPI, Header, Request
from fastapi.responses import JSONResponse
from kombu.exceptions import OperationalError
from pydantic import BaseModel

celery = Celery("invoices", broker=os.environ.get("INVOICES_BROKER", "fdb+sqlite://"))
celery.conf.update(
    task_acks_late=True,
    task_ignore_result=True,
    task_publish_retry=False,  # one attempt, within publish_timeout
    broker_transport_options={
        "publish_timeout": 2.0,
        "connect_timeout": 2.0,
        # Kombu's own: how often it tries to connect for one publish. A client waits for the answer.
        "max_retries": 1,
        "interval_start": 0.1,
        "interval_step": 0.1,
        "interval_max": 0.1,
    },
)


@celery.task
def send_invoice(customer: str, order: int) -> None:
    print(f"invoice of order {order} sent to {customer}")


class Order(BaseModel):
    """What the client posts."""

    customer: str
    order: int


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    yield
    celery.close()  # hands its connections back


api = FastAPI(lifespan=lifespan)


@api.post("/invoices", status_code=202)
def invoice(order: Order, idempotency_key: Annotated[str | None, Header()] = None) -> dict[str, str]:
    headers = {"fair_key": order.customer}
    if idempotency_key:
        headers["dedup_id"] = idempotency_key
    return {"task": send_invoice.apply_async((order.customer, order.order), headers=headers).id}


@api.get("/health")
def health() -> dict[str, str]:
    with celery.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1, timeout=2)
        return {"broker": str(connection.as_uri())}


@api.exception_handler(OperationalError)
def away(_: Request, error: OperationalError) -> JSONResponse:
    return JSONResponse({"error": f"the queue is away: {error}"}, status_code=503, headers={"Retry-After": "5"})
