"""``metrics``: the Prometheus endpoint, or its text once."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import click

from celery_fdb.cli.serving.connections import cannot_listen
from celery_fdb.cli.terminal import Answer, Refused, Run, command
from celery_fdb.inspection.hosts import LOOPBACK, is_loopback, is_ours

#: Seconds in which a client has to send something; scrapes at a time. One that comes then ends the oldest.
TIMEOUT_S = 10.0
MOST = 50
MISDIRECTED = b"These metrics are not known by that name: ask for http://127.0.0.1.\n"


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
        from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app

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
        server = _Server((address, port), _Handler)
    except OSError as error:
        raise cannot_listen(address, port, error) from error
    if not is_loopback(address):
        click.echo(f"Note: anyone who can connect to {address} can read the metrics; there is no password.", err=True)
    click.echo(f"serving http://{address}:{server.server_port}/metrics", err=True)
    server.set_app(_guarded(make_wsgi_app(registry), is_local=is_loopback(address)))
    with server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        _wait_for_the_end()
        server.shutdown()
        thread.join()
    _close(collectors)
    return None


class _Handler(WSGIRequestHandler):
    timeout = TIMEOUT_S

    def log_message(self, *_: object) -> None:
        """Nothing for each scrape."""


class _Server(ThreadingMixIn, WSGIServer):
    """Clients that send half a request hold a thread and a file each: no more than :data:`MOST`."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        #: In the order in which they came.
        self._asking: dict[Any, None] = {}
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._asking[request] = None
            oldest = next(iter(self._asking)) if len(self._asking) > MOST else None
            if oldest is not None:
                del self._asking[oldest]
        if oldest is not None:
            with suppress(OSError):  # it has gone by itself
                oldest.shutdown(socket.SHUT_RDWR)  # its thread then closes it
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone, or sends nothing, is no error of ours."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._asking.pop(request, None)
        super().shutdown_request(request)


def _guarded(app: Any, *, is_local: bool) -> Any:
    """On the loopback address for those who ask for it by a name of this machine: a browser may have been led here."""

    def guarded(environ: dict[str, Any], start_response: Any) -> Any:
        if is_local and not is_ours(environ.get("HTTP_HOST", ""), LOOPBACK):
            start_response("421 Misdirected Request", [("Content-Type", "text/plain; charset=utf-8")])
            return [MISDIRECTED]
        return app(environ, start_response)

    return guarded


def _close(collectors: Iterable[Closing]) -> None:
    for each in collectors:
        each.close()


def _wait_for_the_end() -> None:
    """Ctrl-C, or what a service manager sends."""
    end = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: end.set())
    end.wait()
