"""``python -m celery`` without what other packages hang into it.

``celery`` imports the commands of all packages that have some, and a prompt for its command ``amqp``, before it does
anything: beside Flower (with Redis' client, Tornado and OpenTelemetry) a worker takes twice as long to start, and tests
start hundreds. That it starts with all of this, too, is what ``celery multi`` and the examples show.
"""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType
from typing import Any

_installed = metadata.entry_points


def _without_others(**selected: Any) -> Any:
    found: Any = _installed(**selected)
    if selected.get("group") != "celery.commands":
        return found
    return metadata.EntryPoints(each for each in found if each.module.startswith("celery_fdb"))


def _no_prompt() -> ModuleType:
    module = ModuleType("click_repl")
    module.__dict__["register_repl"] = lambda group: None
    return module


def prepare() -> None:
    """To be called before Celery's commands are imported."""
    vars(metadata)["entry_points"] = _without_others
    sys.modules["click_repl"] = _no_prompt()


def run() -> None:
    from celery.__main__ import main

    main()


if __name__ == "__main__":
    prepare()
    run()
