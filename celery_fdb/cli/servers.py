"""Commands that serve: ``metrics`` and ``web``."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from ipaddress import ip_address
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import click

from celery_fdb import brokers
from celery_fdb.cli.terminal import Answer, Invocation, Refused, command
from celery_fdb.inspection.overview import LOOPBACK, is_ours


def cannot_listen(address: str, port: int, error: OSError) -> Refused:
    return Refused(
        "can't listen on this address",
        address=address,
        port=port,
        reason=error.strerror,
        fix="Choose another --port.",
    )


# -- metrics -----------------------------------------------------------------------------------------------------------


#: Seconds that a client has to send something, and the most scrapes at a time. A further scrape ends the oldest.
TIMEOUT_S = 10.0
MOST_SCRAPES = 50
MISDIRECTED = b"These metrics are not known by that name: ask for http://127.0.0.1.\n"


@command()
@click.option("--port", type=click.IntRange(0, 65_535), default=9808, show_default=True, help="0 picks a free port.")
@click.option("--address", default="127.0.0.1", show_default=True, help="Any other address is open to other hosts.")
@click.option(
    "--keys", type=click.IntRange(0), default=10, show_default=True, help="How many keys of each queue get series."
)
@click.option("--once", is_flag=True, help="Print the metrics and exit.")
def metrics(invocation: Invocation, *, port: int, address: str, keys: int, once: bool) -> Answer | None:
    """Serve Prometheus metrics of the broker on http://ADDRESS:PORT/metrics until stopped.

    Anyone who can connect can read the metrics: by default, the users of this machine.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app

        from celery_fdb.history.views.metrics import TaskCollector
        from celery_fdb.inspection.metrics import BrokerCollector
    except ImportError as error:
        raise Refused("prometheus-client is not installed", fix="Run: pip install 'celery-fdb[metrics]'") from error
    brokers.location_of(*invocation.resolve())  # wrong usage is an error now, an unreachable store at each scrape
    registry = CollectorRegistry()
    with (
        closing(BrokerCollector(invocation.open, keys=keys)) as of_broker,
        closing(TaskCollector(invocation.open)) as of_tasks,
    ):
        registry.register(of_broker)
        registry.register(of_tasks)
        if once:
            text = generate_latest(registry).decode()
            return Answer({"metrics": text}, [text.rstrip()])
        _serve_metrics(make_wsgi_app(registry), address, port)
    return None


def _serve_metrics(app: Any, address: str, port: int) -> None:
    """Serve the metrics until stopped."""
    try:
        server = _Server((address, port), _Handler)
    except OSError as error:
        raise cannot_listen(address, port, error) from error
    if not _is_loopback(address):
        click.echo(f"Note: anyone who can connect to {address} can read the metrics; there is no password.", err=True)
    click.echo(f"serving http://{address}:{server.server_port}/metrics", err=True)
    server.set_app(_guarded(app, is_local=_is_loopback(address)))
    with server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        _wait_for_the_end()
        server.shutdown()
        thread.join()


class _Handler(WSGIRequestHandler):
    timeout = TIMEOUT_S

    def log_message(self, *_: object) -> None:
        """Log nothing: each scrape would log a line."""


class _Server(ThreadingMixIn, WSGIServer):
    """Serves :data:`MOST_SCRAPES` scrapes at a time: a client that sends half a request holds a thread and a file."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        #: The open requests, in the order in which they came.
        self._asking: dict[Any, None] = {}
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._asking[request] = None
            oldest = next(iter(self._asking)) if len(self._asking) > MOST_SCRAPES else None
            if oldest is not None:
                del self._asking[oldest]
        if oldest is not None:
            with suppress(OSError):  # the client has gone by itself
                oldest.shutdown(socket.SHUT_RDWR)  # the request's thread then closes it
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log no error if the client has gone, or sends nothing."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._asking.pop(request, None)
        super().shutdown_request(request)


def _is_loopback(address: str) -> bool:
    """Whether only the users of this machine can connect to this address."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _guarded(app: Any, *, is_local: bool) -> Any:
    """The application. On loopback it refuses foreign host names, against DNS rebinding of a browser."""

    def guarded(environ: dict[str, Any], start_response: Any) -> Any:
        if is_local and not is_ours(environ.get("HTTP_HOST", ""), LOOPBACK):
            start_response("421 Misdirected Request", [("Content-Type", "text/plain; charset=utf-8")])
            return [MISDIRECTED]
        return app(environ, start_response)

    return guarded


def _wait_for_the_end() -> None:
    end = threading.Event()
    _on_the_end(end.set)
    end.wait()


