"""``metrics``: the Prometheus endpoint, or its text once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from typing import Protocol

import click

from celery_fdb.cli.serving.listening import cannot_listen, is_loopback
from celery_fdb.cli.terminal import Answer, Refused, Run, command

__all__ = ["metrics"]


class Closing(Protocol):
    """Gives its store back."""

    def close(self) -> None: ...


@command()
@click.option("--port", type=click.IntRange(0, 65_535), default=9808, show_default=True, help="0 picks a free port.")
@click.option("--address", default="127.0.0.1", show_default=True, help="Any other address is open to other hosts.")
@click.option(
    "--keys", type=click.IntRange(0), default=10, show_default=True, help="How many keys of each queue get series."
)
@click.option("--once", is_flag=True, help="Print the metrics and exit.")
def metrics(run: Run, *, port: int, address: str, keys: int, once: bool) -> Answer | None:
    """Serve Prometheus metrics of the broker on http://ADDRESS:PORT/metrics until stopped.

    Anyone who can connect can read the metrics: by default, the users of this machine.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest, start_http_server

        from celery_fdb.history.views.metrics import TaskCollector
        from celery_fdb.inspection.metrics import BrokerCollector
    except ImportError as error:
        raise Refused("prometheus-client is not installed", fix="Run: pip install prometheus-client") from error
    run.where.location()  # wrong usage is told now, an unreachable store at each scrape
    collectors = (BrokerCollector(run.where.open, keys=keys), TaskCollector(run.where.open))
    registry = CollectorRegistry()
    for each in collectors:
        registry.register(each)
    if once:
        text = generate_latest(registry).decode()
        _close(collectors)
        return Answer({"metrics": text}, [text.rstrip()])
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        raise cannot_listen(address, port, error) from error
    if not is_loopback(address):
        click.echo(f"Note: anyone who can connect to {address} can read the metrics; there is no password.", err=True)
    click.echo(f"serving http://{address}:{server.server_port}/metrics", err=True)
    _wait_for_the_end()
    server.shutdown()
    server.server_close()
    thread.join()
    _close(collectors)
    return None


def _close(collectors: Iterable[Closing]) -> None:
    for each in collectors:
        each.close()


def _wait_for_the_end() -> None:
    """Ctrl-C, or what a service manager sends."""
    end = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: end.set())
    end.wait()
