"""``manage.py fdb_relay``: publishes what was committed and not published. Exit codes: as ``contrib.outbox``'s."""

from __future__ import annotations

import logging
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from celery_fdb.contrib.outbox.django.database import outbox
from celery_fdb.contrib.outbox.relay import FORMAT, run
from kombu_fdb.errors import InvalidArgument, OptionError


class Command(BaseCommand):
    help = "Publish the outbox's tasks that no process has published yet; you can run several at once"

    def add_arguments(self, parser: CommandParser) -> None:
        about = "database alias; default: the database that the outbox is written to"
        parser.add_argument("--database", choices=list(connections), help=about)
        parser.add_argument("--interval", type=float, default=1.0, help="seconds between looks (default: 1)")
        parser.add_argument("--limit", type=int, default=100, help="rows per batch (default: 100)")
        parser.add_argument("--once", action="store_true", help="publish what is due and exit")
        parser.add_argument("--retry-poison", action="store_true", help="first retry the rows that failed for good")

    def handle(self, *_: Any, **options: Any) -> None:
        if not logging.getLogger("celery_fdb.contrib.outbox").hasHandlers():
            logging.basicConfig(level=logging.INFO, format=FORMAT)
        try:
            box = outbox(options["database"])
            code = run(box, **{name: options[name] for name in ("interval", "limit", "once", "retry_poison")})
        except (OptionError, InvalidArgument) as error:
            raise CommandError(str(error), returncode=2) from error
        if code:
            raise CommandError(f"the relay ended with exit code {code}", returncode=code)
