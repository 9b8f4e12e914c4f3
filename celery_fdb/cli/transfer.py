"""``export`` and ``import``: all of a broker into a file, or into another store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from celery_fdb import brokers
from celery_fdb.cli.options import json_object
from celery_fdb.cli.terminal import Answer, Invocation, Refused, command
from celery_fdb.operations import transfer
from kombu_fdb.primitives.plural import plural

leased_option = click.option(
    "--leased", is_flag=True, help="Include messages that workers hold, as ready ones; for workers that are dead."
)


def _no_dash(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Refuse ``-``: a pipe can be neither replaced as a whole nor read twice."""
    del ctx
    if value is not None and str(value) == "-":
        raise click.BadParameter("a pipe doesn't work: name a file", param=param)
    return value


@command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), callback=_no_dash)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@leased_option
def export(invocation: Invocation, *, file: Path, force: bool, leased: bool) -> Answer:
    """Write everything in the broker to FILE: queues, bindings, limits and all messages. The broker stays as it is.

    Stop the workers and publishers first. Only the owner can read FILE.
    """
    _check_exists(*invocation.resolve())
    try:
        if file.exists() and not force:
            raise Refused("the file exists", path=str(file), fix="Name another file, or add --force.")
        source = transfer.broker_source(invocation.broker, leased=leased)
        with invocation.bar("export", source[0].messages) as advance:
            number = transfer.export_to(file, source, advance)
    except OSError as error:
        raise _file_error(file, error) from error
    return Answer({"file": str(file), "messages": number}, [f"exported {plural(number, 'message')} to {file}"])


@command("import")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), required=False, callback=_no_dash)
@click.option("--from", "url", metavar="URL", help="Import directly from another store instead of a file.")
@click.option("--from-options", metavar="JSON", callback=json_object, help="That store's broker_transport_options.")
@click.option("--again", is_flag=True, help="Import again what was imported before.")
@leased_option
def import_(
    invocation: Invocation,
    *,
    file: Path | None,
    url: str | None,
    from_options: dict[str, Any],
    again: bool,
    leased: bool,
) -> Answer:
    """Import everything from an export FILE, or from another store, into the broker.

    If it is killed, run the same command again: it continues where it stopped, and nothing is lost or doubled.
    """
    try:
        if file is not None and url is None:
            source = transfer.file_source(file)
        elif file is None and url is not None:
            _check_exists(url, from_options)
            source = transfer.broker_source(invocation.also(url, from_options), leased=leased)
        else:
            raise click.UsageError("name a FILE, or --from URL")
        with invocation.bar("import", source[0].messages) as advance:
            number, stored = transfer.import_from(source, invocation.made(), advance, again=again)
    except OSError as error:
        raise _file_error(file, error) from error
    document = {"source": source[0].source, "messages": number, "stored": stored}
    before = f" ({number - stored:,} were already there)" if stored < number else ""
    return Answer(document, [f"imported {plural(number, 'message')}{before}"])


def _check_exists(url: str, options: dict[str, Any]) -> None:
    """Check that the broker's file exists, where it is a file. Raises ``Refused``."""
    if (missing := brokers.absent(url, options)) is not None:
        raise Refused("there is no broker", path=str(missing.path), fix="Check the path.")


def _file_error(file: Path | None, error: OSError) -> Refused:
    return Refused(
        "the file can't be used", path=str(error.filename or file), reason=error.strerror, fix="Check the path."
    )
