"""``python -m celery_fdb.contrib.outbox -A proj --connect proj.database:connect``: the relay of a DB-API outbox.

Exit codes: 0 stopped or done, 1 rows could not be published (``--once``), 2 wrong usage, 3 the database or, with
``--once``, the broker can't be reached.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import click
from celery import Celery
from celery.app.utils import find_app

from celery_fdb.contrib.outbox import Outbox
from celery_fdb.contrib.outbox.relay import FORMAT, run
from kombu_fdb.errors import InvalidArgument


def _app(ctx: click.Context, param: click.Parameter, value: str) -> Celery:
    del ctx
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as celery -A does
    try:
        return find_app(value)
    except (ImportError, AttributeError) as error:
        raise click.BadParameter(f"can't import this Celery app: {error}", param=param) from error


def _connect(ctx: click.Context, param: click.Parameter, value: str) -> Callable[[], Any]:
    del ctx
    module_name, _, name = value.partition(":")
    try:
        found = getattr(import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise click.BadParameter(f"{error}; write package.module:function", param=param) from error
    if not callable(found):
        raise click.BadParameter(f"{value} is not a function that opens a connection", param=param)
    return found  # type: ignore[no-any-return]  # whatever it returns


@click.command()
@click.option("-A", "--app", required=True, callback=_app, help="The Celery app, as in celery -A.")
@click.option(
    "--connect", required=True, callback=_connect, metavar="MODULE:FUNCTION", help="Opens a DB-API connection."
)
@click.option(
    "--mark", type=click.Choice(["?", "%s"]), help="The driver's placeholder, if the driver does not name it."
)
@click.option("--interval", default=1.0, show_default=True, help="Seconds, 0.01 to 3600.")
@click.option("--limit", default=100, show_default=True, help="Rows per batch, 1 to 2000.")
@click.option("--once", is_flag=True, help="Publish what is due and exit.")
@click.option("--retry-poison", is_flag=True, help="First retry the rows that failed for good.")
def main(
    app: Celery,
    connect: Callable[[], Any],
    mark: str | None,
    interval: float,
    limit: int,
    once: bool,
    retry_poison: bool,
) -> None:
    """Publish the tasks of an SQL outbox. You can run several at once."""
    logging.basicConfig(level=logging.INFO, format=FORMAT)
    outbox = Outbox(app, connect, mark)
    try:
        code = run(outbox, interval=interval, limit=limit, once=once, retry_poison=retry_poison)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error
    raise SystemExit(code)


if __name__ == "__main__":
    main()
