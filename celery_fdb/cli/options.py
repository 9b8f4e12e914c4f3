"""What options of the command line take. Imports nothing of ours: ``celery`` loads it at every start."""

from __future__ import annotations

import json
from typing import Any

import click


def json_object(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, Any]:
    """The callback of options that take a JSON object; {} for none."""
    del ctx
    try:
        parsed = json.loads(value or "{}")
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise click.BadParameter('not a JSON object, such as {"cluster_file": "/etc/app.cluster"}', param=param)
    return parsed


def check_text(value: Any) -> None:
    """Check that text of the command line is UTF-8, as a store requires. Raises ``click.UsageError``."""
    if isinstance(value, tuple):
        for each in value:
            check_text(each)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise click.UsageError(f"{value!r} is not UTF-8") from None