def _on_the_end(end: Callable[[], None]) -> None:
    """Call ``end`` at Ctrl-C, or at a service manager's signal."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: end())


# -- web ---------------------------------------------------------------------------------------------------------------


VARIABLE = "CELERY_FDB_WEB_TOKEN"
#: Seconds for pages to end when the server stops; live pages would go on.
GRACE_S = 1
#: Connections that the system accepts before the server takes the first of them.
BACKLOG = 64


@command()
@click.option("--port", type=click.IntRange(0, 65_535), default=9810, show_default=True, help="0 picks a free port.")
@click.option("--address", default="127.0.0.1", show_default=True, help="Any other address needs a token.")
@click.option("--write", is_flag=True, help="Let people act: pause, replay, cancel, limit. Else pages only show.")
@click.option("--show-bodies", is_flag=True, help="Show messages' bodies and arguments.")
@click.option("--token-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="What to log in with.")
@click.option(
    "--token", envvar=VARIABLE, show_envvar=True, help="The token itself, which others see in the list of processes."
)
@click.option(
    "--allow-host", multiple=True, metavar="NAME", help="Names by which browsers may ask for it, as a proxy's."
)
@click.option("--root-path", default="", metavar="PATH", help="The prefix that a proxy in front of it removes.")
@click.option(
    "--forwarded-allow-ips",
    default="",
    metavar="ADDRESSES",
    help="Proxies whose X-Forwarded-For and X-Forwarded-Proto are believed, separated by commas.",
)
@click.option("--without-login", is_flag=True, help="No token: all who can connect may do what the pages offer.")
def web(invocation: Invocation, **given: Any) -> None:
    """Serve the dashboard on http://ADDRESS:PORT/ until stopped.

    By default for the users of this machine, and read-only.
    """
    brokers.location_of(*invocation.resolve())  # wrong usage is an error now, an unreachable store on each page
    token = _token(given["token_file"], given["token"])
    is_local = _is_loopback(given["address"])
    if token is None and (not is_local or given["allow_host"] or given["root_path"]):
        if not given["without_login"]:
            fix = "Give it a --token-file, or say --without-login if all who can connect may use it."
            raise Refused("other hosts could open the dashboard without logging in", address=given["address"], fix=fix)
        may = "look and act" if given["write"] else "look"
        click.echo(f"Note: anyone who can connect to {given['address']} may {may}; there is no login.", err=True)
    application = _application(invocation, given, token, is_local=is_local)
    with closing(_listen(given["address"], given["port"])) as listener:
        _serve(application, listener, given)


def _token(file: Path | None, given: str | None) -> str | None:
    if file is None:
        if given is None and VARIABLE in os.environ:
            fix = "Set it to the token, or unset it if there is none."
            raise Refused("the environment variable with the token is empty", variable=VARIABLE, fix=fix)
        return given
    try:
        if file.stat().st_mode & 0o044:
            click.echo(f"warning: other users of this machine can read the token: chmod go= {file}", err=True)
        return file.read_text().strip()
    except (OSError, ValueError) as error:
        raise Refused("the token can't be read", path=str(file), reason=str(error), fix="Name a text file.") from error


def _application(invocation: Invocation, given: dict[str, Any], token: str | None, *, is_local: bool) -> Any:
    try:
        from celery_fdb.cli import connections  # noqa: F401 - uvicorn's absence is told here, too
        from celery_fdb.web import dashboard
    except ImportError as error:
        fix = "Run: pip install 'celery-fdb[web]'"
        raise Refused("the dashboard's libraries are not installed", missing=error.name, fix=fix) from error
    url, options = invocation.resolve()
    named = (given["address"], socket.gethostname(), *given["allow_host"])
    # Without a token, a foreign site whose name points here would be let in as a visitor.
    checked = is_local or token is None or bool(given["allow_host"])
    return dashboard(
        url,
        options=options,
        app=invocation.app_of_broker,
        token=token,
        anonymous=token is None,
        read_only=not given["write"],
        show_bodies=given["show_bodies"],
        hosts=(*LOOPBACK, *named) if checked else None,
    )


def _listen(address: str, port: int) -> socket.socket:
    try:
        return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError as error:
        raise cannot_listen(address, port, error) from error


def _serve(application: Any, listener: socket.socket, given: dict[str, Any]) -> None:
    import uvicorn

    from celery_fdb.cli import connections

    prefix = given["root_path"].strip("/")
    config = uvicorn.Config(
        application,
        proxy_headers=bool(given["forwarded_allow_ips"]),
        forwarded_allow_ips=given["forwarded_allow_ips"] or None,
        http=connections.TimedProtocol,
        ws="none",
        backlog=BACKLOG,
        log_level="warning",
        server_header=False,
        root_path=f"/{prefix}" if prefix else "",  # as ASGI has it
        timeout_graceful_shutdown=GRACE_S,
    )
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    click.echo(f"serving http://{shown}:{port}/{' (read-only)' if not given['write'] else ''}", err=True)
    # At its end uvicorn raises the signal again, which would kill this process before its connections are closed.
    _on_the_end(lambda: None)
    uvicorn.Server(config).run(sockets=[listener])
