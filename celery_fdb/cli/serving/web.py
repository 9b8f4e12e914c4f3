"""``web``: the dashboard on a port of its own."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from celery_fdb.cli.serving.connections import cannot_listen
from celery_fdb.cli.terminal import Refused, Run, command
from celery_fdb.inspection.hosts import LOOPBACK, is_loopback

VARIABLE = "CELERY_FDB_WEB_TOKEN"
#: Seconds that pages have to end when it is stopped: those that are live would never.
GRACE_S = 1


@command()
@click.option("--port", type=click.IntRange(0, 65_535), default=9810, show_default=True, help="0 picks a free port.")
@click.option("--address", default="127.0.0.1", show_default=True, help="Any other address needs a token.")
@click.option("--write", is_flag=True, help="Let people act: pause, replay, cancel, limit. Else pages only show.")
@click.option("--show-bodies", is_flag=True, help="Show messages' bodies and arguments.")
@click.option("--token-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="What to log in with.")
@click.option("--token", envvar=VARIABLE, show_envvar=True, help="The same; in the list of processes.")
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
@click.option("--without-login", is_flag=True, help="No token: everybody who can connect may do what the pages offer.")
def web(run: Run, **given: Any) -> None:
    """Serve the dashboard on http://ADDRESS:PORT/ until stopped.

    By default for the users of this machine, and read-only.
    """
    run.where.location()  # wrong usage is told now, an unreachable store on each page
    token = _token(given["token_file"], given["token"])
    is_local = is_loopback(given["address"])
    if token is None and (not is_local or given["allow_host"] or given["root_path"]):
        if not given["without_login"]:
            fix = "Give it a --token-file, or say --without-login if everybody who can connect may use it."
            raise Refused("other hosts could open the dashboard without logging in", address=given["address"], fix=fix)
        may = "look and act" if given["write"] else "look"
        click.echo(f"Note: anyone who can connect to {given['address']} may {may}; there is no login.", err=True)
    application = _application(run, given, token, is_local=is_local)
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


def _application(run: Run, given: dict[str, Any], token: str | None, *, is_local: bool) -> Any:
    try:
        from celery_fdb.web import dashboard
    except ImportError as error:
        fix = "Run: pip install 'celery-fdb[web]'"
        raise Refused("the dashboard's libraries are not installed", missing=error.name, fix=fix) from error
    url, options = run.where.resolve()
    named = (given["address"], socket.gethostname(), *given["allow_host"])
    # Without a token, a site whose name is made to lead here would be anybody who can connect.
    checked = is_local or token is None or bool(given["allow_host"])
    return dashboard(
        url,
        options=options,
        app=run.where.app_of_broker,
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


def _prefix(path: str) -> str:
    """As ASGI has it: a slash before it and none behind it, whatever was written."""
    inner = path.strip("/")
    return f"/{inner}" if inner else ""


def _serve(application: Any, listener: socket.socket, given: dict[str, Any]) -> None:
    import uvicorn

    from celery_fdb.cli.serving.connections import BACKLOG, Connection

    config = uvicorn.Config(
        application,
        proxy_headers=bool(given["forwarded_allow_ips"]),
        forwarded_allow_ips=given["forwarded_allow_ips"] or None,
        http=Connection,
        ws="none",
        backlog=BACKLOG,
        log_level="warning",
        server_header=False,
        root_path=_prefix(given["root_path"]),
        timeout_graceful_shutdown=GRACE_S,
    )
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    click.echo(f"serving http://{shown}:{port}/{' (read-only)' if not given['write'] else ''}", err=True)
    uvicorn.Server(config).run(sockets=[listener])
