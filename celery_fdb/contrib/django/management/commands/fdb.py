"""``manage.py fdb COMMAND``: the command line of ``celery -A proj fdb``, for the broker of this project."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from types import SimpleNamespace
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from celery_fdb.cli import fdb
from celery_fdb.contrib.django import conf
from kombu_fdb.errors import OptionError

#: What Django itself reads from the command line, wherever it stands there, before any command does.
_DJANGOS = ("--settings", "--pythonpath")


class Command(BaseCommand):
    help = "Inspect and change the Celery broker: see manage.py fdb --help"
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help="a command of celery fdb, and its arguments")
        parser.prefix_chars = ""  # call_command's parser leaves options to click, also those before the command

    def run_from_argv(self, argv: list[str]) -> None:
        """From the shell: click reads the arguments and ends with its exit code."""
        try:
            self._run(_without_djangos(argv[2:]), prog_name=f"{argv[0]} {argv[1]}")
        except CommandError as error:
            self.stderr.write(str(error), self.style.ERROR)
            raise SystemExit(2) from None
        finally:
            connections.close_all()

    def handle(self, *_: Any, **options: Any) -> None:
        """From ``call_command``: another exit code than 0 is a ``CommandError``."""
        out, err = options.get("stdout") or sys.stdout, options.get("stderr") or sys.stderr
        try:
            with redirect_stdout(out), redirect_stderr(err):
                self._run(options["arguments"], prog_name="manage.py fdb")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
            if code:
                raise CommandError(f"fdb ended with exit code {code}", returncode=code) from None

    def _run(self, arguments: Sequence[str], *, prog_name: str) -> None:
        try:
            settings = conf.read()
            app, broker = conf.app_of_broker(settings), partial(conf.broker_of, settings)
        except OptionError as error:  # no matter where --broker names one
            app, broker = None, partial(_refuse, error)
        around = SimpleNamespace(app=app, no_color=False, fdb_broker=broker)
        fdb.main(args=list(arguments), obj=around, prog_name=prog_name)


def _refuse(error: OptionError) -> tuple[str, dict[str, Any]]:
    raise CommandError(str(error)) from error


def _without_djangos(arguments: Sequence[str]) -> list[str]:
    kept: list[str] = []
    left = iter(arguments)
    for each in left:
        name, is_whole, _ = each.partition("=")
        if name not in _DJANGOS:
            kept.append(each)
        elif not is_whole:
            next(left, None)
    return kept
