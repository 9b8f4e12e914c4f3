"""``export`` and ``import``: all of a broker into a file, or into another store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from celery_fdb.cli import json_object
from celery_fdb.cli.progress import bar
from celery_fdb.cli.terminal import Answer, Refused, Run, command
from celery_fdb.cli.where import Where
from celery_fdb.transfer import FileSource, Source, StoreSource, export_to, import_from

__all__ = ["export", "import_"]

leased_option = click.option(
    "--leased", is_flag=True, help="Take what workers hold too, as ready messages: for workers that are dead."
)


@command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@leased_option
def export(run: Run, *, file: Path, force: bool, leased: bool) -> Answer:
    """Write everything in the broker to FILE: queues, bindings, limits and all messages. The broker stays as it is.

    Stop the workers and publishers first. FILE can be read by its owner only.
    """
    if file.exists() and not force:
        raise Refused("the file exists", path=str(file), fix="Name another one, or say --force.")
    _existing(run.where)
    source = StoreSource(run.broker, leased=leased)
    try:
        with bar(run, "export", source.header.messages) as advance:
            number = export_to(file, source, advance)
    except OSError as error:
        raise _file_error(file, error) from error
    return Answer({"file": str(file), "messages": number}, [f"exported {number:,} message(s) to {file}"])


@command("import")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), required=False)
@click.option("--from", "url", metavar="URL", help="Straight from another store instead of a file.")
@click.option("--from-options", metavar="JSON", callback=json_object, help="That store's broker_transport_options.")
@click.option("--again", is_flag=True, help="Store a second time what was imported before.")
@leased_option
def import_(
    run: Run, *, file: Path | None, url: str | None, from_options: dict[str, Any], again: bool, leased: bool
) -> Answer:
    """Store everything of an export FILE, or of another store, in the broker.

    It may be killed at any point; the same command goes on where it was: nothing is lost and nothing doubled.
    """
    if (file is None) == (url is None):
        raise click.UsageError("name a FILE, or --from URL")
    try:
        if file is not None:
            source: Source = FileSource(file)
        else:
            source = StoreSource(run.also(_existing(Where(url=url, options=from_options))), leased=leased)
        with bar(run, "import", source.header.messages) as advance:
            done = import_from(source, run.broker, advance, again=again)
    except OSError as error:
        raise _file_error(file, error) from error
    document = {"source": source.header.source, "messages": done.messages, "stored": done.stored}
    before = f" ({done.messages - done.stored:,} were there from before)" if done.stored < done.messages else ""
    return Answer(document, [f"imported {done.messages:,} message(s){before}"])


def _existing(where: Where) -> Where:
    """Nothing is taken from a file that would only be made. Raises ``Refused``."""
    if where.absent is not None:
        raise Refused("there is no broker", path=where.absent, fix="Is the path right?")
    return where


def _file_error(file: Path | None, error: OSError) -> Refused:
    return Refused(
        "the file can't be used", path=str(error.filename or file), reason=error.strerror, fix="Is the path right?"
    )
