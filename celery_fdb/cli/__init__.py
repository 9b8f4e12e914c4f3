"""``celery -A proj fdb COMMAND`` and ``python -m celery_fdb --broker URL COMMAND``.

Celery imports this module at every start, even of a worker. So a command's module is imported only when the command is
called, and an error in it can't break ``celery`` itself.

Exit codes: 0 done, 1 not found or refused, 2 wrong usage, 3 the store can't be reached. ``--json`` of each command
prints one document.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click
from click_didyoumean import DYMGroup

from celery_fdb.cli.options import check_text, json_object


class LazyGroup(DYMGroup):
    """A group that imports the module of a command when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(HOMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in HOMES:
            return None
        module = import_module(f"{__name__}.{HOMES[cmd_name]}")
        name = cmd_name.replace("-", "_")
        found = getattr(module, name + "_", None) or getattr(module, name)
        assert isinstance(found, click.Command)
        return found


#: By command, its module in this package, which names it so, or with an underscore behind.
HOMES = {
    "status": "status",
    "top": "status",
    "queues": "status",
    "keys": "status",
    "sessions": "status",
    "peek": "messages",
    "find": "messages",
    "search": "messages",
    "cancel": "messages",
    "run-now": "actions",
    "reschedule": "actions",
    "history": "history",
    "task": "history",
    "pause": "actions",
    "resume": "actions",
    "limit": "actions",
    "dead": "dead",
    "move": "actions",
    "purge": "actions",
    "delete": "actions",
    "publish": "actions",
    "export": "transfer",
    "import": "transfer",
    "metrics": "servers",
    "web": "servers",
    "doctor": "doctor",
    "tour": "tour",
}


@click.group(cls=LazyGroup)
@click.option(
    "--broker", metavar="URL", envvar="CELERY_FDB_BROKER", help="The broker's URL; default: the app's broker_url."
)
@click.option(
    "--broker-options", metavar="JSON", callback=json_object, help="Its options; default: broker_transport_options."
)
@click.pass_context
def fdb(ctx: click.Context, broker: str | None, broker_options: dict[str, Any]) -> None:
    """Inspect and change a celery-fdb broker.

    Every command has --json. Exit codes: 0 done, 1 not found or refused, 2 wrong usage, 3 store unreachable.
    """
    from celery_fdb.cli.terminal import Invocation

    check_text(broker)

    # Celery's own context object has the app and the option for no colours; stand-alone there is none. That of
    # manage.py says, too, which broker the project's settings name.
    parent = ctx.obj
    ctx.obj = Invocation(
        getattr(parent, "app", None),
        broker,
        broker_options,
        no_color=getattr(parent, "no_color", False),
        project=getattr(parent, "fdb_broker", None),
    )
