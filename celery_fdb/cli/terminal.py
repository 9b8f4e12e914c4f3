"""The terminal: how commands are made, find their broker, read options, and print tables, JSON, errors and progress."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from io import TextIOWrapper
from typing import Any, NamedTuple

import click
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from celery_fdb import brokers
from celery_fdb.cli.options import check_text, json_object
from celery_fdb.inspection import formats
from kombu_fdb import Broker
from kombu_fdb.errors import CommitUnknown, InvalidArgument, KombuFDBError, LimitExceeded, OptionError, StoreError
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.masking import plain
from kombu_fdb.primitives.ranges import rate_of

DONE, NOT_DONE, WRONG_USAGE, UNREACHABLE = range(4)
#: Columns if the output is not a terminal, whatever $COLUMNS says: lines that a program reads must not be wrapped.
MOST_COLUMNS = 10_000
NAME_IT = "Name it with --broker fdb+sqlite:////path/broker.db, or use celery -A with an app whose broker_url it is."
#: ``user:password@`` in an error's text; the advice ``description:id@host`` stays readable.
SECRET = re.compile(r"(?<=:)(?!(?<=description:)id@)[^:@/\s]+(?=@)")


class Answer(NamedTuple):
    """``document``: printed with --json; ``shown``: printed for people. ``ok``: False makes the exit code 1."""

    document: Any
    shown: Sequence[RenderableType] = ()
    ok: bool = True


class Refused(KombuFDBError):
    """The command refused, and changed nothing."""

    text = "refused"


@dataclass
class Invocation:
    """One invocation of a command: its output, and its broker: the one named on the command line, or else the app's.

    ``app``: a Celery app, or None. URL and options may hold a password. ``project``: tells the broker of a project
    whose settings may name another than its app's, as Django's do.
    """

    app: Any = None
    url: str | None = field(default=None, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    no_color: bool = False
    project: Callable[[], tuple[str, dict[str, Any]]] | None = field(default=None, repr=False)
    as_json: bool = False
    _held: ExitStack = field(default_factory=ExitStack, init=False, repr=False)
    _broker: Broker | None = field(default=None, init=False, repr=False)

    def error(self, message: str, **_style: Any) -> None:
        """Report an error. Celery calls this for options in the wrong place."""
        click.echo(message, err=True)

    # -- the broker --------------------------------------------------------------------------------------------------

    def resolve(self) -> tuple[str, dict[str, Any]]:
        """The broker's URL and options. Raises ``OptionError``."""
        if self.url is not None:
            return self.url, dict(self.options)
        if self.project is not None:
            url, configured = self.project()
        elif self.app is not None:
            url, configured = brokers.broker_of(self.app)
        else:
            raise OptionError("no broker named", fix=NAME_IT)
        return url, {**configured, **self.options}

    @property
    def app_of_broker(self) -> Any:
        """The app, if the broker is the app's own."""
        return self.app if self.url is None else None

    def open(self) -> Broker:
        """Open the broker anew, for the caller to close. Does not create its file: the path may be a typo.

        Raises ``OptionError``, ``StoreUnavailable``, ``FormatError``.
        """
        url, options = self.resolve()
        return brokers.open_existing(url, **options)

    @property
    def broker(self) -> Broker:
        """The broker, opened at the first access. Raises as :meth:`open`."""
        if self._broker is None:
            self._broker = self._held.enter_context(self.open())
        return self._broker

    def made(self) -> Broker:
        """The broker, whose file is created if it does not exist."""
        if self._broker is None:
            url, options = self.resolve()
            self._broker = self._held.enter_context(Broker.open(url, **options))
        return self._broker

    def also(self, url: str, options: Mapping[str, Any]) -> Broker:
        """Another broker, closed with the invocation."""
        return self._held.enter_context(brokers.open_existing(url, **options))

    # -- the output --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def console(self) -> Console:
        """Standard output, without markup: text that is stored in a queue is printed as it is."""
        return self._console(stderr=False)

    @functools.cached_property
    def errors(self) -> Console:
        """Standard error, also for progress."""
        return self._console(stderr=True)

    def _console(self, *, stderr: bool) -> Console:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # ``LC_ALL=C``: as Python does for standard error
        console = Console(stderr=stderr, no_color=self.no_color or None, markup=False, highlight=False, emoji=False)
        if not console.is_terminal:
            console.width = MOST_COLUMNS
        return console

    @contextmanager
    def bar(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """A progress bar, on a terminal only. ``total``: None if it is unknown.

        Gives a function that takes how many are done.
        """
        shape = (TimeElapsedColumn(),) if total is None else (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        hidden = self.as_json or not sys.stderr.isatty()
        with Progress(TextColumn("{task.description}"), *shape, console=self.errors, disable=hidden) as progress:
            task = progress.add_task(what, total=total)
            yield lambda done: progress.update(task, completed=done)

    @staticmethod
    def print_json(document: Any) -> None:
        """Print a document as one line of JSON. An infinity, which a publisher's header may hold, becomes a text."""
        click.echo(json.dumps(json.loads(json.dumps(document, default=str), parse_constant=str)))

    def close(self) -> None:
        self._held.close()


def command(name: str | None = None, **settings: Any) -> Callable[[Callable[..., Answer | None]], click.Command]:
    """Make a function a command. It gets the ``Invocation`` and its options, and its answer is printed."""

    def decorate(function: Callable[..., Answer | None]) -> click.Command:
        @functools.wraps(function)
        def run(outer: Invocation, /, *, as_json: bool, **options: Any) -> None:
            for value in options.values():
                check_text(value)
            url, settings = options.pop("broker"), options.pop("broker_options")
            # An option behind the command overrides one before it.
            url, settings = outer.url if url is None else url, settings or outer.options
            sys.exit(_run(function, replace(outer, url=url, options=settings, as_json=as_json), options))

        as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
        made: click.Command = click.command(name or function.__name__.strip("_"), **settings)(
            as_json(click.pass_obj(run))
        )
        made.params += _naming_a_broker()
        return made

    return decorate


def _naming_a_broker() -> list[click.Parameter]:
    """The options that name a broker, for use behind the command, too."""
    about: list[tuple[str, dict[str, Any]]] = [
        ("--broker", {"metavar": "URL", "help": "The broker's URL, here or before the command."}),
        ("--broker-options", {"metavar": "JSON", "callback": json_object, "help": "Its options, here or before it."}),
    ]
    # The group reads the environment's variable; one more for each command would be a surprise.
    return [click.Option([name], allow_from_autoenv=False, **settings) for name, settings in about]


def _run(function: Callable[..., Answer | None], invocation: Invocation, options: dict[str, Any]) -> int:
    try:
        answer = function(invocation, **options)
        if answer is None:
            return DONE
        _print(invocation, answer)
        return DONE if answer.ok else NOT_DONE
    except KombuFDBError as error:
        return _complain(invocation, error)
    finally:
        invocation.close()


def _print(invocation: Invocation, answer: Answer) -> None:
    """Print the answer. A reader that has gone does not change the exit code: the command did its work."""
    try:
        if invocation.as_json:
            invocation.print_json(answer.document)
            return
        for each in answer.shown:
            invocation.console.print("\n".join(map(plain, each.split("\n"))) if isinstance(each, str) else each)
    except (BrokenPipeError, SystemExit):  # rich's console exits then
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end


def _complain(invocation: Invocation, error: KombuFDBError) -> int:
    """Print the error in one line that names the fix. Returns the exit code."""
    if isinstance(error, InvalidArgument):
        code = WRONG_USAGE
    elif isinstance(error, StoreError) and not isinstance(error, (LimitExceeded, CommitUnknown)):
        code = UNREACHABLE
    else:
        code = NOT_DONE
    text = plain(SECRET.sub("**", str(error)))
    if invocation.as_json:
        click.echo(json.dumps({"error": text, "kind": type(error).__name__, "code": code}))
    else:
        click.echo(f"Error: {text}", err=True)
    return code


# -- what an option takes ----------------------------------------------------------------------------------------------


def rate(text: str) -> float:
    """Messages per second, or as Celery writes rates: 10/s, 100/m, 1000/h."""
    found = rate_of(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is not a rate such as 10, 100/m or 1000/h")
    return found


def duration(text: str) -> float:
    """Seconds, or a number with its unit: 30s, 10m, 12h, 7d."""
    found = formats.seconds_of(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is not a duration such as 90 (seconds), 10m, 12h or 7d")
    return found


def ago(text: str) -> str:
    """The moment so long ago, as a filter takes it."""
    return formats.moment(Clock().wall_ms() - duration(text) * 1000).isoformat()


yes_option = click.option("--yes", is_flag=True, help="Don't ask for confirmation.")


# -- pieces of tables ----------------------------------------------------------------------------------------------


class _Table(Table):
    """A table that is shown row by row, each cell with its heading, if it does not fit into the terminal.

    So no cell is broken. A table without rows says so.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.row_count:
            yield Text("(none)")
            return
        whole = options.update(width=MOST_COLUMNS)
        if self.__rich_measure__(console, whole).maximum <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        for first, *others in zip(*(column.cells for column in self.columns), strict=True):
            yield Text(str(first) or "(no name)", style="bold", overflow="fold")
            headings = [str(column.header) for column in self.columns[1:]]
            named = [f"{heading} {cell}" for heading, cell in zip(headings, others, strict=True) if cell]
            yield from (Text(f"  {line}", overflow="fold") for line in _lines(named, options.max_width - 2))


def _lines(pieces: Iterable[str], width: int) -> list[str]:
    """Lines with as many pieces each as fit."""
    found: list[str] = []
    for piece in pieces:
        if found and len(found[-1]) + 2 + len(piece) <= width:
            found[-1] += f"  {piece}"
        else:
            found.append(piece)
    return found


def table(headings: str, rows: Iterable[Sequence[Any]]) -> Table:
    """``headings``: names between spaces, with ``_`` for a space in a name and ``>`` in front of columns of numbers."""
    made = _Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings.split():
        justify = "right" if heading.startswith(">") else "left"
        made.add_column(heading.removeprefix(">").replace("_", " "), justify=justify, overflow="fold")  # type: ignore[arg-type]  # one of the two
    for row in rows:
        made.add_row(*[plain(number(cell)) for cell in row])
    return made


def number(value: Any) -> str:
    """A cell's text: whole numbers with separators, nothing for None."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
